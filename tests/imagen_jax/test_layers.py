"""Bicubic enlargement against torch."""

import pathlib

import jax.numpy as jnp
import numpy as np

from imagen_jax.layers import bicubic_upsample

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"


def test_bicubic_upsample_matches_torch():
    z = np.load(FIXTURES / "diffusion_functions.npz")
    x = jnp.moveaxis(z["bicubic/in"], 1, -1)  # [1, 5, 7, 2]
    expected = np.moveaxis(z["bicubic/up4_unet"], 1, -1)
    np.testing.assert_allclose(bicubic_upsample(x, 20, 28), expected, atol=2e-6)


def test_bicubic_upsample_to_the_same_size_is_exact():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 7, 3)), jnp.float32)
    np.testing.assert_array_equal(bicubic_upsample(x, 5, 7), x)
