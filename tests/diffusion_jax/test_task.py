"""What the losses of all systems do alike: pixels, dropped texts, losses by noise level."""

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax import model, task
from diffusion_jax.machine import log


def test_losses_are_summed_and_counted_within_ranges_of_sigma():
    sigma = jnp.array([0.01, 0.1, 0.11, 0.5, 2.0, 3.5, 80.0])  # An edge belongs to what is below.
    loss = jnp.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    metrics = model.loss_by_noise_level(loss, sigma)
    np.testing.assert_array_equal(metrics["level_loss"], [3, 4, 8, 16, 96])
    np.testing.assert_array_equal(metrics["level_count"], [2, 1, 1, 1, 2])


def test_means_are_over_samples_and_empty_ranges_are_left_out():
    # Added up over two steps, of which one had three samples in the first range, one a single one.
    total = {
        "level_loss": np.array([3.0 + 5.0, 0, 1.5, 0, 2.0]),
        "level_count": np.array([3.0 + 1.0, 0, 3, 0, 1]),
    }
    assert log.noise_level_means(total) == {
        "loss/sigma_0_to_0.1": 2.0,
        "loss/sigma_0.3_to_1.0": 0.5,
        "loss/sigma_3.0_to_inf": 2.0,
    }


def test_a_loss_that_is_not_finite_stays_within_its_range():
    metrics = model.loss_by_noise_level(jnp.array([jnp.nan, 2.0]), jnp.array([0.2, 5.0]))
    np.testing.assert_array_equal(metrics["level_loss"], [0, np.nan, 0, 0, 2])


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
