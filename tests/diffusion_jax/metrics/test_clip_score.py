"""CLIP's towers as extractors: scores against open_clip, pairs of image and text, errors."""

import hashlib

import jax
import numpy as np
import pytest

from diffusion_jax.devices.sharding import make_mesh
from diffusion_jax.metrics import clip_score, clip_towers, extractors
from tests.diffusion_jax.metrics import standin, toy
from tests.diffusion_jax.text import tiny_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_weights.clip_folder(tmp_path_factory.mktemp("clip") / "tiny", "open_clip")


def test_clip_scores_match_open_clip(folder):
    """Scores saved from open_clip 3.3, for every pair of image and text."""
    model, case = clip_towers.load(folder), tiny_weights.case("open_clip")
    ids = case["ids"].astype(np.int32)
    texts = np.asarray(jax.jit(model.text.apply)(model.text.params, ids))
    pixels = case["image"].transpose(0, 2, 3, 1)
    images = np.asarray(jax.jit(model.image.apply)(model.image.params, pixels))
    for row, expected in zip(images, case["clip_score"], strict=True):
        pairs = np.repeat(row[None], len(texts), 0)
        cosines = clip_score.cosines(pairs, texts)
        np.testing.assert_allclose(cosines[:, 0], expected, atol=1e-5)
        assert clip_score.score(cosines).value == pytest.approx(expected.mean(), abs=1e-5)


def test_the_extractors_embed_images_and_texts_and_reject_unequal_numbers(folder):
    model, mesh = (clip_towers.load(folder, preprocessing="squash"), make_mesh(devices=jax.devices()[:1]))
    assert (model.image.name, model.image.width, model.text.width) == ("clip_tiny", 20, 20)
    assert model.image.weights == model.text.weights and len(model.image.weights) == 64
    assert (model.image.preprocessing, model.image.official) == ("squash", False)
    pictures = np.stack([standin.picture(30, 20), standin.picture(30, 20)[::-1]])
    run = lambda tower, rows: extractors.extract(tower, toy.InMemory(rows), mesh).stream.features()
    images, texts = run(model.image, pictures), run(model.text, model.tokenize(["a b", "c"]))
    assert clip_score.cosines(images, texts).shape == (2, 1)
    np.testing.assert_allclose(np.linalg.norm(clip_score.normalised(images), axis=1), 1, rtol=1e-6)
    with pytest.raises(ValueError, match=r"shape \(2, 20\) and .* \(1, 20\) are not pairs"):
        clip_score.cosines(images, texts[:1])


def test_the_digest_comes_from_safetensors_if_both_files_exist(tmp_path):
    digest = lambda: clip_towers._digest(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"one")
    assert digest() == hashlib.sha256(b"one").hexdigest()
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert digest() == hashlib.sha256(b"two").hexdigest()


def test_an_unknown_preprocessing_of_clip_is_an_error(folder):
    with pytest.raises(ValueError, match="CLIP has no preprocessing 'clean': choose from open_clip"):
        clip_towers.load(folder, preprocessing="clean")
