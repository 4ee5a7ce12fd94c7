"""Each preconditioner turns the common loss into the loss of its paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.diffusion import precond

KEYS = jax.random.split(jax.random.key(0), 4)
X0, EPS, F = (jax.random.normal(k, (4, 8, 8, 3)) for k in KEYS[:3])
SIGMA = jnp.array([0.01, 0.3, 2.0, 50.0])
S = np.float64(SIGMA)[:, None, None, None]
ALPHA = 1 / np.sqrt(1 + S**2)
network = lambda x, c_noise: F  # A fixed output: only the weighting is under test.

DISTANCES = {"l2": lambda r: r**2, "l1": np.abs, "huber": lambda r: np.where(np.abs(r) < 1, r**2 / 2, np.abs(r) - 0.5)}
PRECONDS = {
    "edm": precond.edm(0.5),
    "epsilon": precond.epsilon(precond.log_snr),
    "x0": precond.x0(precond.log_snr),
    "velocity": precond.velocity(precond.log_snr),
}
TARGETS = {  # The target of F in each paper, in float64.
    "edm": lambda x0, eps: (x0 - 0.25 / (S**2 + 0.25) * (x0 + S * eps)) / (S * 0.5 / np.sqrt(S**2 + 0.25)),
    "epsilon": lambda x0, eps: eps,
    "x0": lambda x0, eps: x0,
    "velocity": lambda x0, eps: ALPHA * eps - np.sqrt(1 - ALPHA**2) * x0,
}


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("name", PRECONDS)
def test_the_loss_is_the_distance_between_f_and_its_papers_target(name, distance):
    residual = np.float64(F) - TARGETS[name](np.float64(X0), np.float64(EPS))
    expected = DISTANCES[distance](residual).mean((1, 2, 3))
    actual = precond.loss(network, PRECONDS[name], X0, EPS, SIGMA, getattr(precond, distance))
    # 1 - c_skip has an error of 6e-8, which division by c_out = 0.01 enlarges to 6e-6.
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_the_edm_loss_equals_the_weighted_denoising_loss():
    d = precond.denoiser(network, PRECONDS["edm"])(X0 + jnp.float32(S) * EPS, SIGMA)
    weight = (S[:, 0, 0, 0] ** 2 + 0.5**2) / (S[:, 0, 0, 0] * 0.5) ** 2
    expected = weight * np.mean((np.float64(d) - np.float64(X0)) ** 2, axis=(1, 2, 3))
    actual = precond.loss(network, PRECONDS["edm"], X0, EPS, SIGMA)
    # D - x0 cancels at sigma = 0.01: this is why the loss is written on F.
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["edm", "velocity"])
def test_the_target_has_unit_variance_if_the_data_has_the_assumed_variance(name):
    scalings = precond.edm(sigma_data=1.0) if name == "edm" else PRECONDS[name]
    x0, eps = jax.random.normal(KEYS[3], (2, 4, 64, 64, 3))
    zero = lambda x, c_noise: jnp.zeros_like(x)
    # 12,288 values: their mean square is within 4 * sqrt(2 / 12288) = 0.05 of 1.
    np.testing.assert_allclose(precond.loss(zero, scalings, x0, eps, SIGMA), 1.0, rtol=0.05)


@pytest.mark.parametrize("name", PRECONDS)
def test_a_perfect_network_has_zero_loss_and_denoises_exactly(name):
    on_target = lambda x, c_noise: jnp.float32(TARGETS[name](np.float64(X0), np.float64(EPS)))
    loss = precond.loss(on_target, PRECONDS[name], X0, EPS, SIGMA)
    # 1 - c_skip has an error of 6e-8. Divided by c_out = 0.01, times x0 = 4: 2e-5, squared here.
    np.testing.assert_allclose(loss, 0, atol=1e-9)
    x = X0 + jnp.float32(S) * EPS
    d = precond.denoiser(on_target, PRECONDS[name])(x, SIGMA)
    # x is about 4 * sigma = 200, which float32 rounds by 1e-7 * 200. D keeps this error.
    np.testing.assert_allclose(d, X0, atol=3e-5)


def test_epsilon_target_is_exact_at_the_smallest_noise():
    """The form (x0 - x) / -sigma would have an error of 1e-7 / 1e-4 = 1e-3."""
    on_target = lambda x, c_noise: EPS
    sigma = jnp.full(4, 1e-4)
    loss = precond.loss(on_target, PRECONDS["epsilon"], X0, EPS, sigma, precond.l1)
    np.testing.assert_allclose(loss, 0, atol=1e-7)


def test_edm_with_f_0_is_the_ideal_denoiser_of_gaussian_data():
    """For x0 ~ N(0, sigma_data^2), the posterior mean is c_skip * x, so F = 0 is ideal."""
    zero = lambda x, c_noise: jnp.zeros_like(x)
    d = precond.denoiser(zero, precond.edm(0.5))(X0, SIGMA)
    np.testing.assert_allclose(d, X0 * 0.25 / (0.25 + S**2), rtol=1e-5)


@pytest.mark.parametrize("name", [*PRECONDS, "wide edm"])
def test_the_network_receives_the_scaled_image_and_the_time_of_its_sigma(name):
    calls, scalings = [], PRECONDS.get(name, precond.edm(2.0))
    spy = lambda x, c_noise: calls.append((x, c_noise)) or x
    precond.denoiser(spy, scalings)(X0, SIGMA)
    precond.loss(spy, scalings, X0, jnp.zeros_like(EPS), SIGMA)
    variance = {"edm": 0.25, "wide edm": 4.0}.get(name, 1.0)
    expected = np.log(S) / 4 if "edm" in name else -2 * np.log(S)
    for x, time in calls:
        np.testing.assert_allclose(x, X0 / np.sqrt(S**2 + variance), rtol=1e-6)
        np.testing.assert_allclose(time, expected[:, 0, 0, 0], rtol=1e-6)
    assert len(calls) == 2


def test_the_loss_and_denoiser_of_a_bfloat16_network_are_float32():
    half = lambda x, c_noise: F.astype(jnp.bfloat16)
    assert precond.loss(half, PRECONDS["edm"], X0, EPS, SIGMA).dtype == jnp.float32
    assert precond.denoiser(half, PRECONDS["edm"])(X0, SIGMA).dtype == jnp.float32


def test_log_snr_matches_the_variance_preserving_definition():
    expected = np.log(ALPHA**2 / (1 - ALPHA**2))[:, 0, 0, 0]
    np.testing.assert_allclose(precond.log_snr(SIGMA), expected, rtol=1e-6)
