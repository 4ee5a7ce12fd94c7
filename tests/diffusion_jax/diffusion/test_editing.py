"""Drawing over a picture, by every sampler: only the masked part changes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.diffusion import editing, grids, samplers

KEYS = jax.random.split(jax.random.key(0), 2)
SHAPE = (4, 4, 3)
IMAGE = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (2, *SHAPE)), jnp.float32)
NEW = jnp.zeros((2, 4, 4, 1), bool).at[:, :2].set(True)
SIGMAS = grids.karras_sigmas(6, 0.02, 20.0)
EPS = samplers.initial_noise(KEYS, SHAPE, 1)
NOISE = samplers.gaussian_noise(KEYS, SHAPE)
FIELDS = {"eta": 0.5, "churn": 0.0}


def gaussian(x, sigma):
    """The ideal denoiser D of pixels from N(0.3, 0.5^2)."""
    share = 0.25 / (0.25 + sigma**2)
    return 0.3 + share[:, None, None, None] * (x - 0.3)


def sampler_of(name):
    return samplers.make(SimpleNamespace(name=name, **FIELDS)).sampler


@pytest.fixture(scope="module", params=samplers.SAMPLERS)
def drawn(request):
    """Results of one sampler: plain, from the last half of the steps, and over the picture."""
    sampler, x = sampler_of(request.param), SIGMAS[0] * EPS
    edited = lambda *kind: editing.wrap(sampler, IMAGE, EPS, *kind)(gaussian, x, SIGMAS, NOISE)

    @jax.jit
    def draw():
        cut = sampler(gaussian, IMAGE + SIGMAS[3] * EPS, SIGMAS[3:], NOISE)
        plain = sampler(gaussian, x, SIGMAS, NOISE)
        return plain, cut, edited(1.0), edited(0.5, NEW), edited(0.0)

    return draw()


@pytest.mark.parametrize(
    ("strength", "steps", "taken"),
    [(0.75, 50, 37), (0.58, 50, 28), (0.3, 4, 1), (0.1, 4, 0), (0.99, 6, 5), (1.0, 7, 7)],
)
def test_strength_selects_as_many_steps_as_in_diffusers(strength, steps, taken):
    """get_timesteps of diffusers takes min(int(steps * strength), steps)."""
    ends = lambda denoise, x, sigmas, noise: x + sigmas[0]
    drawn = editing.wrap(ends, 0 * IMAGE, 0 * EPS, strength)(None, 0 * IMAGE, jnp.arange(steps, -1.0, -1.0), None)
    assert editing.steps_taken(strength, steps) == taken == drawn.max()


def test_strength_1_equals_plain_sampling_and_strength_0_keeps_the_picture(drawn):
    plain, _, all_new, _, none = drawn
    np.testing.assert_allclose(all_new, plain, atol=1e-6)
    np.testing.assert_array_equal(none, IMAGE)
    assert float(jnp.abs(plain - IMAGE).max()) > 0.5


def test_known_pixels_are_kept_exactly_and_new_ones_come_from_the_last_steps(drawn):
    """This D treats each pixel alone, so the known part does not influence the new one."""
    _, cut, _, edited, _ = map(np.asarray, drawn)
    known = ~np.broadcast_to(NEW, IMAGE.shape)
    np.testing.assert_array_equal(edited[known], np.asarray(IMAGE)[known])
    np.testing.assert_allclose(edited[~known], cut[~known], atol=1e-6)
    assert np.abs(edited - np.asarray(IMAGE))[~known].max() > 0.1


@pytest.mark.parametrize("name", ["ddim", "heun", "plms", "dpmpp_2m_sde"])
def test_the_network_sees_known_pixels_with_noise_of_the_current_level(name):
    """At every evaluation, their mean is the picture and their standard deviation is sigma."""
    shape, seen = (64, 64, 3), []
    image, new = jnp.full((2, *shape), 0.5), jnp.zeros((2, 64, 64, 1), bool).at[:, :1].set(True)

    def watched(x, sigma):
        jax.debug.callback(lambda x, s: seen.append((np.asarray(x)[:, 1:], float(s))), x, sigma[0])
        return gaussian(x, sigma)

    eps, noise = samplers.initial_noise(KEYS, shape, 1), samplers.gaussian_noise(KEYS, shape)
    sampler = samplers.make(SimpleNamespace(name=name, eta=1.0, churn=0.0)).sampler
    edited = editing.wrap(sampler, image, eps, 0.9, new)
    jax.block_until_ready(edited(watched, SIGMAS[0] * eps, SIGMAS, noise))
    jax.effects_barrier()
    assert len(seen) >= 5
    for x, sigma in seen:
        assert abs(x.mean() - 0.5) < 0.04 * sigma + 1e-5  # 24,000 pixels: six deviations.
        assert x.std() == pytest.approx(sigma, rel=0.05)
