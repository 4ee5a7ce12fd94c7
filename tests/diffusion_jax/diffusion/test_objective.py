"""Objectives match their papers: weights, rectified flow, learned uncertainty, offset noise."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.diffusion import groups, noise, objective, onestep, precond, samplers
from sd_jax.settings import Sampler

KEYS = jax.random.split(jax.random.key(0), 3)
X0, EPS, F = (jax.random.normal(key, (3, 4, 4, 3)) for key in KEYS)
SIGMA = jnp.array([0.1, 0.5, 2.0])  # snr 100, 4 and 0.25
SNR = np.array([100.0, 4.0, 0.25])
network = lambda x, time: F


def make(predicts="eps", **fields):
    """Build an objective from config fields."""
    return groups.Diffusion(predicts=predicts, **fields).objective


def factor(predicts, **fields):
    """Return the factor of each image's loss of F."""
    built = make(predicts, **fields)
    c_out = built.scalings(SIGMA).c_out
    return np.asarray(built.weighting.weigh({}, SIGMA, c_out, jnp.ones(3)))


def test_min_snr_weights_match_the_paper_for_every_prediction():
    np.testing.assert_allclose(factor("eps", weight="min_snr(5)"), [0.05, 1, 1], rtol=1e-5)
    np.testing.assert_allclose(factor("v", weight="min_snr(5)"), np.minimum(SNR, 5) / (SNR + 1), rtol=1e-5)
    np.testing.assert_allclose(factor("x0", weight="min_snr(5)"), np.minimum(SNR, 5), rtol=1e-5)
    np.testing.assert_array_equal(factor("v"), 1)


def test_p2_weights_match_equation_8_of_the_paper():
    np.testing.assert_allclose(factor("eps", weight="p2"), 1 / (1 + SNR), rtol=1e-5)
    np.testing.assert_allclose(factor("eps", weight="p2(k=2, gamma=0.5)"), (2 + SNR) ** -0.5, rtol=1e-5)


def test_the_edm_weight_turns_the_x0_loss_into_edms_loss():
    np.testing.assert_allclose(factor("edm", weight="edm(0.5)"), 1, rtol=1e-5)
    sigma = np.float64(SIGMA)
    expected = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
    np.testing.assert_allclose(factor("x0", weight="edm(0.5)"), expected, rtol=1e-5)


def test_the_flow_weight_turns_the_x0_loss_into_the_flow_loss():
    """D implies the flow (x_t - D) / t, with target eps - x0 and x_t = (1 - t) x0 + t eps.

    1 / t is limited to 1 / 0.05, which the last level reaches.
    """
    sigma = jnp.append(SIGMA, 0.01)
    x0, eps, f = (jnp.concatenate([a, a[:1]]) for a in (X0, EPS, F))
    t = (np.float64(sigma) / (1 + np.float64(sigma)))[:, None, None, None]
    x_t = (1 - t) * np.float64(x0) + t * np.float64(eps)
    divisor = np.maximum(t, 0.05)
    flow, target = (x_t - np.float64(f)) / divisor, (x_t - np.float64(x0)) / divisor
    np.testing.assert_allclose(target[:3], np.float64(eps - x0)[:3], atol=1e-5)
    expected = ((flow - target) ** 2).mean()
    built = make("x0", weight="flow")
    weighted, _ = built.loss({}, lambda x, time: f, x0, eps, sigma)
    np.testing.assert_allclose(weighted, expected, rtol=1e-5)
    np.testing.assert_allclose(factor("flow", weight="flow"), 1, rtol=1e-5)
    low, _ = make("x0", weight="flow(floor=0.9)").loss({}, lambda x, time: f, x0, eps, sigma)
    np.testing.assert_allclose(low, (((np.float64(f)) - np.float64(x0)) ** 2).mean() / 0.81, rtol=1e-5)


