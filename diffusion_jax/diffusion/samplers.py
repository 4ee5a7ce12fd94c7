"""Samplers: x_T -> x_0, given only a denoiser D(x, sigma).

All share one signature, `sampler(denoise, x, sigmas, noise)`. `x` has variance
sigmas[0]^2; the N + 1 levels `sigmas` decrease and end at 0, N being the number
of steps; `noise(i)` is the standard normal draw of step i. Guidance,
thresholding and the text conditioning live inside `denoise`, which every
sampler traces once.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from diffusion_jax.diffusion.noise import LogSNR, sigma_of
from diffusion_jax.diffusion.precond import Denoiser, Images, Sigma

Scalar = int | float | Float[Array, ""]
Sigmas = Float[Array, "levels"]
Noise = Callable[[Int[Array, ""]], Images]
Sampler = Callable[[Denoiser, Images, Sigmas, Noise], Images]


def karras_sigmas(
    n: int, sigma_min: Scalar = 0.002, sigma_max: Scalar = 80.0, rho: Scalar = 7.0
) -> Float[Array, "{n}+1"]:
    """Noise levels of EDM, equation 5, for n steps: n levels and the final 0."""
    top, bottom = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return jnp.append((top + jnp.linspace(0, 1, n) * (bottom - top)) ** rho, 0.0)


def log_snr_sigmas(log_snr: LogSNR, n: int) -> Float[Array, "{n}+1"]:
    """Levels of a log-SNR schedule at n + 1 even times from t = 1 to t = 0.

    They end where the schedule does, at sigma(0) of about 0.01, which is what `ddpm`
    expects; for the other samplers see `ending_at_zero`.
    """
    return sigma_of(log_snr(jnp.linspace(1, 0, n + 1)))


def spaced_times(n: int, steps: int = 1000) -> Float[np.ndarray, "{n}+1"]:
    """Times of a table for DDIM and PLMS in exactly n steps, 1 <= n <= steps, and then 0.

    Where n divides `steps` up to half of it, LDM's own: 1, 1 + steps / n, ... from below, so that
    few steps start below the last time. Otherwise the same evenly spaced, between whole times;
    above steps / 2 they run from 1 to steps - 1. ValueError for another n.

    In numpy, like `uniform_times`: in JAX each length would compile a program.
    """
    if not 1 <= n <= steps:
        raise ValueError(f"{n} sampling steps: a table of {steps} times has 1 to {steps} of them")
    gap = steps / n if 2 * n <= steps else (steps - 2) / (n - 1)
    return np.append(1 + gap * np.arange(n - 1, -1, -1), 0.0).astype(np.float32)


def uniform_times(n: int, steps: int = 1000) -> Float[np.ndarray, "{n}+1"]:
    """Even times of a table from its last to 0, mostly between whole ones: DPM-Solver's."""
    return np.linspace(steps - 1, 0, n + 1, dtype=np.float32)


def ending_at_zero(sigmas: Sigmas) -> Sigmas:
    """The same levels with 0 in place of the last."""
    return sigmas.at[-1].set(0.0)


def initial_noise(keys: Key[Array, "B"], shape: tuple[int, int, int], sigma: Scalar) -> Images:
    """The start of a sampler: sigma * eps, each image [H, W, C] drawn from its own key."""
    return sigma * _normal(keys, 0, shape)


def gaussian_noise(keys: Key[Array, "B"], shape: tuple[int, int, int]) -> Noise:
    """A sampler's draws, each image [H, W, C] from its own key, whatever its batch."""
    return lambda i: _normal(keys, i + 1, shape)  # Draw 0 is the initial noise.


