"""Extractors on a mesh: results do not depend on batches, devices or processes.

The two processes have four of eight CPU devices each.
"""

import warnings

import jax
import numpy as np
import pytest

from diffusion_jax.devices.sharding import make_mesh
from diffusion_jax.metrics import extractors, inception
from tests import processes
from tests.diffusion_jax.metrics import toy


def pictures(n=67):
    return np.random.default_rng(0).integers(0, 256, (n, 10, 14, 3), np.uint8)


class Watched(toy.InMemory):
    """A source in which every fifth row is broken. `seen` holds the rows that were read."""

    def __init__(self, rows):
        super().__init__(rows)
        self.seen = set()

    def read(self, indices):
        self.seen |= set(indices.tolist())
        return self._rows[indices], (indices % 5 == 0).astype(np.uint8)

    def reason(self, status):
        return f"status_{status}"


def test_features_do_not_depend_on_the_batch_size_or_the_number_of_devices():
    images = toy.InMemory(pictures())
    expected = np.asarray(toy.apply(toy.extractor().params, toy.prepare(pictures())))
    for devices, batch in ((1, 7), (2, 7), (8, 64), (8, 7), (1, 64)):
        mesh = make_mesh(devices=jax.devices()[:devices])
        taken = extractors.extract(toy.extractor(), images, mesh, batch_size=batch)
        np.testing.assert_allclose(taken.stream.features(), expected, atol=1e-6)
        assert (taken.stream.n, taken.skipped) == (67, {})


def test_skipped_images_are_counted_by_reason():
    images = pictures().astype(np.float32)
    images[3, 5, 5, 1], images[11, 0, 0, 0] = np.nan, np.inf
    source, done = Watched(images), []
    taken = extractors.extract(toy.extractor(), source, make_mesh(), batch_size=20, progress=done.append)
    assert taken.skipped == {"status_1": 14, "not_finite": 2}
    left = [i for i in range(67) if i % 5 and i not in (3, 11)]
    expected = np.asarray(toy.apply(toy.extractor().params, toy.prepare(images[left])))
    np.testing.assert_allclose(taken.stream.features(), expected, atol=1e-6)
    assert done == [20, 40, 60, 67]


def test_an_image_with_nan_is_skipped_even_if_its_features_are_finite():
    images = pictures(4).astype(np.float32)
    images[2, 0, 0, 0] = np.nan
    hides = toy.extractor(apply=lambda params, x: jax.numpy.ones((len(x), toy.WIDTH)))
    assert extractors.extract(hides, toy.InMemory(images), make_mesh()).skipped == {"not_finite": 1}


def test_inception_extractors_have_the_name_of_their_level_and_preprocessing():
    weights = extractors.InceptionWeights({}, "abc", official=True)
    whole = extractors.inception_extractor(weights, "clean")
    assert (whole.name, whole.width, whole.preprocessing, whole.official) == ("inception", 2048, "clean", True)
    part = extractors.inception_extractor(weights, "tf", "768")
    assert (part.name, part.width, part.official) == ("inception_768", 768, False)
    with pytest.raises(ValueError, match="no preprocessing 'pil': choose from pytorch, tf, clean"):
        extractors.inception_extractor(weights, "pil")
    with pytest.raises(ValueError, match="no level '100': choose from 64, 192, 768, 2048, logits"):
        extractors.inception_extractor(weights, level="100")


def test_features_of_several_levels_are_concatenated(monkeypatch):
    """Here, the features of a level equal the number of letters in its name."""
    level = lambda outputs, name: jax.numpy.full((len(outputs), inception.LEVELS[name]), float(len(name)))
    monkeypatch.setattr(inception, "apply", lambda params, x: x)
    monkeypatch.setattr(inception, "level", level)
    weights = extractors.InceptionWeights({}, "abc", official=True)
    several = extractors.inception_extractor(weights, level="2048+64")
    assert (several.width, several.official) == (2048 + 64, True)
    parts = extractors.split(several, np.asarray(several.apply({}, np.zeros((3, 2)))))
    assert {name: rows.shape for name, rows in parts.items()} == {"inception": (3, 2048), "inception_64": (3, 64)}
    assert (parts["inception"] == 4).all() and (parts["inception_64"] == 2).all()


def test_two_processes_read_half_the_images_each_and_get_all_features(tmp_path):
    assert processes.run_all(2, process, tmp_path, devices=4) == [0, 0]
    one = extractors.extract(toy.extractor(), Watched(pictures()), make_mesh(), batch_size=16)
    seen = []
    for i in range(2):
        with np.load(tmp_path / f"{i}.npz") as arrays:
            np.testing.assert_allclose(arrays["features"], one.stream.features(), atol=1e-6)
            seen.append(set(arrays["seen"].tolist()))
    assert seen[0] | seen[1] == set(range(67)) and seen[0] & seen[1] <= {66}  # Row 66 also fills up the last batch.


def process(index, folder):
    warnings.simplefilter("error")
    source = Watched(pictures())
    taken = extractors.extract(toy.extractor(), source, make_mesh(), batch_size=16)
    seen = sorted(source.seen)
    np.savez(folder / f"{index}.npz", features=taken.stream.features(), seen=seen)
