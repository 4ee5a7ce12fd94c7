"""Samplers against a closed form: for Gaussian data the ideal denoiser is linear
and the probability-flow ODE has an exact solution, so no network is needed."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.diffusion import grids, multistep, noise, onestep, samplers, stochastic
from sd_jax.settings import Sampler

MU, STD = 0.3, 0.5
SHAPE = (4, 4, 3)
SETTINGS = types.SimpleNamespace(steps=4, sigma_min=0.0, sigma_max=0.0, rho=7.0, offset=1)
KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(jax.random.key(1), (3, *SHAPE))
TABLE = jax.random.normal(jax.random.key(2), (16, 3, *SHAPE))
DRAWS = lambda i: TABLE[i]  # Quicker to compile than draws from keys.

DETERMINISTIC = {
    "heun": onestep.heun,
    "dpm2": onestep.dpm2,
    "ddim": onestep.ddim,
    "lms": multistep.lms,
    "dpmpp_2s": multistep.dpmpp_2s,
    "plms": multistep.plms,
    "dpmpp_2m": multistep.dpmpp_2m,
    "unipc": multistep.unipc,
    "deis": multistep.deis,
    "deis 3": functools.partial(multistep.deis, order=3),
}
STOCHASTIC = {
    "churned heun": functools.partial(onestep.heun, churn=40.0, s_noise=1.003),
    "ddim eta 0.5": functools.partial(onestep.ddim, eta=0.5),
    "ddpm": onestep.ddpm,
    "dpm2_ancestral": onestep.dpm2_ancestral,
    "dpmpp_2m_sde": stochastic.dpmpp_2m_sde,
    "dpmpp_3m_sde": stochastic.dpmpp_3m_sde,
    "restart": functools.partial(stochastic.restart, low=0.5, high=2.0),
}
ALL = DETERMINISTIC | STOCHASTIC


def denoise(x, sigma):
    sigma = sigma[:, None, None, None]
    return (STD**2 * x + sigma**2 * MU) / (STD**2 + sigma**2)


@functools.partial(jax.jit, static_argnums=0)
def deterministic(sampler, x, sigmas):
    return sampler(denoise, x, sigmas, lambda i: jnp.zeros_like(x))


@functools.partial(jax.jit, static_argnums=0)
def sample(sampler, x, sigmas, keys):
    return sampler(denoise, x, sigmas, samplers.gaussian_noise(keys, x.shape[1:]))


def error(sampler, n):
    sigmas = grids.karras_sigmas(n, sigma_min=0.005, sigma_max=5.0)
    exact = MU + (5 * X - MU) * STD / np.sqrt(STD**2 + 5.0**2)
    return float(jnp.abs(deterministic(sampler, 5 * X, sigmas) - exact).max())


@pytest.mark.parametrize(
    ("name", "order", "bound"),
    [
        ("ddim", 1, 0.07),
        ("heun", 2, 3e-3),
        ("dpm2", 2, 1.7e-3),
        ("dpmpp_2m", 2, 3e-3),
        ("dpmpp_2s", 2, 7e-3),
        ("deis", 2, 2e-3),
    ],
)
def test_samplers_converge_to_the_exact_solution_at_their_order(name, order, bound):
    coarse, fine = error(ALL[name], 32), error(ALL[name], 64)
    assert abs(np.log2(coarse / fine) - order) < 0.25  # Half the step divides the error by 2^order.
    assert fine < bound  # About twice what was measured.


def test_deis_with_order_3_converges_at_order_3():
    """With more than 32 steps, float32's rounding would be as large as the error."""
    third = ALL["deis 3"]
    assert np.log2(error(third, 16) / error(third, 32)) > 2.75
    assert error(third, 32) < 3e-4  # Twice what was measured: 1.2e-4.


