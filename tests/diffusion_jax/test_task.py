"""Pixels become numbers, and losses by noise level become metrics."""

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax import task
from diffusion_jax.logs import run_log


def test_means_are_over_samples_and_empty_ranges_are_left_out():
    # Added up over two steps, of which one had three samples in the first range, one a single one.
    total = {
        "level_loss": np.array([3.0 + 5.0, 0, 1.5, 0, 2.0]),
        "level_count": np.array([3.0 + 1.0, 0, 3, 0, 1]),
    }
    assert run_log.noise_level_means(total) == {
        "loss/sigma_0_to_0.1": 2.0,
        "loss/sigma_0.3_to_1.0": 0.5,
        "loss/sigma_3.0_to_inf": 2.0,
    }


def test_pixels_are_symmetric_or_as_mlperfs():
    images = np.array([0, 255, 51], np.uint8).reshape(1, 1, 3, 1)
    np.testing.assert_allclose(task.to_range(images).ravel(), [-1, 1, -0.6])
    np.testing.assert_allclose(task.to_range(images, "unit").ravel(), [0, 1, 0.2])


def test_pixels_are_what_either_form_of_their_division_gives():
    """x / 255 * 2 - 1 and x / 127.5 - 1 to the last bit, also compiled: once both were used."""
    images = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    other = lambda images: jnp.asarray(images, jnp.float32) / 127.5 - 1
    np.testing.assert_array_equal(task.to_range(images), other(images))
    np.testing.assert_array_equal(jax.jit(task.to_range)(images), jax.jit(other)(images))
