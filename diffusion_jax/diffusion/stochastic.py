"""Stochastic samplers: DPM-Solver++ SDE with a Brownian path per image, and Restart.

The noise of an SDE step is an increment of one Brownian path, so more steps refine the same path
and the image converges. A sampler takes (denoise, x, sigmas, noise) and returns x at the last noise
level. onestep.py describes these arguments.
"""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from diffusion_jax.config.ranges import Interval
from diffusion_jax.diffusion.multistep import phi
from diffusion_jax.diffusion.noise import Scalar, Sigmas
from diffusion_jax.diffusion.onestep import Draws, heun_steps, same_level
from diffusion_jax.diffusion.precond import Denoiser, Images

NoiseLevel = Float[Array, ""]
Strength = Annotated[Scalar, Interval("[0, 1]")]
_LOW, _LENGTH = -12.0, 32.0  # Start and length of a path's main piece in log2 sigma.
_DEPTH = 16  # Halvings: the path is linear within pieces of 3.4e-4 in ln sigma.


def brownian(noise: Draws) -> Callable[[NoiseLevel], Images]:
    """Return a function W(sigma): for each image, a Brownian path whose time is log2 sigma.

    The path is computed from the draws noise(i), and does not depend on the levels at which it is
    evaluated. Its main piece spans sigma from 2^-12 to 2^20. A piece of the same length continues
    the path on either side, because the cosine schedule starts at 2^24.4. Each evaluation takes 17
    draws.
    """

    def at(sigma):
        t = (jnp.log2(sigma) - _LOW) / _LENGTH
        above, below = t > 1, t < 0
        first = jnp.where(above, 1, jnp.where(below, 2, 0)) << (_DEPTH + 1)
        w = _piece(noise, first, jnp.where(above, t - 1, jnp.abs(t)))
        w = jnp.where(above, _LENGTH**0.5 * noise(jnp.array(0)) + w, w)
        return jnp.where(below, -w, w)

    return at


def _piece(noise: Draws, first: Int[Array, ""], t: Float[Array, ""]) -> Images:
    """Return the value at t in [0, 1] of a Brownian path that starts at 0.

    The value at 1 has variance _LENGTH. The path is a binary tree, as in Li et al. 2020 ("Scalable
    gradients for stochastic differential equations", section 4). The value at the midpoint of an
    interval is the mean of the values at its ends, plus a scaled normal draw. The index of this
    draw is `first` plus the number of the tree node.
    """
    ends = jnp.zeros_like(noise(first)), _LENGTH**0.5 * noise(first)

    def halve(k, carry):
        low, high, left, node = carry
        length = jnp.ldexp(1.0, -k)
        middle = (low + high) / 2 + jnp.sqrt(_LENGTH * length / 4) * noise(first + node)
        right = t >= left + length / 2
        low, high = jnp.where(right, middle, low), jnp.where(right, high, middle)
        return low, high, left + right * length / 2, 2 * node + right

    start = (*ends, jnp.zeros(()), jnp.array(1))
    low, high, left, _ = jax.lax.fori_loop(0, _DEPTH, halve, start)
    return low + (high - low) * jnp.clip((t - left) * 2.0**_DEPTH, 0, 1)


def dpmpp_2m_sde(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws, *, strength: Strength = 1.0) -> Images:
    """Sample with DPM-Solver++(2M) SDE, k-diffusion's midpoint variant (Lu et al. 2022, appendix).

    N steps take N evaluations of D. `strength` scales the new noise and is called eta in
    k-diffusion. With strength 0 and at least 15 steps, the sampler equals `dpmpp_2m`.
    """

    def steps(x, d, before, h, h_eta):
        d1, _, (h_1, _) = before
        r_inverse = jnp.where(h_1 > 0, h / jnp.where(h_1 > 0, h_1, 1), 0)
        ahead = d + r_inverse * (d - d1) / 2
        return jnp.exp(-h_eta) * x - jnp.expm1(-h_eta) * ahead

    return _sde(steps, denoise, x, sigmas, noise, strength)


