"""The range of pixels, and metrics of losses by noise level."""

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax import task
from diffusion_jax.logs import run_log


def test_noise_level_means_average_over_samples_and_omit_empty_ranges():
    # Sums over two steps with three samples and one sample in the first range.
    total = {"level_loss": np.array([3.0 + 5.0, 0, 1.5, 0, 2.0]), "level_count": np.array([3.0 + 1.0, 0, 3, 0, 1])}
    expected = {"0_to_0.1": 2.0, "0.3_to_1.0": 0.5, "3.0_to_inf": 2.0}
    assert run_log.noise_level_means(total) == {f"loss/sigma_{levels}": mean for levels, mean in expected.items()}


def test_to_range_is_symmetric_by_default_or_unit_as_in_mlperf():
    images = np.array([0, 255, 51], np.uint8).reshape(1, 1, 3, 1)
    np.testing.assert_allclose(task.to_range(images).ravel(), [-1, 1, -0.6])
    np.testing.assert_allclose(task.to_range(images, "unit").ravel(), [0, 1, 0.2])


def test_to_range_is_bit_for_bit_equal_to_dividing_by_127_5():
    """Earlier versions used both x / 255 * 2 - 1 and x / 127.5 - 1."""
    images = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    other = lambda images: jnp.asarray(images, jnp.float32) / 127.5 - 1
    np.testing.assert_array_equal(task.to_range(images), other(images))
    np.testing.assert_array_equal(jax.jit(task.to_range)(images), jax.jit(other)(images))