def test_the_v_loss_is_equal_for_every_prediction():
    """If one denoiser is written as each prediction, v-losses are equal and other losses differ."""
    sigma = np.float64(SIGMA)[:, None, None, None]
    x = np.float64(X0) + sigma * np.float64(EPS)
    d = 0.3 * x + 0.1
    alpha = 1 / np.sqrt(1 + sigma**2)
    v = alpha * (x - d) / sigma - sigma * alpha * d
    target = alpha * np.float64(EPS) - sigma * alpha * np.float64(X0)
    expected = ((v - target) ** 2).mean((1, 2, 3))
    for predicts in precond.PRECONDS:
        built = make(predicts)
        c = built.scalings(SIGMA)
        skip, out = (np.float64(k)[:, None, None, None] for k in (c.c_skip, c.c_out))
        answer = jnp.float32((d - skip * x) / out)
        f = lambda x_in, time, answer=answer: answer
        own, v_loss = built.errors(f, X0, EPS, SIGMA)
        np.testing.assert_allclose(v_loss, expected, rtol=1e-4)
        np.testing.assert_allclose(own, precond.loss(f, built.scalings, X0, EPS, SIGMA), rtol=1e-6)
    own, v_loss = make("v").errors(network, X0, EPS, SIGMA)
    np.testing.assert_allclose(own, v_loss, rtol=1e-5)


def test_the_loss_uses_the_distance_and_the_weight_of_the_config():
    built = make("v", distance="l1", weight="min_snr(5)")
    total, losses = built.loss({}, network, X0, EPS, SIGMA)
    np.testing.assert_array_equal(losses, precond.loss(network, built.scalings, X0, EPS, SIGMA, precond.l1))
    expected = (np.minimum(SNR, 5) / (SNR + 1) * np.float64(losses)).mean()
    np.testing.assert_allclose(total, expected, rtol=1e-5)


