"""Noise levels: the schedules against their closed forms, the draws against their moments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.diffusion import noise, precond

KEY = jax.random.key(0)
SCHEDULES = {"cosine": noise.cosine_log_snr, "linear": noise.linear_log_snr}
SD = noise.ldm_log_alphas()


def test_lognormal_draws_have_the_requested_mean_and_deviation():
    log_sigma = np.log(noise.draw_lognormal(-1.2, 1.2)(KEY, 40_000))
    np.testing.assert_allclose(log_sigma.mean(), -1.2, atol=4 * 1.2 / 200)  # 4 standard errors.
    np.testing.assert_allclose(log_sigma.std(), 1.2, rtol=4 / np.sqrt(2 * 40_000))


@pytest.mark.parametrize("log_snr", SCHEDULES.values(), ids=SCHEDULES)
def test_quantiles_of_uniform_time_draws_match_the_schedule(log_snr):
    sigma = np.asarray(noise.uniform_time(log_snr)(KEY, 40_000))
    t = jnp.array([0.1, 0.3, 0.5, 0.7, 0.9])
    below = (sigma[:, None] < noise.sigma_of(log_snr(t))).mean(0)
    np.testing.assert_allclose(below, t, atol=4 * 0.5 / 200)  # 4 standard errors.


DRAWS = noise.draw_lognormal(0.0, 1.0), noise.uniform_time(noise.cosine_log_snr), noise.uniform_steps(SD)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_drawn_noise_level_does_not_depend_on_the_batch_size(draw):
    np.testing.assert_array_equal(draw(KEY, 3), draw(KEY, 8)[:3])
    assert len(np.unique(draw(KEY, 8))) == 8


def test_the_cosine_schedule_matches_its_closed_form():
    """cos^-2 - 1 = tan^2, so log-SNR = -2 ln tan(angle), here in float64."""
    t = np.linspace(0.01, 0.99, 99)
    exact = -2 * np.log(np.tan((t + 0.008) / 1.008 * np.pi / 2))
    # At t = 0.01, cos^-2 - 1 = 8e-4, of which float32 keeps four digits.
    np.testing.assert_allclose(noise.cosine_log_snr(jnp.float32(t)), exact, atol=2e-4)


@pytest.mark.parametrize(
    ("log_snr", "first", "last"), [(noise.cosine_log_snr, 8.769, -33.89), (noise.linear_log_snr, 9.2103, -10.0001)]
)
def test_schedules_decrease_between_the_published_end_points(log_snr, first, last):
    values = jax.jit(log_snr)(jnp.linspace(0, 1, 101))
    np.testing.assert_allclose(values[jnp.array([0, -1])], [first, last], atol=2e-3)
    assert np.all(np.diff(values) < 0)


def test_sigma_of_inverts_log_snr():
    sigma = jnp.array([1e-3, 0.5, 1.0, 80.0, 2.3e7])
    # exp turns the rounding error of an argument of 17 into a relative error of 17 * 6e-8.
    np.testing.assert_allclose(noise.sigma_of(precond.log_snr(sigma)), sigma, rtol=3e-6)


ABAR = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)


def test_log_alpha_is_interpolated_linearly_between_steps():
    t = np.array([0.0, 0.25, 499.5, 998.9, 999.0])
    log_alpha = np.interp(t, np.arange(1000), np.log(ABAR) / 2)
    expected = np.sqrt(np.expm1(-2 * log_alpha))
    np.testing.assert_allclose(noise.sigma_at(SD, jnp.float32(t)), expected, rtol=1e-6)


def test_time_of_inverts_sigma_at():
    t = jnp.arange(0, 999.5, 0.5)
    # The spacing of float32 numbers near 999 is 6e-5.
    np.testing.assert_allclose(noise.time_of(SD)(noise.sigma_at(SD, t)), t, atol=2e-4)
    np.testing.assert_array_equal(noise.time_of(SD)(jnp.array([0.0, 1e3])), [0, 999])


def test_uniform_steps_draws_every_step_with_equal_probability():
    sigma = noise.uniform_steps(SD)(KEY, 40_000)
    t = np.asarray(noise.time_of(SD)(sigma))
    np.testing.assert_allclose(t, np.round(t), atol=2e-4)
    counts = np.bincount(np.round(t).astype(int), minlength=1000)
    assert counts.min() > 0 and len(counts) == 1000
    # Chi-squared of 1000 counts of mean 40: 999 degrees of freedom, 5 standard deviations of 45.
    assert abs(np.sum((counts - 40) ** 2 / 40) - 999) < 225