@pytest.mark.parametrize("name", ["dpmpp_2m_sde", "dpmpp_3m_sde"])
def test_sde_solvers_converge_to_one_image_per_brownian_path(name):
    """A quarter of the step leaves about a quarter of the distance to the limit: order 1."""
    sigmas = lambda n: grids.karras_sigmas(n, sigma_min=0.005, sigma_max=5.0)
    drawn = [sample(ALL[name], 5 * X, sigmas(n), KEYS) for n in (32, 128, 512)]
    far, near = (float(jnp.abs(out - drawn[-1]).mean()) for out in drawn[:2])
    assert 2 < far / near < 8 and near < 5e-3  # Measured: ratios of 3.5 to 4; near is 2.3e-3.
    other = sample(ALL[name], 5 * X, sigmas(128), jax.random.split(jax.random.key(9), 3))
    assert float(jnp.abs(other - drawn[1]).mean()) > 0.2  # Another path, another image.


@pytest.mark.parametrize("name", ["dpmpp_2m_sde", "dpmpp_3m_sde"])
def test_sde_solvers_without_noise_converge_at_their_order(name):
    quiet = functools.partial(ALL[name], strength=0.0)
    if name == "dpmpp_2m_sde":
        sigmas = grids.karras_sigmas(8, sigma_min=0.02, sigma_max=5.0)
        expected = multistep.dpmpp_2m(denoise, 5 * X, sigmas, DRAWS)
        np.testing.assert_allclose(quiet(denoise, 5 * X, sigmas, DRAWS), expected, atol=1e-5)
        return
    levels = lambda n: jnp.geomspace(5.0, 0.5, n + 1)
    exact = MU + (5 * X - MU) * np.sqrt((STD**2 + 0.25) / (STD**2 + 25))
    coarse, fine = (float(jnp.abs(deterministic(quiet, 5 * X, levels(n)) - exact).max()) for n in (8, 32))
    # Its first step has order 1 and leaves an error of h^2: a quarter of h, a sixteenth.
    assert abs(np.log2(coarse / fine) / 2 - 2) < 0.25 and fine < 1.6e-4


def test_a_brownian_path_has_independent_increments_of_the_right_variance():
    """Variances equal the lengths in log2 sigma. The path does not depend on which levels ask."""
    draws = samplers.gaussian_noise(jax.random.split(jax.random.key(5), 4), (25, 20, 1))
    at = jax.jit(jax.vmap(stochastic.brownian(draws)))
    levels = jnp.array([2.0**-15, 0.01, 0.1, 0.2, 1.0, 40.0, 2.0**21, 2.0**25])
    path = np.asarray(at(levels)).reshape(8, -1)
    steps = np.diff(path, axis=0) / np.sqrt(np.diff(np.log2(levels)))[:, None]
    # 2,000 values: 4 standard errors of a variance are 0.13, of a covariance 0.09.
    np.testing.assert_allclose(np.cov(steps), np.eye(7), atol=0.13)
    again = np.asarray(at(jnp.array([1.0, 3.3, 0.1]))).reshape(3, -1)
    np.testing.assert_array_equal(again[[0, 2]], path[[4, 2]])


@pytest.mark.parametrize("sampler", [stochastic.dpmpp_2m_sde, stochastic.dpmpp_3m_sde])
def test_an_sde_step_from_the_start_of_the_cosine_schedule_adds_all_its_noise(sampler):
    """With D = 0, x is noise of the current level. The cosine schedule starts at 2^24.4."""
    keys = jax.random.split(jax.random.key(6), 8)
    sigmas = jnp.array([2.0**24.4, 19.0])
    x = samplers.initial_noise(keys, (32, 32, 1), sigmas[0])
    draws = samplers.gaussian_noise(keys, (32, 32, 1))
    ended = sampler(lambda x, sigma: jnp.zeros_like(x), x, sigmas, draws)
    # 8,192 values: 3 standard errors of a standard deviation are 0.024.
    np.testing.assert_allclose(float(ended.std()) / 19, 1, atol=0.024)


