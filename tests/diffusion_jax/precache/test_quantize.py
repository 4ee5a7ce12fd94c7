"""Quantization to eight bits: errors of embeddings."""

import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.precache import quantize

RNG = np.random.default_rng(0)


def with_outliers(x, channels):
    """Set one channel of each row to 30, like the outliers of T5."""
    x[np.arange(len(x)), channels] = 30
    return x


def even_steps(x):
    scale = np.abs(x).max(-1, keepdims=True) / 127
    return np.round(x / scale) * scale


TOKENS = {
    "normal": RNG.normal(size=(300, 1024)),
    "laplace": RNG.laplace(size=(300, 1024)),
    "heavy": RNG.standard_t(3, size=(300, 1024)),
    "t5_xxl": RNG.normal(size=(300, 4096)) * np.exp(RNG.normal(size=4096)),
    "one outlier": with_outliers(RNG.normal(size=(300, 768)), 7),
    "moving outlier": with_outliers(RNG.normal(size=(300, 1024)), RNG.integers(1024, size=300)),
}


@pytest.mark.parametrize("name", TOKENS)
def test_quantized_tokens_have_an_error_below_1_percent(name):
    x = TOKENS[name].astype(np.float32)
    x_hat = quantize.dequantize(*quantize.quantize(jnp.asarray(x)))
    relative, cosine = quantize.errors(jnp.asarray(x), x_hat)
    assert 0.003 < relative.max() < 0.01
    expected = np.linalg.norm(x_hat - x, axis=1) / np.linalg.norm(x, axis=1)
    np.testing.assert_allclose(relative, expected, rtol=1e-5)
    # This holds for errors orthogonal to the token, up to float32's rounding.
    np.testing.assert_allclose(1 - cosine, relative**2 / 2, rtol=0.1)


def test_linear_quantization_per_token_would_have_errors_above_4_percent():
    x = TOKENS["one outlier"]
    error = np.linalg.norm(even_steps(x) - x, axis=1) / np.linalg.norm(x, axis=1)
    assert error.min() > 0.04


@pytest.mark.parametrize(("width", "groups"), [(1024, 16), (768, 12), (96, 3), (24, 3), (7, 7)])
def test_dequantized_values_are_scales_times_signed_squares(width, groups):
    x = jnp.asarray(RNG.normal(size=(3, width)), jnp.float32)
    q, scale = quantize.quantize(x)
    assert (q.dtype, scale.dtype, scale.shape) == (np.int8, jnp.bfloat16, (3, groups))
    steps = np.asarray(q, float) * np.abs(np.asarray(q, float)) / 127**2
    expected = steps.reshape(3, groups, -1) * np.asarray(scale, float)[..., None]
    np.testing.assert_allclose(quantize.dequantize(q, scale), expected.reshape(3, width), rtol=1e-6)


def test_quantization_keeps_zeros():
    x = jnp.zeros((2, 3, 128)).at[0, 0, 0].set(5)
    q, scale = quantize.quantize(x)
    np.testing.assert_array_equal(quantize.dequantize(q, scale), x)
    relative, cosine = quantize.errors(x, quantize.dequantize(q, scale))
    np.testing.assert_array_equal(relative, np.zeros((2, 3)))
    np.testing.assert_array_equal(cosine, np.ones((2, 3)))