def test_flow_predicts_eps_minus_x0_from_the_interpolated_image():
    seen = []

    def spy(x, time):
        seen.append(x)
        return F

    built = make("flow", noise="logit_normal")
    losses = built.loss({}, spy, X0, EPS, SIGMA)[1]
    t = np.float64(SIGMA / (1 + SIGMA))[:, None, None, None]
    np.testing.assert_allclose(seen[0], (1 - t) * X0 + t * EPS, atol=1e-6)
    expected = ((np.float64(F) - (np.float64(EPS) - np.float64(X0))) ** 2).mean((1, 2, 3))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_euler_over_sigma_equals_euler_over_flow_time():
    """x_t + (t' - t) F in SD3's coordinates, starting from pure noise at t = 1."""
    t = np.linspace(1, 0, 6)
    shifted = 3 * t / (1 + 2 * t)
    built = make("flow", noise="logit_normal(shift=3)")
    f = lambda x, time: jnp.tanh(x) + 0.1
    z = np.float64(X0)
    for now, later in itertools.pairwise(shifted):
        z = z + (later - now) * (np.tanh(z) + 0.1)
    sigmas = built.noise.level(jnp.float32(t))
    denoise = precond.denoiser(f, built.scalings)
    x = onestep.euler(denoise, X0 * (1 + sigmas[0]), sigmas, lambda i: EPS)
    np.testing.assert_allclose(x, z, atol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_logit_normal_times_have_the_density_of_sd3(shift):
    """Compare counts of draws with the integral of SD3's equation 19, shifted by equation 23."""
    built = noise.logit_normal(mean=0.5, std=0.8, shift=shift)
    sigma = np.float64(built.draw(jax.random.key(1), 40_000)) / shift
    t = sigma / (1 + sigma)
    grid = (np.arange(100_000) + 0.5) / 100_000
    density = np.exp(-((np.log(grid / (1 - grid)) - 0.5) ** 2) / (2 * 0.64))
    density /= 0.8 * np.sqrt(2 * np.pi) * grid * (1 - grid)
    for edge in (0.2, 0.5, 0.8):
        exact = density[grid < edge].mean() * edge
        assert abs((t < edge).mean() - exact) < 4 * 0.5 / 200  # 4 standard errors.


def test_uniform_flow_draws_times_uniformly():
    sigma = np.float64(noise.uniform_flow().draw(jax.random.key(1), 40_000))
    t = sigma / (1 + sigma)
    assert np.isfinite(sigma).all()
    below = [(t < edge).mean() for edge in (0.1, 0.5, 0.9)]
    np.testing.assert_allclose(below, [0.1, 0.5, 0.9], atol=4 * 0.5 / 200)


def test_learned_uncertainty_starts_at_the_loss_and_converges_to_its_logarithm():
    built = make("eps", weight="uncertainty(channels=16)")
    params = built.with_learned({"params": {}})
    assert params[objective.LEARNED_WEIGHTING]["kernel"].shape == (16,)
    total, losses = built.loss(params, network, X0, EPS, SIGMA)
    np.testing.assert_allclose(total, losses.mean(), rtol=1e-6)

    sigma = jnp.exp(jnp.linspace(-2.0, 2.0, 9))
    expected = jnp.exp(jnp.sin(2 * jnp.log(sigma)))  # A loss that depends on the level alone.
    weigh = lambda p: built.weighting.weigh(p, sigma, sigma, expected).mean()
    descend = jax.jit(lambda p: jax.tree.map(lambda x, g: x - 0.5 * g, p, jax.grad(weigh)(p)))
    for _ in range(2000):
        params = descend(params)
    # The minimum of l / e^u + u is 1 + ln l, at u = ln l.
    np.testing.assert_allclose(weigh(params), 1 + jnp.log(expected).mean(), atol=2e-3)


def test_a_fixed_weighting_adds_no_parameters():
    params = {"params": {"kernel": jnp.ones(3)}}
    assert make("v").with_learned(params) is params


def test_offset_noise_shifts_each_channel_of_each_image_by_one_number():
    keys = jax.random.split(KEYS[0], 2000)
    assert make("v").shifted(keys[: len(EPS)], EPS) is EPS
    shift = np.asarray(make("v", offset_noise=0.1).shifted(keys[: len(EPS)], EPS) - EPS)
    np.testing.assert_allclose(shift, np.broadcast_to(shift[:, :1, :1], shift.shape), atol=1e-6)
    many = jnp.zeros((2000, 2, 2, 3))
    values = np.asarray(make("v", offset_noise=0.1).shifted(keys, many))[:, 0, 0]
    np.testing.assert_allclose(values.std(), 0.1, rtol=4 / np.sqrt(2 * 6000))


def test_quantiles_of_the_ldm_noise_match_its_time_steps():
    table = noise.scaled_linear()
    levels = noise.quantiles(table, 4)
    steps = np.asarray(table.time(jnp.asarray(levels)))
    np.testing.assert_allclose(steps, [125, 375, 625, 875], atol=8)  # 65,536 draws: 4 errors.


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        # lcm draws from the data only if D is a consistency model.
        *((name, "") for name in samplers.SAMPLERS if name != "lcm"),
        *itertools.product(("ddim", "heun", "dpmpp_3m_sde"), ("leading", "linspace", "trailing")),
    ],
)
def test_every_sampler_reaches_the_data_from_pure_noise(name, grid):
    """30 flow steps with SD3's shift from sigma = 2^20, on pixels N(0, 1/4) with the exact D.

    If Heun corrected its first step, the deviation would be 11 instead of 1/2.
    """
    s = Sampler(name, 30, 0.0, 1.0, "", 8, 4, grid=grid)
    built = noise.logit_normal(shift=3)
    sigmas = samplers.sampling_grid(built, s).sigmas
    denoise = lambda x, sigma: x * (0.25 / (0.25 + sigma**2))[:, None, None, None]
    keys, shape = jax.random.split(jax.random.key(0), 2), (24, 24, 3)
    x = samplers.initial_noise(keys, shape, sigmas[0])
    x = s.method.sampler(denoise, x, sigmas, samplers.gaussian_noise(keys, shape))
    assert float(jnp.std(x)) == pytest.approx(0.5, abs=0.1)  # First-order SDEs: 0.41.