def test_restart_matches_algorithm_1_of_its_paper():
    """Sample in float64 to the level nearest to `low`, add noise, and sample to the end."""
    sigmas = np.float64(grids.karras_sigmas(6, sigma_min=0.05, sigma_max=10.0))
    d = lambda x, sigma: np.float64(STD**2 * x + sigma**2 * MU) / (STD**2 + sigma**2)

    def heun_step(x, sigma, later):
        slope = (x - d(x, sigma)) / sigma
        ahead = x + (later - sigma) * slope
        if later == 0:
            return ahead
        return x + (later - sigma) * (slope + (ahead - d(ahead, later)) / later) / 2

    j = int(np.abs(np.log(sigmas[:-1] / 0.5)).argmin())
    x, step = np.float64(10 * X), 0
    for i in range(6):
        if i == j:
            for _ in range(2):
                added = np.sqrt(2.0**2 - sigmas[j] ** 2) * np.asarray(DRAWS(step))
                x, begin = x + added, 2.0
                for k in range(1, 4):
                    later = (2 ** (1 / 7) + k / 3 * (sigmas[j] ** (1 / 7) - 2 ** (1 / 7))) ** 7
                    x, begin, step = heun_step(x, begin, later), later, step + 1
        x, step = heun_step(x, sigmas[i], sigmas[i + 1]), step + 1
    actual = jax.jit(
        functools.partial(stochastic.restart, denoise, noise=DRAWS, low=0.5, high=2.0, repeats=2, inner=3)
    )(10 * X, jnp.float32(sigmas))
    np.testing.assert_allclose(actual, x, atol=2e-5)


def test_the_corrector_of_unipc_raises_its_order_above_2():
    """Zhao et al., theorem 3.1. With as many evaluations, it is more accurate than dpmpp_2m."""
    coarse, fine = error(multistep.unipc, 32), error(multistep.unipc, 64)
    assert np.log2(coarse / fine) > 2.75
    assert fine < 0.2 * error(multistep.dpmpp_2m, 64)


@pytest.mark.parametrize("sampler", ALL.values(), ids=ALL)
def test_samplers_reach_a_constant_image_in_any_number_of_steps(sampler):
    for n in (1, 4):
        sigmas = grids.karras_sigmas(n)
        out = sampler(lambda x, sigma: jnp.full_like(x, 0.7), 80 * X, sigmas, DRAWS)
        np.testing.assert_allclose(out, 0.7, atol=1e-4)  # float32 steps away from x = 240.


@pytest.mark.parametrize("sampler", ALL.values(), ids=ALL)
def test_samplers_trace_the_denoiser_once(sampler):
    calls = []

    def counted(x, sigma):
        calls.append(sigma.shape)
        return denoise(x, sigma)

    jax.make_jaxpr(lambda x: sampler(counted, x, grids.karras_sigmas(8), DRAWS))(X)
    assert calls == [(3,)]


@pytest.mark.parametrize("sampler", ALL.values(), ids=ALL)
def test_an_image_does_not_depend_on_the_rest_of_its_batch(sampler):
    sigmas = grids.karras_sigmas(6)
    start = samplers.initial_noise(KEYS, SHAPE, sigmas[0])
    together = sample(sampler, start, sigmas, KEYS)
    alone = sample(sampler, start[1:2], sigmas, KEYS[1:2])
    np.testing.assert_array_equal(together[1], alone[0])


def heun_of_the_paper(x, sigmas, churn, s_min, s_max, s_noise):
    """EDM's Algorithm 2, line by line, in float64."""
    n = len(sigmas) - 1
    d = lambda x, sigma: np.float64(STD**2 * x + sigma**2 * MU) / (STD**2 + sigma**2)
    for i in range(n):
        gamma = min(churn / n, np.sqrt(2) - 1) if s_min <= sigmas[i] <= s_max else 0
        t_hat = sigmas[i] + gamma * sigmas[i]
        x = x + np.sqrt(t_hat**2 - sigmas[i] ** 2) * s_noise * np.asarray(DRAWS(jnp.array(i)))
        slope = (x - d(x, t_hat)) / t_hat
        x_next = x + (sigmas[i + 1] - t_hat) * slope
        if sigmas[i + 1] != 0:
            slope_next = (x_next - d(x_next, sigmas[i + 1])) / sigmas[i + 1]
            x_next = x + (sigmas[i + 1] - t_hat) * (slope / 2 + slope_next / 2)
        x = x_next
    return x


