"""The same seed gives the same picture in every version. Fixtures hold pixels of each sampler."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.diffusion import samplers

FIELDS = {"eta": 0.5, "churn": 40.0, "s_noise": 1.003, "s_min": 0.0, "s_max": 1e9}
SIGMAS = jnp.array([4.0, 2.0, 1.0, 0.5, 0.2, 0.0])
# The first three numbers of a picture of seed 3, for normal pixels with mean 0.3 and deviation 0.5.
SAVED = {
    "heun": (0.413494, 0.601862, 0.258206),
    "euler": (-0.223002, 0.324906, 0.117037),
    "euler_ancestral": (0.297553, 0.511618, 0.332098),
    "dpm2": (-0.343133, 0.330627, 0.075012),
    "dpm2_ancestral": (0.142594, 0.753046, 0.323448),
    "ddim": (-0.074184, 0.498967, 0.174261),
    "ddpm": (0.297553, 0.511618, 0.332098),
    "lcm": (0.392832, 0.381872, 0.331272),
    "plms": (-0.379769, 0.332372, 0.062195),
    "plms_v": (-0.288056, 0.299765, 0.076754),
    "lms": (-0.313749, 0.329228, 0.085291),
    "dpmpp_2s": (-0.271538, 0.327218, 0.100058),
    "dpmpp_2m": (-0.305706, 0.328845, 0.088105),
    "unipc": (-0.320078, 0.329529, 0.083077),
    "deis": (-0.283311, 0.327778, 0.095939),
    "dpmpp_2m_sde": (0.694700, 0.791509, 0.790185),
    "dpmpp_3m_sde": (0.623621, 0.962349, 0.905493),
    "restart": (0.320447, 0.315145, 0.233745),
}


def draw(name):
    keys = jax.random.split(jax.random.key(3), 2)
    sampler = samplers.make(SimpleNamespace(name=name, **FIELDS)).sampler

    def denoise(x, sigma):
        share = 0.25 / (0.25 + sigma**2)
        return 0.3 + share[:, None, None, None] * (x - 0.3)

    x = samplers.initial_noise(keys, (2, 2, 3), SIGMAS[0])
    noise = samplers.gaussian_noise(keys, (2, 2, 3))
    return np.asarray(jax.jit(lambda x: sampler(denoise, x, SIGMAS, noise))(x))


@pytest.mark.parametrize("name", samplers.SAMPLERS)
def test_a_sampler_draws_the_saved_pixels_from_a_fixed_seed(name):
    np.testing.assert_allclose(draw(name)[1].ravel()[:3], SAVED[name], atol=1e-5)
