"""Guidance and thresholds: identities, closed forms, and where the rows of a batch go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffusion_jax.diffusion import grids, guidance, samplers

X = jax.random.normal(jax.random.key(0), (4, 4, 4, 3))
SIGMA = jnp.array([0.1, 0.5, 2.0, 30.0])
COND, UNCOND = 2 * X, X + 1


def denoise_both(x, sigma):
    """2 x with the condition, on even rows, and x + 1 without, on odd ones."""
    even = (jnp.arange(len(x)) % 2 == 0)[:, None, None, None]
    return jnp.where(even, 2 * x, x + 1)


def guided(scale):
    return guidance.classifier_free(denoise_both, scale)(X, SIGMA)


def test_guidance_1_is_the_conditional_model_to_the_last_bit():
    np.testing.assert_array_equal(guided(1.0), COND)


def test_guidance_0_is_the_unconditional_model():
    np.testing.assert_allclose(guided(0.0), UNCOND, atol=1e-6)


def test_guidance_goes_beyond_the_condition_by_its_scale():
    np.testing.assert_allclose(guided(7.5), UNCOND + 7.5 * (COND - UNCOND), atol=2e-5)


def test_each_image_may_have_its_own_scale():
    scales = jnp.array([1.0, 2.0, 4.0, 0.0])
    each = [guided(scale)[i] for i, scale in enumerate(scales)]
    np.testing.assert_array_equal(guided(scales), jnp.stack(each))


def test_one_program_serves_every_scale():
    traces = []

    @jax.jit
    def f(scale):
        traces.append(scale)
        return guided(scale)

    np.testing.assert_allclose(f(3.0), guided(3.0), atol=1e-5)
    np.testing.assert_allclose(f(5.0), guided(5.0), atol=1e-5)
    assert len(traces) == 1


def test_both_rows_of_an_image_carry_its_noise_level():
    seen = {}

    def spy(x, sigma):
        seen.update(x=x, sigma=sigma)
        return x

    guidance.classifier_free(spy, 2.0)(X, SIGMA)
    for half in (slice(0, None, 2), slice(1, None, 2)):
        np.testing.assert_array_equal(seen["x"][half], X)
        np.testing.assert_array_equal(seen["sigma"][half], SIGMA)


def test_interval_guides_inside_its_bounds_only():
    scale = guidance.interval(3.0, 0.5, 2.0)
    np.testing.assert_array_equal(scale(SIGMA), [1, 3, 3, 1])  # Both bounds belong to it.
    actual = guided(scale)
    np.testing.assert_array_equal(actual[jnp.array([0, 3])], COND[jnp.array([0, 3])])
    np.testing.assert_array_equal(actual[1:3], guided(3.0)[1:3])


def test_interval_takes_a_scale_for_each_image():
    scale = guidance.interval(jnp.array([2.0, 3.0, 4.0, 5.0]), 0.3, 10.0)
    np.testing.assert_array_equal(scale(SIGMA), [1, 3, 4, 1])


def test_guided_gaussians_flow_to_the_extrapolated_mean():
    """Ideal denoisers of two Gaussians of one variance differ by a shift of the mean."""

    def both(x, sigma):
        mean = jnp.where(jnp.arange(len(x)) % 2 == 0, 0.5, 0.2)[:, None, None, None]
        sigma = sigma[:, None, None, None]
        return (0.25 * x + sigma**2 * mean) / (0.25 + sigma**2)

    sigmas = grids.karras_sigmas(64, sigma_min=0.02, sigma_max=10.0)
    keys = jax.random.split(jax.random.key(0), 4)
    draws = samplers.gaussian_noise(keys, (4, 4, 3))
    out = samplers.heun(guidance.classifier_free(both, 3.0), 10 * X, sigmas, draws)
    mean = 0.2 + 3 * (0.5 - 0.2)
    exact = mean + (10 * X - mean) * 0.5 / np.sqrt(0.25 + 100)
    np.testing.assert_allclose(out, exact, atol=1e-3)  # Heun's own error at 64 steps.


def test_a_sharded_batch_stays_where_it_is():
    """Neighbouring rows need no exchange between devices: no collective in the program."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = NamedSharding(mesh, P("data"))
    f = guidance.classifier_free(lambda x, sigma: x * sigma[:, None, None, None], 3.0)
    jitted = jax.jit(f, in_shardings=(rows, rows), out_shardings=rows)
    text = jitted.lower(X, SIGMA).compile().as_text()
    for name in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
        assert name not in text


@pytest.mark.parametrize("percentile", [99.5, 90.0])
def test_dynamic_threshold_is_the_percentile_of_each_image(percentile):
    actual = guidance.dynamic_threshold(lambda x, sigma: 3 * x, percentile)(X, SIGMA)
    for image, out in zip(np.float64(3 * X), actual, strict=True):
        s = np.quantile(np.abs(image), percentile / 100)
        assert s > 1
        np.testing.assert_allclose(out, np.clip(image, -s, s) / s, atol=1e-6)
    assert float(jnp.abs(actual).max()) == 1.0


def test_dynamic_threshold_leaves_images_in_range_alone():
    keep = guidance.dynamic_threshold(lambda x, sigma: jnp.tanh(x))
    np.testing.assert_array_equal(keep(X, SIGMA), jnp.tanh(X))


def test_static_threshold_clips_to_the_range_of_images():
    actual = guidance.static_threshold(lambda x, sigma: 5 * x)(X, SIGMA)
    np.testing.assert_array_equal(actual, np.clip(5 * X, -1, 1))
