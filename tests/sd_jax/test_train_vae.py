"""Training the autoencoder: its loss against formulas, a whole run, and errors."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import sd_quickstart_vae
from diffusion_jax import runs
from diffusion_jax.devices import sharding
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.train import loop
from diffusion_jax.weights import restore
from sd_jax import start, train_vae
from sd_jax.weights import checkpoints, names, opened
from tests.changes import change
from tests.diffusion_jax import training_noise
from tests.sd_jax import tiny


def config(**changes):
    """Return the tiny VAE's config on 8x8 digits. reconstruction__kl=1.0 sets reconstruction.kl."""
    c = sd_quickstart_vae.get_config()
    c.vae.update(tiny.VAE_FIELDS, latent_channels=4)
    c.reconstruction.image_size = tiny.SIZE
    c.optimizer.update(warmup=5, lr=2e-3)
    c.update(steps=20, batch_size=8, log_every=1, sample_every=20, save_every=20)
    return change(c, changes)


def read(**changes):
    return train_vae.read_settings(config(**changes).to_dict())


@pytest.mark.parametrize(("distance", "power"), [("l1", 1), ("l2", 2)])
def test_the_loss_is_the_reconstruction_error_plus_the_weighted_divergence(distance, power):
    s = read(reconstruction__distance=distance, reconstruction__kl=0.1)
    params = jax.tree.map(jnp.asarray, tiny.vae_params())
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
    keys, x = training_noise.keys_of(2), images / 127.5 - 1
    loss, metrics = jax.jit(train_vae.make_task(s).loss)(params, (), {"image": images}, keys)
    encode, decode = (jax.jit(functools.partial(s.vae.apply, method=m)) for m in ("encode", "decode"))
    moments = encode(params, jnp.float32(x))
    mean, log_variance = np.split(np.float64(moments), 2, axis=-1)
    draw = np.float64(training_noise.normal(keys, 1, 64)).reshape(mean.shape)
    z = mean + np.exp(log_variance / 2) * draw
    decoded = np.float64(decode(params, jnp.float32(z)))
    error = (np.abs(decoded - x) ** power).mean()
    kl = (mean**2 + np.exp(log_variance) - 1 - log_variance).sum() / 2 / images.size
    actual = [loss, metrics["reconstruction"], metrics["kl"], metrics["latent_std"]]
    np.testing.assert_allclose(actual, [error + 0.1 * kl, error, kl, z.std()], rtol=1e-5)


def test_the_divergence_matches_the_formula_for_normal_distributions():
    """It is 9 / 2 for N(3, 1), and (e^2 - 1) / 2 - 1 for N(0, e^2), both from N(0, 1)."""
    moments = jnp.array([[3.0, 0.0], [0.0, 2.0]]).reshape(2, 1, 1, 2)
    np.testing.assert_allclose(train_vae.divergence(moments), [4.5, (np.e**2 - 1) / 2 - 1], rtol=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return (workdir, metrics of each step) of 20 steps on the same eight pictures."""
    workdir, pictures = (tmp_path_factory.mktemp(name) for name in ("vae", "pictures"))
    digits.write_examples(pictures, 8, size=tiny.SIZE)
    c = config(data__source="folder", data__path=str(pictures), vae__channel_mult=(1,))
    s = train_vae.read_settings(c.to_dict())
    runs.claim(workdir, c.to_dict())
    mesh = sharding.make_mesh(1, 1, 1)
    inputs = train_vae.prepare(s, mesh)
    with inputs.batches:
        loop.train(inputs, s.run, s.optimizer, mesh, workdir, {})
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return workdir, [json.loads(line) for line in lines]


@pytest.mark.gate
@pytest.mark.slow
def test_training_the_vae_reduces_its_reconstruction_error(run):
    workdir, lines = run
    errors = [line["reconstruction"] for line in lines]
    assert np.mean(errors[-5:]) < 0.8 * np.mean(errors[:5]), errors
    assert all(line["latent_std"] > 0 for line in lines)
    assert list((workdir / "samples").glob("*.png"))


@pytest.mark.gate
@pytest.mark.slow
def test_a_vae_workdir_is_loaded_with_its_average_weights(run, tmp_path):
    vae = read(vae__channel_mult=(1,)).vae
    params = opened.read_vae(run[0], vae)
    folder, abstract = run[0] / runs.CHECKPOINTS, names.abstract_vae(vae)
    raw, average = (restore.load_params(folder, abstract, ema) for ema in ("raw", "0.99"))
    jax.tree.map(np.testing.assert_array_equal, params, average)
    assert not np.array_equal(jax.tree.leaves(raw)[0], jax.tree.leaves(params)[0])
    first = restore.steps(folder)[0]
    part = opened.open_checkpoint(f"{run[0]}@{first}", ema="raw").vae
    assert part and part.network == vae
    expected = restore.load_params(folder, abstract, "raw", first)
    jax.tree.map(np.testing.assert_array_equal, part.params, expected)
    whole = opened.open_checkpoint(run[0])
    checkpoints.save_diffusers(whole, tmp_path / "d")
    assert checkpoints.equal(checkpoints.load(tmp_path / "d"), whole) and whole.unet is None
    changes = start.vae_fields(str(run[0]))
    assert changes["vae.channel_mult"] == ((1,), "") and changes["latents.scale"] == (1.0, "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reconstruction__image_size": 7}, "image_size is 7: it must be a multiple of 2"),
        ({"reconstruction__kl": 2.0}, "reconstruction.kl is 2.0: it must be from 0 to 1"),
        ({"data__source": "moments", "data__path": "x"}, "name a source of images, such as"),
        ({"vae__width": 48}, "vae.width * 1 is 48: it must be a multiple of 32"),
    ],
)
def test_inconsistent_vae_settings_are_errors_that_name_the_fields(changes, message):
    with pytest.raises(ValueError) as error:
        read(**changes)
    assert message in str(error.value)