@pytest.mark.parametrize("window", [(0.0, float("inf")), (0.05, 5.0)])
@pytest.mark.parametrize("churn", [0.0, 2.0, 40.0])  # 40 reaches the bound sqrt(2) - 1.
def test_heun_matches_algorithm_2_of_edm(churn, window):
    options = {"churn": churn, "s_min": window[0], "s_max": window[1], "s_noise": 1.1}
    sigmas = grids.karras_sigmas(10, sigma_min=0.01, sigma_max=10.0)
    expected = heun_of_the_paper(np.float64(10 * X), np.float64(sigmas), **options)
    actual = jax.jit(functools.partial(onestep.heun, denoise, noise=DRAWS, **options))(10 * X, sigmas)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_samplers_reach_the_variance_of_the_data(name):
    """Started from the exact marginal at sigma_max, every sampler ends with the data's variance.

    A pixel is linear in its start and its draws, so its variance is the sum of their variances,
    each times its squared derivative.
    """
    sampler = functools.partial(onestep.heun, churn=40.0) if "heun" in name else ALL[name]
    sigmas = grids.karras_sigmas(256, sigma_min=0.02, sigma_max=10.0)

    def pixel(start, table):
        draws = lambda i: table[i].reshape(1, 1, 1, 1)
        return sampler(denoise, start.reshape(1, 1, 1, 1), sigmas, draws).sum()

    # Brownian paths number their draws up to 2^16, the other samplers by step.
    mean, slopes = jax.jit(jax.value_and_grad(pixel, (0, 1)))(jnp.float32(MU), jnp.zeros(2**16))
    by_start, by_draw = map(np.float64, slopes)
    variance = by_start**2 * (STD**2 + 10**2) + (by_draw**2).sum()
    np.testing.assert_allclose(mean, MU, atol=1e-4)
    assert (by_draw**2).sum() > 0.01 * variance
    # The error of first-order samplers in 256 steps is up to 1.4 %.
    np.testing.assert_allclose(np.sqrt(variance), STD, rtol=0.015)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_matches_equation_12_of_its_paper(eta):
    """Take one step to abar_next with sigma_tau = eta * the posterior's deviation (equation 16)."""
    abar, abar_next = 0.5, 0.8
    sigmas = jnp.sqrt((1 - np.array([abar, abar_next])) / np.array([abar, abar_next]))
    x0 = np.asarray(denoise(X, np.full(3, sigmas[0])))
    eps = (np.asarray(X) - x0) / float(sigmas[0])
    deviation = eta * np.sqrt((1 - abar_next) / (1 - abar) * (1 - abar / abar_next))
    z = np.sqrt(abar_next) * x0 + np.sqrt(1 - abar_next - deviation**2) * eps
    z += deviation * np.asarray(DRAWS(jnp.array(0)))
    actual = onestep.ddim(denoise, X, sigmas, DRAWS, eta=eta) * np.sqrt(abar_next)
    np.testing.assert_allclose(actual, z, atol=1e-6)


def test_ddpm_equals_ddim_with_eta_1_on_sigmas_that_end_at_0():
    sigmas = grids.karras_sigmas(10)
    expected = onestep.ddim(denoise, 80 * X, sigmas, DRAWS, eta=1.0)
    np.testing.assert_allclose(onestep.ddpm(denoise, 80 * X, sigmas, DRAWS), expected, atol=1e-6)