def dpmpp_3m_sde(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws, *, strength: Strength = 1.0) -> Images:
    """Sample with k-diffusion's DPM-Solver++(3M) SDE, a three-step method in -ln sigma.

    N steps take N evaluations of D. `strength` scales the new noise.
    """

    def steps(x, d, before, h, h_eta):
        d1, d2, (h_1, h_2) = before
        one, two = h_1 > 0, h_2 > 0
        r_0, r_1 = jnp.where(one, h_1, h) / h, jnp.where(two, h_2, h) / h
        slope_0, slope_1 = (d - d1) / r_0, (d1 - d2) / r_1
        bend = jnp.where(two, (slope_0 - slope_1) / (r_0 + r_1), 0)
        slope = jnp.where(one, slope_0 + bend * r_0, 0)
        phi_2, phi_3 = phi(2, -h_eta), phi(3, -h_eta)
        x = jnp.exp(-h_eta) * x - jnp.expm1(-h_eta) * d
        return x + h_eta * (phi_2 * slope + phi_3 * bend)

    return _sde(steps, denoise, x, sigmas, noise, strength)


def _sde(steps, denoise, x, sigmas, noise, strength) -> Images:
    """Run a stochastic multistep solver. A step to sigma = 0 returns D.

    The function `steps` computes x at the end of a step, before noise is added. Its arguments are
    x, D, (d1, d2, (h_1, h_2)), h and (1 + strength) h. Here d1 and d2 are the values of D in the
    last step and in the one before it, and h_1 and h_2 are the sizes of these steps, 0 where there
    was no step. h is the size of the present step. Step sizes are in ln sigma.
    """
    path = brownian(noise)

    def step(carry, inputs):
        x, w, d1, d2, h_1, h_2 = carry
        sigma, sigma_next = inputs
        d = denoise(x, same_level(sigma, x))
        last = sigma_next == 0
        end = jnp.where(last, sigma / 2, sigma_next)  # `where` discards the last.
        h = jnp.log(sigma / end)
        moved = steps(x, d, (d1, d2, (h_1, h_2)), h, (1 + strength) * h)
        w_next = path(end)
        added = end * jnp.sqrt(-jnp.expm1(-2 * strength * h))
        moved += added * (w - w_next) / jnp.sqrt(jnp.log2(sigma / end))
        return (jnp.where(last, d, moved), w_next, d, d1, h, h_1), None

    zero, none = jnp.zeros_like(x), jnp.zeros(())
    carry = (x, path(sigmas[0]), zero, zero, none, none)
    return jax.lax.scan(step, carry, (sigmas[:-1], sigmas[1:]))[0][0]


def restart(
    denoise: Denoiser,
    x: Images,
    sigmas: Sigmas,
    noise: Draws,
    *,
    low: Annotated[Scalar, Interval("(0, inf)")] = 0.06,
    high: Annotated[Scalar, Interval("(0, inf)")] = 0.3,
    repeats: Annotated[int, Interval("[0, 100]")] = 2,
    inner: Annotated[int, Interval("[1, 100]")] = 4,
) -> Images:
    """Sample with Restart (Xu et al. 2023, Algorithm 1) and Heun's method, with one interval.

    When sampling reaches the grid's level nearest to `low`, noise is added up to the level `high`,
    and `inner` Heun steps with EDM's spacing return to the grid's level. This happens `repeats`
    times. N steps take 2 N - 1 + 2 * repeats * inner evaluations of D. With N = 1 there is no
    level between the ends of the grid, and so no restart.
    """
    n, more = len(sigmas) - 1, repeats * inner
    if n < 2 or not more:
        return heun_steps(denoise, x, sigmas, jnp.zeros(n), noise)
    j = jnp.argmin(jnp.abs(jnp.log(sigmas[1:n] / low))) + 1  # In [1, n - 1]: not at the ends.
    # The levels of the `inner` steps after each jump from sigmas[j] to `high`.
    share = (jnp.arange(more) % inner + 1) / inner
    inside = (high ** (1 / 7) + share * (sigmas[j] ** (1 / 7) - high ** (1 / 7))) ** 7
    k = jnp.arange(n + 1 + more)
    within = (k > j) & (k <= j + more)
    levels = jnp.where(within, inside[jnp.clip(k - j - 1, 0, more - 1)], sigmas[k - more * (k > j)])
    jumps = (k >= j) & (k < j + more) & ((k - j) % inner == 0)
    gammas = jnp.where(jumps, jnp.maximum(high / sigmas[j] - 1, 0), 0)
    return heun_steps(denoise, x, levels, gammas[:-1], noise)