def heun(
    denoise: Denoiser,
    x: Images,
    sigmas: Sigmas,
    noise: Noise,
    *,
    churn: Scalar = 0.0,
    s_min: Scalar = 0.0,
    s_max: Scalar = float("inf"),
    s_noise: Scalar = 1.0,
) -> Images:
    """Heun's method with optional noise churn in [s_min, s_max] (EDM, Algorithm 2).

    N steps are 2 N - 1 evaluations of D. The scan runs over evaluations, even ones
    Euler's and odd ones the corrections, so that the network is compiled once.
    """
    n = len(sigmas) - 1
    inside = (s_min <= sigmas) & (sigmas <= s_max)
    gammas = jnp.where(inside, jnp.minimum(churn / n, 2**0.5 - 1), 0)

    def evaluate(carry, k):
        x, x_hat, d = carry  # x_hat and d: where the step began, and its slope there
        i, first = k // 2, k % 2 == 0
        sigma, sigma_next, gamma = sigmas[i], sigmas[i + 1], gammas[i]
        sigma_hat = sigma * (1 + gamma)
        # sqrt(sigma_hat^2 - sigma^2), which rounding could make the root of a negative number.
        added = s_noise * sigma * jnp.sqrt(gamma * (2 + gamma))
        x = x + jnp.where(first, added, 0) * noise(i)
        level = jnp.where(first, sigma_hat, sigma_next)

        d_here = (x - denoise(x, _batch(level, x))) / level
        x_hat = jnp.where(first, x, x_hat)
        slope = jnp.where(first, d_here, (d + d_here) / 2)
        return (x_hat + (sigma_next - sigma_hat) * slope, x_hat, d_here), None

    return jax.lax.scan(evaluate, (x, x, jnp.zeros_like(x)), jnp.arange(2 * n - 1))[0][0]


def ddim(
    denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Noise, *, eta: Scalar = 0.0
) -> Images:
    """DDIM (Song et al. 2021), equation 12: Euler's method in sigma where eta = 0.

    eta in [0, 1] is the share of new noise; at 1 a step draws from DDPM's posterior.
    """

    def step(x, inputs):
        i, sigma, sigma_next = inputs
        x0 = denoise(x, _batch(sigma, x))
        r = sigma_next / sigma
        up = eta * sigma_next * jnp.sqrt(1 - r**2)
        # sqrt(sigma_next^2 - up^2) / sigma, without the cancellation that eta = 1 brings.
        down = r * jnp.sqrt((1 - eta**2) + (eta * r) ** 2)
        return x0 + down * (x - x0) + up * noise(i), None

    return jax.lax.scan(step, x, (jnp.arange(len(sigmas) - 1), sigmas[:-1], sigmas[1:]))[0]


def euler(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Noise) -> Images:
    """Euler's method in sigma: `ddim` with eta = 0."""
    return ddim(denoise, x, sigmas, noise)


def ddpm(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Noise) -> Images:
    """DDPM's ancestral sampler (Ho et al. 2020, Algorithm 2) on any sigmas.

    On a schedule that ends at sigma(0) > 0 it returns, as Algorithm 2 does, the
    posterior mean there, in the schedule's own coordinates alpha(0) * x; on sigmas that
    end at 0 it is `ddim` with eta = 1.
    """
    last = len(sigmas) - 2
    all_but_last = lambda i: jnp.where(i < last, noise(i), 0)
    return in_own_coordinates(ddim(denoise, x, sigmas, all_but_last, eta=1.0), sigmas[-1])


def in_own_coordinates(x: Images, sigma: Scalar) -> Images:
    """alpha * x, what a variance-preserving model holds at this level; x itself where it is 0."""
    return x / jnp.sqrt(1 + sigma**2)