@pytest.mark.parametrize("log_snr", [noise.cosine_log_snr, noise.linear_log_snr])
def test_ddpm_matches_ancestral_sampling_in_variance_preserving_coordinates(log_snr):
    """Mean alpha_s (x (1 - c) / alpha_t + c x0), variance sigma_s^2 c, c = 1 - SNR_t / SNR_s."""
    log_snrs = np.float64(log_snr(jnp.linspace(1, 0, 9)))
    alpha = np.sqrt(1 / (1 + np.exp(-log_snrs)))
    z = np.float64(X)
    for i in range(8):
        x0 = denoise(z / alpha[i], np.full(3, np.exp(-log_snrs[i] / 2)))
        c = -np.expm1(log_snrs[i] - log_snrs[i + 1])
        z = alpha[i + 1] * (z * (1 - c) / alpha[i] + c * x0)
        if i < 7:  # The last step returns the posterior mean.
            z += np.sqrt((1 - alpha[i + 1] ** 2) * c) * np.asarray(DRAWS(jnp.array(i)))

    sigmas = noise.sigma_of(log_snr(jnp.linspace(1, 0, 9)))
    x = onestep.ddpm(denoise, X * jnp.float32(1 / alpha[0]), sigmas, DRAWS)
    actual = samplers.to_variance_preserving(x, sigmas[-1])
    np.testing.assert_allclose(actual, z, atol=2e-6)


def test_dpmpp_2m_matches_algorithm_2_of_its_paper():
    """Uses the paper's coordinates: alpha_t, sigma_t and lambda_t = ln(alpha_t / sigma_t)."""
    abar = np.array([0.001, 0.02, 0.3, 0.8, 0.99])
    alpha, sigma = np.sqrt(abar), np.sqrt(1 - abar)
    h = np.diff(np.log(alpha / sigma))
    x0_of = lambda z, i: denoise(z / alpha[i], np.full(3, sigma[i] / alpha[i]))

    z, x0 = np.float64(X), [x0_of(np.float64(X), 0)]
    for i in range(1, 5):
        r = h[i - 2] / h[i - 1] if i > 1 else np.inf
        d = (1 + 1 / (2 * r)) * x0[-1] - 1 / (2 * r) * x0[-min(i, 2)]
        z = sigma[i] / sigma[i - 1] * z - alpha[i] * np.expm1(-h[i - 1]) * d
        x0.append(x0_of(z, i))

    sigmas = jnp.float32(sigma / alpha)
    actual = multistep.dpmpp_2m(denoise, X / jnp.float32(alpha[0]), sigmas, DRAWS)
    np.testing.assert_allclose(actual * alpha[-1], z, atol=2e-6)
    to_zero = multistep.dpmpp_2m(denoise, X / jnp.float32(alpha[0]), jnp.append(sigmas, 0), DRAWS)
    np.testing.assert_allclose(to_zero, x0[-1], atol=2e-6)


def test_dpmpp_2m_given_few_steps_takes_a_first_order_last_step():
    """The last of two steps, which ends above 0, equals an Euler step in exp(-lambda)."""
    sigmas = jnp.array([5.0, 1.0, 0.2])
    x1 = multistep.dpmpp_2m(denoise, 5 * X, sigmas[:2], DRAWS)
    x0 = denoise(x1, jnp.ones(3))
    actual = multistep.dpmpp_2m(denoise, 5 * X, sigmas, DRAWS, steps=2)
    np.testing.assert_allclose(actual, x0 + 0.2 * (x1 - x0), atol=1e-6)
    second = multistep.dpmpp_2m(denoise, 5 * X, sigmas, DRAWS)
    assert np.abs(second - actual).max() > 1e-3


def test_euler_equals_ddim_with_eta_0():
    sigmas = grids.karras_sigmas(4)
    expected = onestep.ddim(denoise, X, sigmas, DRAWS, eta=0.0)
    np.testing.assert_array_equal(onestep.euler(denoise, X, sigmas, DRAWS), expected)


