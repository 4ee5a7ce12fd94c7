"""The low-resolution image: downscaling, noise augmentation, and the network's input."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from configs import quickstart_sr
from diffusion_jax.diffusion import precond, samplers
from diffusion_jax.precache import lookup
from diffusion_jax.task import to_range
from imagen_jax import super_resolution, task
from imagen_jax.settings import read_settings
from tests.changes import change
from tests.diffusion_jax import training_noise

CAPTIONS = ["a red seven on gray paper", "a blue three on white paper"] * 32


def settings(**changes):
    """Settings of a model from 4x4 to 16x16. unet__noise_aug=False sets config.unet.noise_aug."""
    c = quickstart_sr.get_config()
    c.unet.update(image_size=16, patch=2, embed_dim=32, head_dim=32, cond_dim=32)
    c.diffusion.update(predicts="edm")
    c.sampler.update(threshold="none")
    c.text.drop_prob = 0.0
    return read_settings(change(c, changes).to_dict())


def seen_by(s, run):
    """Call run(task) with a recording network. Return its result and the network's inputs."""
    calls = []

    def apply(params, x, time, text, text_mask, low_res, low_res_time=None):
        calls.append((x, time, low_res, low_res_time))
        return jnp.repeat(jnp.repeat(low_res, 4, axis=1), 4, axis=2)

    unet = types.SimpleNamespace(image_size=s.unet.image_size, noise_aug=s.unet.noise_aug, apply=apply)
    encoder = lookup.open_encoder(s.text)
    made = task.make_task(s._replace(unet=unet), encoder)
    return run(made, encoder), calls


def images(size, number=64):
    return np.random.default_rng(0).integers(0, 256, (number, size, size, 3), np.uint8)


def test_shrink_matches_pillow_and_does_not_clip():
    large = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
    small = np.asarray(super_resolution.shrink(jnp.asarray(large), 4))
    for image, expected in zip(large, small, strict=True):
        for channel in range(3):
            plane = Image.fromarray(image[..., channel]).resize((8, 8), Image.Resampling.BICUBIC)
            np.testing.assert_allclose(expected[..., channel], np.asarray(plane), atol=1e-5)
    step = np.where(np.arange(32) < 15, -1.0, 1.0).astype(np.float32)
    edge = jnp.asarray(np.broadcast_to(step[None, None, :, None], (1, 32, 32, 3)))
    assert super_resolution.shrink(edge, 4).max() > 1.01


def test_noise_augmentation_uses_edms_scaling():
    """EDM: (y + s z) / sqrt(s^2 + sigma_data^2) and ln(s) / 4 (Karras et al. 2022, Table 1)."""
    rng = np.random.default_rng(0)
    y, z = rng.normal(size=(2, 3, 4, 4, 3)).astype(np.float32)
    s = np.array([0.01, 0.3, 5.0], np.float32)
    low = super_resolution.with_noise(*map(jnp.asarray, (y, s, z)), precond.edm(0.5))
    column = s[:, None, None, None]
    np.testing.assert_allclose(low["low_res"], (y + column * z) / np.sqrt(column**2 + 0.25), rtol=1e-5)
    np.testing.assert_allclose(low["low_res_time"], np.log(s) / 4, rtol=1e-6)


def train(made, encoder):
    batch = {"image": jnp.asarray(images(16)), **encoder.tokenize(CAPTIONS)}
    return made.loss({}, {"text": ()}, batch, training_noise.keys_of(64))


def test_training_draws_a_separate_noise_level_for_each_low_res_image():
    s = settings()
    _, [(x, time, low, low_time)] = seen_by(s, train)
    sigma = np.exp(4 * np.asarray(low_time))
    assert 0.7 < np.log(sigma).std() / s.diffusion.p_std < 1.3
    assert abs(np.log(sigma).mean() - s.diffusion.p_mean) < 0.6
    assert abs(np.corrcoef(low_time, time)[0, 1]) < 0.4
    clean = super_resolution.shrink(to_range(images(16)), 4)
    column = sigma[:, None, None, None]
    noise = (np.asarray(low) * np.sqrt(column**2 + 0.25) - clean) / column
    assert abs(noise.std() - 1) < 0.05 and abs(noise.mean()) < 0.05
    assert x.shape == (64, 16, 16, 3) and low.shape == (64, 4, 4, 3)


def test_without_noise_augmentation_the_network_sees_the_clean_low_res_image():
    _, [(_, _, low, low_time)] = seen_by(settings(unet__noise_aug=False), train)
    clean = super_resolution.shrink(to_range(images(16)), 4)
    np.testing.assert_allclose(low, clean, atol=1e-6)
    assert low_time is None


def draw(small, keys):
    def run(made, encoder):
        texts = encoder.tokenize(CAPTIONS[: len(small)])
        return made.sample({}, {"text": ()}, {"low_res": small, **texts}, keys, None)

    return run


def test_sampling_adds_noise_of_aug_sigma_to_the_low_res_image_once():
    """The network returns its low-res input as x0, so it becomes the sample."""
    s = settings(diffusion__predicts="x0", super_resolution__aug_sigma=0.3)
    small = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (3, 5, 6, 3)), jnp.float32)
    keys = jax.random.split(jax.random.key(1), 3)
    drawn, _ = seen_by(s, draw(small, keys))
    assert drawn.shape == (3, 20, 24, 3)  # Any size works, not only that of training.
    _, low_keys = super_resolution.own_keys(keys, 20)
    noise = samplers.initial_noise(low_keys, (5, 6, 3), jnp.ones(()))
    expected = np.asarray((small + 0.3 * noise) / np.sqrt(1 + 0.3**2))
    np.testing.assert_allclose(drawn[:, ::4, ::4], expected, atol=1e-5)
    assert 0.8 < np.asarray(noise).std() < 1.2


def test_a_super_resolution_sample_depends_only_on_its_own_key():
    s = settings(diffusion__predicts="x0", super_resolution__aug_sigma=0.3)
    small = jnp.zeros((3, 4, 4, 3))
    keys = jax.random.split(jax.random.key(1), 3)
    together, _ = seen_by(s, draw(small, keys))
    alone, _ = seen_by(s, draw(small[1:2], keys[1:2]))
    np.testing.assert_allclose(alone[0], together[1], atol=1e-6)
    assert np.abs(together[0] - together[1]).max() > 0.1


def test_stages_draw_independent_noise_from_one_seed():
    keys = jax.random.split(jax.random.key(1), 2)
    all_keys = [*super_resolution.own_keys(keys, 256), *super_resolution.own_keys(keys, 1024), keys]
    draws = [np.asarray(samplers.initial_noise(k, (8, 8, 3), jnp.ones(()))).ravel() for k in all_keys]
    apart = np.corrcoef(draws) - np.eye(5)
    assert np.abs(apart).max() < 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"super_resolution__factor": 3}, "factor is 3: it must divide unet.image_size 16"),
        ({"super_resolution__factor": 1}, "factor is 1, but unet.low_res is True"),
        ({"unet__low_res": False, "unet__noise_aug": False}, "but unet.low_res is False"),
        ({"data__resize": 8}, "data.resize is 8: set it to 0, or to a multiple of 4 that"),
        ({"data__resize": 18}, "data.resize is 18: set it to 0, or to a multiple of 4"),
        ({"super_resolution__factor": 2, "evaluation__every": 8}, "cannot draw from prompts alone"),
    ],
)
def test_super_resolution_settings_that_do_not_fit_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)
