"""Magnitude-preserving layers (EDM2): inputs of magnitude 1 give outputs of magnitude 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.nn import magnitude
from diffusion_jax.nn.magnitude import MPConv, mp_cat, mp_fourier, mp_silu, mp_sum, normalize


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def rms(x):
    return float(jnp.sqrt(jnp.mean(x**2)))


@pytest.mark.parametrize("length", [0.01, 1.0, 100.0])
def test_normalize_divides_each_vector_by_its_root_mean_square(length):
    x = length * normal(4, 5, 6)
    expected = x / (1e-4 + np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True)))
    np.testing.assert_allclose(normalize(x), expected, rtol=1e-6)


def test_normalize_keeps_a_zero_vector_and_has_a_finite_gradient_there():
    assert (normalize(jnp.zeros((2, 3))) == 0).all()
    gradient = jax.grad(lambda x: normalize(x).sum())(jnp.zeros((2, 3)))
    np.testing.assert_allclose(gradient, 1e4, rtol=1e-5)  # 1 / epsilon.


def test_activations_sums_and_concatenations_keep_magnitude_1():
    """The magnitude of 100,000 samples has a standard error below 1 %."""
    a, b = normal(1000, 128), normal(1000, 32, seed=1)
    assert abs(rms(mp_silu(a)) - 1) < 0.01
    for t in (0.0, 0.3, 0.5, 1.0):
        assert abs(rms(mp_sum(a, normal(1000, 128, seed=2), t)) - 1) < 0.01
    both = mp_cat(a, b)
    assert both.shape == (1000, 160) and abs(rms(both) - 1) < 0.01
    # Each part adds half, however many channels it has.
    np.testing.assert_allclose(rms(both[:, :128]) ** 2 * 128, 80, rtol=0.02)
    np.testing.assert_allclose(rms(both[:, 128:]) ** 2 * 32, 80, rtol=0.02)


def test_fourier_features_have_magnitude_1_and_fixed_frequencies():
    waves = mp_fourier(jnp.linspace(-2, 2, 400), 256)
    assert abs(rms(waves) - 1) < 0.02
    random = np.random.RandomState(0)
    f, p = random.randn(3), random.rand(3)
    expected = np.sqrt(2) * np.cos(2 * np.pi * (0.7 * f + p))
    np.testing.assert_allclose(mp_fourier(jnp.array([0.7]), 3)[0], expected, atol=1e-6)
    np.testing.assert_allclose(f, [1.76405235, 0.40015721, 0.97873798], rtol=1e-8)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("length", [1.0, 7.0])
def test_a_convolution_keeps_magnitude_1_for_weights_of_any_length(kernel, length):
    layer, x = MPConv(64, kernel), normal(4, 16, 16, 32)
    params = layer.init(jax.random.key(1), x)
    weight = params["params"][magnitude.UNIT]
    np.testing.assert_allclose(jnp.sqrt((weight**2).mean(range(weight.ndim - 1))), 1, atol=2e-4)
    longer = jax.tree.map(lambda w: length * w, params)
    y = layer.apply(longer, x)[:, 1:-1, 1:-1]  # Zero padding changes the border.
    assert abs(rms(y) - 1) < 0.03
    np.testing.assert_allclose(rms(layer.apply(longer, x, 0.5)[:, 1:-1, 1:-1]), rms(y) / 2, rtol=1e-5)
    np.testing.assert_allclose(layer.apply(params, x)[:, 1:-1, 1:-1], y, atol=1e-3)


def test_a_3x3_convolution_matches_numpy():
    layer, x = MPConv(2, 3), normal(1, 3, 3, 5)
    params = layer.init(jax.random.key(1), x)
    w = np.asarray(params["params"][magnitude.UNIT], np.float64)
    w = w / (1e-4 + np.sqrt((w**2).mean((0, 1, 2)))) / np.sqrt(45)
    expected = np.einsum("hwc,hwcd->d", np.asarray(x[0], np.float64), w)
    np.testing.assert_allclose(layer.apply(params, x)[0, 1, 1], expected, atol=1e-5)


def test_forced_normalizes_the_parameters_named_unit_kernel_and_no_others():
    tree = {"a": {magnitude.UNIT: 3 * normal(4, 6), "gain": jnp.float32(2)}, "b": {"kernel": 5 * normal(4, 6)}}
    after = magnitude.forced(tree)
    length = np.sqrt(np.mean(np.square(tree["a"][magnitude.UNIT]), axis=0))
    np.testing.assert_allclose(after["a"][magnitude.UNIT], tree["a"][magnitude.UNIT] / (length + 1e-4), rtol=1e-6)
    assert after["a"]["gain"] is tree["a"]["gain"]
    assert after["b"]["kernel"] is tree["b"]["kernel"]
