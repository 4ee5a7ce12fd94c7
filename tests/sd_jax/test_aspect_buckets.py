"""Stable Diffusion with aspect buckets: moments of several shapes, and training on them."""

import jax
import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config.settings import Data
from diffusion_jax.data import aspect_buckets, decoding
from diffusion_jax.data.sources import moments
from diffusion_jax.devices import sharding
from diffusion_jax.precache.moments import MomentOptions
from diffusion_jax.task import to_range
from diffusion_jax.text import hashed
from sd_jax import precache, train
from tests import written_runs
from tests.diffusion_jax import training_noise
from tests.sd_jax import tiny

SHAPES = ((8, 8), (4, 16))


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return tiny.write_vae(tmp_path_factory.mktemp("vae") / "vae.safetensors")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Write seven square and six wide pictures of random colours."""
    path, rng = tmp_path_factory.mktemp("mixed"), np.random.default_rng(0)
    for number in range(13):
        pixels = rng.integers(0, 256, (10, (11, 44)[number % 2], 3), np.uint8)
        Image.fromarray(pixels).save(path / f"{number:02}.png")
        (path / f"{number:02}.txt").write_text(f"picture {number}")
    return path


@pytest.fixture(scope="module")
def stored(tmp_path_factory, vae, images):
    out = tmp_path_factory.mktemp("moments")
    assert precache.encode(settings(vae, images), out, MomentOptions(5, 1)) == 13
    return out


def settings(vae, images, **changes):
    data = {"data__source": "folder", "data__path": str(images), "data__aspect_buckets": SHAPES}
    return tiny.settings(vae, **{**data, **changes})


def open_batches(vae, path, **changes):
    s = settings(vae, path, **changes)
    encoder = hashed.encoder(s.text.width, s.text.max_tokens)
    return train.open_batches(s, encoder, tiny.vae_params(), sharding.make_mesh(1, 1, 1))


def test_stored_moments_equal_the_encoded_cropped_pictures(vae, images, stored):
    s = tiny.settings(vae)
    encode = jax.jit(lambda p, x: s.vae.apply(p, x, method="encode"))
    pictures = open_batches(vae, images)
    latents = open_batches(vae, stored, data__source="moments")
    seen = set()
    with pictures, latents:
        for _ in range(4):
            batch = next(latents)
            number = latents.indices([0])[0]
            height, width = batch["moments"].shape[1:3]
            seen.add((2 * height, 2 * width))
            text = latents.pictures.texts(np.array([number]))[0]
            assert latents.texts([0]) == [text]
            assert latents.names([0]) == [f"{int(text.split()[1]):02}.png"]
            file = images / f"{int(text.split()[1]):02}.png"
            picture = decoding.crop(file.read_bytes(), (2 * height, 2 * width))
            expected = encode(tiny.vae_params(), to_range(picture[None]))[0]
            np.testing.assert_allclose(batch["moments"][0], expected, atol=1e-5)
        assert {next(pictures)["image"].shape[1:3] for _ in range(4)} == set(SHAPES)
    assert seen == set(SHAPES)


def test_training_batches_have_every_shape_with_finite_losses(vae, stored):
    s = settings(vae, stored, data__source="moments")
    mesh = sharding.make_mesh(1, 1, 1)
    inputs = train.prepare(s, mesh)
    with inputs.batches as batches:
        losses = {}
        loss = jax.jit(inputs.task.loss)
        params = written_runs.random_params(inputs.task.init)
        for batch in batches.examples():
            keys = training_noise.keys_of(len(batch["moments"]))
            value, _ = loss(params, inputs.task.frozen, batch, keys)
            losses[batch["moments"].shape[1:3]] = float(value)
    assert set(losses) == {(4, 4), (2, 8)} and all(np.isfinite(v) for v in losses.values())


def test_moments_stored_for_other_aspect_buckets_are_errors(vae, images, stored):
    with pytest.raises(ValueError, match=r"buckets: .* stored, ..8, 8.. requested"):
        open_batches(vae, stored, data__source="moments", data__aspect_buckets=((8, 8),))
    with pytest.raises(ValueError, match=r"buckets: .* stored, None requested"):
        open_batches(vae, stored, data__source="moments", data__aspect_buckets=())
    with pytest.raises(ValueError, match=r"data.heldout is 0.5"):
        settings(vae, stored, data__source="moments", data__heldout=0.5)
    content = moments.write(np.zeros((2, 8, 8), np.float32))
    assert moments.size_of(content, factor=2) == (4, 16)
    assert moments.size_of(content[:20], factor=2) == (0, 0)
    assert aspect_buckets.nearest(np.array([[4, 16]]), SHAPES).tolist() == [1]
    assert Data("folder").aspect_buckets == ()