def test_leading_times_match_ldm_if_the_steps_divide_1000():
    for n in (2, 5, 50, 200, 500):
        times = grids.leading_times(n)
        np.testing.assert_array_equal(times, [*range(1000 - 1000 // n + 1, 0, -1000 // n), 0])


def test_leading_times_decrease_for_every_number_of_steps():
    for n in (*range(1, 100), *range(100, 1000, 9), 499, 500, 501, 999, 1000):
        times = np.asarray(grids.leading_times(n))
        assert len(times) == n + 1 and times[-2] == 1 and times[0] <= 999, n
        assert np.all(np.diff(times) < 0), n
    for n in (0, 1001):
        with pytest.raises(ValueError, match=f"{n} sampling steps .*: choose 1 to 1000 steps$"):
            grids.leading_times(n)


def test_karras_sigmas_match_equation_5_of_edm_and_end_at_0():
    i = np.arange(7)
    expected = (80 ** (1 / 3) + i / 6 * (0.002 ** (1 / 3) - 80 ** (1 / 3))) ** 3
    actual = grids.karras_sigmas(7, sigma_min=0.002, sigma_max=80, rho=3)
    # The difference of two roots near 4 is 0.126, with a rounding error of 2e-7, then cubed.
    np.testing.assert_allclose(actual, [*expected, 0], rtol=1e-5)
    np.testing.assert_allclose(grids.karras_sigmas(1), [80, 0], rtol=1e-6)


def test_an_even_grid_ends_at_the_last_level_of_the_schedule_or_at_0():
    model = noise.continuous_noise(noise.linear_log_snr)
    levels = lambda end: grids.make_grid(model, SETTINGS, "even", end, grids.GridOptions()).sigmas
    t = np.array([1, 0.75, 0.5, 0.25, 0])
    np.testing.assert_allclose(levels("sigma_min"), np.sqrt(np.expm1(1e-4 + 10 * t**2)), rtol=1e-5)
    np.testing.assert_array_equal(levels("zero"), [*levels("sigma_min")[:-1], 0])


GRIDS_OF = [
    *((name, grid) for name in ("scaled_linear", "cosine") for grid in grids.GRIDS),
    *(("lognormal", grid) for grid in ("karras", "exponential")),
]


@pytest.mark.parametrize(("name", "grid"), GRIDS_OF)
@pytest.mark.parametrize("end", grids.ENDS)
def test_every_grid_of_every_noise_is_equal_inside_and_outside_jit(name, grid, end):
    """The n + 1 levels decrease, and end at 0 or at the smallest level of the noise."""
    fields = vars(SETTINGS) | {"sigma_min": 0.05, "sigma_max": 10.0}
    s = Sampler(**fields, name="unipc", grid=grid, end=end)
    model = noise.NOISES.function(name)()  # Built outside jit, as a task does.
    levels = lambda: samplers.sampling_grid(model, s).sigmas
    outside = np.asarray(levels())
    np.testing.assert_allclose(jax.jit(levels)(), outside, rtol=1e-6)
    assert outside.shape == (5,) and (np.diff(outside) < 0).all()
    least = {"scaled_linear": 0.02917, "cosine": 0.01247}[name] if grid in grids.BY_TIMES else 0.05
    assert outside[-1] == pytest.approx(0 if end == "zero" else least, rel=1e-3)


def test_a_karras_grid_on_a_noise_table_starts_at_the_last_level_of_the_table():
    s = Sampler(**vars(SETTINGS), name="unipc", grid="karras", end="zero")
    table = noise.discrete_noise(noise.ldm_log_alphas())
    levels = lambda: samplers.sampling_grid(table, s).sigmas
    assert float(levels()[0]) == pytest.approx(14.6146, rel=1e-5)  # The table's last level.
    np.testing.assert_allclose(jax.jit(levels)(), levels(), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "sampler", "grid"),
    [
        ("lognormal", "ddpm", ("karras", "zero")),
        ("uniform_flow", "ddpm", ("even", "zero")),
        ("logit_normal(shift=3)", "plms", ("even", "zero")),
        ("cosine", "ddpm", ("even", "sigma_min")),
        ("linear", "plms", ("even", "zero")),
        ("scaled_linear", "ddpm", ("ldm", "sigma_min")),
        ("zero_terminal_snr", "heun", ("even", "sigma_min")),
    ],
)
def test_the_default_grid_follows_from_the_noise_and_the_sampler(name, sampler, grid):
    model = noise.NOISES.bound("diffusion.noise", name)()
    assert samplers.default_grid(model, samplers.SAMPLERS[sampler]) == grid


def test_a_grid_in_time_is_rejected_for_a_noise_without_times():
    model = noise.lognormal()
    with pytest.raises(ValueError, match=r"sampler.grid is 'trailing', which is spaced in time, .*: choose from"):
        grids.check(model, "trailing")


def test_exponential_levels_are_evenly_spaced_logarithmically():
    model, s = (noise.lognormal(), types.SimpleNamespace(**vars(SETTINGS) | {"sigma_min": 0.1, "sigma_max": 100.0}))
    sigmas = grids.make_grid(model, s, "exponential", "zero", grids.GridOptions()).sigmas
    np.testing.assert_allclose(sigmas, [100, 10, 1, 0.1, 0], rtol=1e-5)


def test_gaussian_noise_is_standard_normal_and_independent():
    """Draws are independent of each other, of the initial noise, and between keys."""
    shape = (50, 50, 3)
    draws = samplers.gaussian_noise(KEYS[:2], shape)
    start = samplers.initial_noise(KEYS[:2], shape, 2.0) / 2
    values = jnp.concatenate([start, draws(jnp.array(0)), draws(jnp.array(1))]).reshape(6, -1)
    # 7,500 values each: 4 standard errors of a mean are 0.046, of a variance 0.065.
    np.testing.assert_allclose(values.mean(1), 0, atol=0.046)
    np.testing.assert_allclose(np.cov(values), np.eye(6), atol=0.065)


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("DPM++ 2M", "did you mean 'dpmpp_2m'?"),
        ("DPM++ 2M Karras", "did you mean 'dpmpp_2m' with sampler.grid='karras'?"),
        ("dpm++ 2m sde exponential", "did you mean 'dpmpp_2m_sde' with sampler.grid='exponential'?"),
        ("DPM++ 3M SDE", "did you mean 'dpmpp_3m_sde'?"),
        ("DPM2 a Karras", "did you mean 'dpm2_ancestral' with sampler.grid='karras'?"),
        ("Euler a", "did you mean 'euler_ancestral'?"),
        ("Euler SGM Uniform", "did you mean 'euler' with sampler.grid='trailing'?"),
        ("LMS Karras", "did you mean 'lms' with sampler.grid='karras'?"),
        ("DDIM CFG++", "did you mean 'ddim' with sampler.guiding='cfg_pp'?"),
        ("UniPC", "did you mean 'unipc'?"),
        ("k_euler_a", "did you mean 'euler_ancestral'?"),
        ("DPM++ SDE Karras", "no sampler here equals the web UI's DPM++ SDE."),
        ("DPM++ 2S a", "no sampler here equals the web UI's DPM++ 2S a."),
        ("DPM adaptive", "no sampler here equals the web UI's DPM adaptive."),
    ],
)
def test_names_of_the_web_ui_suggest_a_sampler_and_its_grid(name, question):
    with pytest.raises(ValueError, match=r"sampler\.name is") as raised:
        samplers.SAMPLERS.bound("sampler.name", name)
    assert str(raised.value).startswith(f"sampler.name is {name!r}: {question} Choose from heun")


def test_a_function_alone_is_a_sampler_and_a_result_of_another_shape_an_error(monkeypatch):
    def cut(denoise, x, sigmas, draws):
        return denoise(x, jnp.full(len(x), sigmas[0]))[:, 1:]

    def nothing(denoise, x, sigmas, draws):
        pass

    inputs = samplers.SamplerInputs(denoise, X, jnp.array([2.0, 0.0]), DRAWS, lambda x: x)
    for function, words in ((cut, r"\(3, 3, 4, 3\)"), (nothing, "NoneType")):
        monkeypatch.setitem(samplers.SAMPLERS, "mine", function)
        s = Sampler("mine")
        assert samplers.make(s).grid == "even"
        sample = samplers.make_sample(lambda: inputs, s)
        with pytest.raises(ValueError, match=rf"the sampler mine returns {words}, but x has the"):
            sample()
