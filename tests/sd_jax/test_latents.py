"""Precaching, training and drawing in the latents of an autoencoder like that of SD 3.

It has 16 latent channels, no quant convolutions, and latents with a shift.
"""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax import runs
from diffusion_jax.config.settings import Data
from diffusion_jax.data.sources import open_pictures
from diffusion_jax.data.table import Table
from diffusion_jax.devices import sharding
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.precache import lookup
from diffusion_jax.precache.moments import MomentOptions
from diffusion_jax.task import to_range
from diffusion_jax.train import loop
from sd_jax import editing, precache, sampling, start, train
from sd_jax import vae as vae_module
from sd_jax.sampling import colours
from sd_jax.task import example
from sd_jax.vae import VAE
from sd_jax.weights import checkpoints, names
from sd_jax.weights.checkpoints import Checkpoint, VAEPart
from sd_jax.weights.opened import read_vae
from tests.sd_jax import tiny
from tests.sd_jax.cases import vae_weights

SD3 = VAE(**tiny.VAE_FIELDS, latent_channels=16, quant_conv=False)
FIELDS = {
    "vae__latent_channels": 16,
    "vae__quant_conv": False,
    "latents__scale": 1.5305,
    "latents__shift": 0.0609,
    "unet__in_channels": 16,
    "unet__out_channels": 16,
}


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, names.vae_from_torch(vae_weights(SD3), SD3))


@pytest.fixture(scope="module")
def folder(params, tmp_path_factory):
    path = tmp_path_factory.mktemp("vae") / "folder"
    saved = Checkpoint(None, VAEPart(SD3, params), [], scale=1.5305, shift=0.0609)
    checkpoints.save_diffusers(saved, path)
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    digits.write_examples(path, 8, size=tiny.SIZE)
    return path


@pytest.fixture(scope="module")
def stored(folder, images, tmp_path_factory):
    """Return a folder with the moments of the images."""
    out = tmp_path_factory.mktemp("moments")
    s = tiny.settings(folder, data__source="folder", data__path=str(images), **FIELDS)
    assert precache.encode(s, out, MomentOptions(8, 1)) == 8
    return out


def train_losses(folder, workdir, source, path):
    """Return the losses of two training steps."""
    config = tiny.config(folder, data__source=source, data__path=str(path), **FIELDS)
    s, mesh = tiny.read_settings(config.to_dict()), sharding.make_mesh(1, 1, 1)
    workdir.mkdir()
    runs.claim(workdir, config.to_dict())
    inputs = train.prepare(s, mesh)
    with inputs.batches:
        loop.train(inputs, s.run, s.optimizer, mesh, workdir, {})
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
@pytest.mark.gate
def test_stored_moments_have_32_channels_and_training_on_them_repeats_that_on_images(
    folder, params, images, stored, tmp_path
):
    records = Table(stored, str(stored)).read(range(8))
    moments = np.stack([np.load(io.BytesIO(record.image)) for record in records])
    pictures = open_pictures(Data("folder", path=str(images)), tiny.SIZE).usable(np.arange(8))[1]
    expected = SD3.apply(params, to_range(pictures), method="encode")
    assert moments.shape == (8, 32, 4, 4)
    np.testing.assert_allclose(moments.transpose(0, 2, 3, 1), expected, atol=1e-5)
    losses = train_losses(folder, tmp_path / "a", "moments", stored)
    assert len(losses) == 2
    again = train_losses(folder, tmp_path / "b", "folder", images)
    np.testing.assert_allclose(losses, again, rtol=1e-5)  # Other programs encode the images.


def test_latents_are_shifted_and_scaled_in_training_editing_decoding_and_previews(params):
    s = tiny.settings(**FIELDS)
    p, keys = s.pipeline, jax.random.split(jax.random.key(0), 2)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, 8, 8, 3), np.uint8)
    task, batch = example(s, lookup.open_encoder(s.text))
    assert batch["image"].shape == (1, 8, 8, 3) and task.frozen["vae"]["params"].keys() == {"encoder", "decoder"}
    system = sampling.StableDiffusion(p, lookup.open_encoder(s.text))
    moments = SD3.apply(params, to_range(images), method="encode")
    plain = sampling.posterior_sample(keys, moments)
    target = system.target({"vae": params}, {"image": jnp.asarray(images)}, keys)
    np.testing.assert_allclose(target, (plain - 0.0609) * 1.5305, atol=1e-5)

    x = jnp.asarray(rng.standard_normal((2, 4, 4, 16), np.float32))
    decoded = system.decode({"vae": params}, {}, x)
    expected = SD3.apply(params, x / 1.5305 + 0.0609, method="decode")
    np.testing.assert_allclose(decoded, expected, atol=1e-5)

    mean, _ = vae_module.mean_and_std(moments)
    edited = {}
    wrap = lambda sampler, z, *rest: edited.setdefault("z", z)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(editing.editing, "wrap", wrap)
        editing.editor(p, params, {"image": jnp.asarray(images)}, keys)(None)
    np.testing.assert_allclose(edited["z"], (mean - 0.0609) * 1.5305, atol=1e-5)

    _, grey = colours(p, params)
    flat = jnp.full((1, 4, 4, 16), 0.0609)
    expected = SD3.apply(params, flat, method="decode").mean((0, 1, 2))
    np.testing.assert_allclose(grey, expected, atol=1e-5)


def test_start_writes_the_fields_of_the_autoencoder(folder):
    changes = {name: value for name, (value, _) in start.vae_fields(str(folder)).items()}
    assert changes["vae.latent_channels"] == changes["unet.in_channels"] == 16
    assert (changes["latents.scale"], changes["latents.shift"]) == (1.5305, 0.0609)
    assert changes["vae.quant_conv"] is False and changes["vae.channel_mult"] == (1, 2)


def test_an_autoencoder_of_another_structure_than_the_config_is_an_error(folder):
    message = "latent_channels is 16 in the file, but 4 in the config; quant_conv is False in"
    with pytest.raises(ValueError, match=message):
        read_vae(folder, VAE(**tiny.VAE_FIELDS))