def plms(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Noise) -> Images:
    """PLMS (Liu et al. 2022): four-step Adams-Bashforth on eps, N + 1 evaluations of D, no noise.

    The first step is taken twice, as CompVis does: along its slope, then along the mean of the
    slopes at both ends; later ones see as many slopes as there are. What F predicts does not
    matter, since eps is (x - D) / sigma.
    """
    del noise  # Deterministic.
    n = len(sigmas) - 1
    # A single step to 0, where there is no slope, is not corrected.
    corrected = sigmas[1] > 0
    second = jnp.where(corrected, sigmas[1], sigmas[0])
    levels = jnp.concatenate([sigmas[:1], second[None], sigmas[1:-1]])
    starts = jnp.concatenate([sigmas[:1], sigmas[:1], sigmas[1:-1]])
    ends = jnp.concatenate([sigmas[1:2], sigmas[1:2], sigmas[2:]])
    half = jnp.where(corrected, 0.5, 0.0)
    weights = jnp.zeros((n + 1, 4)).at[0, 0].set(1).at[1, :2].set(jnp.array([half, 1 - half]))
    for i, row in enumerate(_ADAMS_BASHFORTH):
        weights = weights.at[2 + i :].set(jnp.array(row))

    def evaluate(carry, inputs):
        x, x_before, before, before_2, before_3 = carry  # Slopes of the three steps before.
        k, level, start, end, w = inputs
        # A product: how XLA divides by a scalar depends on the size of the batch.
        slope = (x - denoise(x, _batch(level, x))) * (1 / level)
        mean = w[0] * slope + w[1] * before + w[2] * before_2 + w[3] * before_3
        x_next = jnp.where(k == 1, x_before, x) + (end - start) * mean
        keep = lambda old, new: jnp.where(k == 1, old, new)
        slopes = keep(before, slope), keep(before_2, before), keep(before_3, before_2)
        return (x_next, x, *slopes), None

    zero = jnp.zeros_like(x)
    carry = (x, x, zero, zero, zero)
    inputs = (jnp.arange(n + 1), levels, starts, ends, weights)
    return jax.lax.scan(evaluate, carry, inputs)[0][0]


def dpmpp_2m(
    denoise: Denoiser,
    x: Images,
    sigmas: Sigmas,
    noise: Noise,
    *,
    first_order_end: bool = False,
) -> Images:
    """DPM-Solver++(2M) (Lu et al. 2022, Algorithm 2): two-step in -ln sigma, no noise.

    The first step and the last, to 0, are of first order. With `first_order_end` the last is so
    also where it ends above 0, which its authors' code does of fewer than 15 steps.
    """
    del noise  # Deterministic.
    last = len(sigmas) - 2

    def step(carry, inputs):
        x, x0_before, h_before = carry
        i, sigma, sigma_next = inputs
        x0 = denoise(x, _batch(sigma, x))
        second_order = (h_before > 0) & (sigma_next > 0)
        if first_order_end:
            second_order &= i < last
        h = jnp.log(sigma / jnp.where(sigma_next > 0, sigma_next, sigma))
        weight = jnp.where(second_order, h / jnp.where(second_order, 2 * h_before, 1), 0)
        d = x0 + weight * (x0 - x0_before)
        return (d + sigma_next / sigma * (x - d), x0, h), None

    carry = (x, jnp.zeros_like(x), jnp.zeros(()))
    return jax.lax.scan(step, carry, (jnp.arange(last + 1), sigmas[:-1], sigmas[1:]))[0][0]


# Weights of the slope here and of those before, once there are one, two and three of these.
_ADAMS_BASHFORTH = (
    (3 / 2, -1 / 2, 0.0, 0.0),
    (23 / 12, -16 / 12, 5 / 12, 0.0),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)


def _batch(sigma: Float[Array, ""], x: Images) -> Sigma:
    return jnp.full(x.shape[:1], sigma, x.dtype)


def _normal(keys: Key[Array, "B"], draw: int | Int[Array, ""], shape: tuple[int, ...]) -> Images:
    # Drawn flat: XLA's CPU backend compiles a 4-D draw of the same numbers several times slower.
    flat = lambda key: jax.random.normal(jax.random.fold_in(key, draw), (math.prod(shape),))
    return jax.vmap(flat)(keys).reshape(-1, *shape)
