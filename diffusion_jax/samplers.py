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
from jaxtyping import Array, Float, Int, Key

from diffusion_jax.noise import LogSNR, sigma_of
from diffusion_jax.precond import Denoiser, Images, Sigma

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


def ddpm(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Noise) -> Images:
    """DDPM's ancestral sampler (Ho et al. 2020, Algorithm 2) on any sigmas.

    On a schedule that ends at sigma(0) > 0 it returns, as Algorithm 2 does, the
    posterior mean there, in the schedule's own coordinates alpha(0) * x; on sigmas that
    end at 0 it is `ddim` with eta = 1.
    """
    last = len(sigmas) - 2
    all_but_last = lambda i: jnp.where(i < last, noise(i), 0)
    return ddim(denoise, x, sigmas, all_but_last, eta=1.0) / jnp.sqrt(1 + sigmas[-1] ** 2)


def dpmpp_2m(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Noise) -> Images:
    """DPM-Solver++(2M) (Lu et al. 2022, Algorithm 2): two-step in -ln sigma, no noise.

    The first step and the last, to 0, are of first order.
    """
    del noise  # Deterministic.

    def step(carry, inputs):
        x, x0_before, h_before = carry
        sigma, sigma_next = inputs
        x0 = denoise(x, _batch(sigma, x))
        second_order = (h_before > 0) & (sigma_next > 0)
        h = jnp.log(sigma / jnp.where(sigma_next > 0, sigma_next, sigma))
        weight = jnp.where(second_order, h / jnp.where(second_order, 2 * h_before, 1), 0)
        d = x0 + weight * (x0 - x0_before)
        return (d + sigma_next / sigma * (x - d), x0, h), None

    carry = (x, jnp.zeros_like(x), jnp.zeros(()))
    return jax.lax.scan(step, carry, (sigmas[:-1], sigmas[1:]))[0][0]


def _batch(sigma: Float[Array, ""], x: Images) -> Sigma:
    return jnp.full(x.shape[:1], sigma, x.dtype)


def _normal(keys: Key[Array, "B"], draw: int | Int[Array, ""], shape: tuple[int, ...]) -> Images:
    # Drawn flat: XLA's CPU backend compiles a 4-D draw of the same numbers several times slower.
    flat = lambda key: jax.random.normal(jax.random.fold_in(key, draw), (math.prod(shape),))
    return jax.vmap(flat)(keys).reshape(-1, *shape)
