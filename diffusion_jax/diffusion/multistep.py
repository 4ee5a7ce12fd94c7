"""Multistep samplers, which reuse earlier evaluations of D: PLMS, LMS, DPM-Solver++, UniPC, DEIS.

A sampler takes (denoise, x, sigmas, noise) and returns x at the last noise level. onestep.py
describes these arguments.
"""

import math
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from diffusion_jax.config.ranges import Interval
from diffusion_jax.diffusion.noise import Sigmas
from diffusion_jax.diffusion.onestep import NO_SIGNAL, Draws, same_level
from diffusion_jax.diffusion.precond import Denoiser, Images

Turn = Callable[[Images, Images, Float[Array, ""]], Images]
"""A function from (slope, x, sigma) to the quantity that PLMS averages, or the inverse function,
from (quantity, x, sigma) to the slope."""


def plms(
    denoise: Denoiser,
    x: Images,
    sigmas: Sigmas,
    noise: Draws,
    turns: tuple[Turn, Turn] = (lambda d, x, sigma: d, lambda d, x, sigma: d),
) -> Images:
    """Sample with PLMS (Liu et al. 2022): the four-step Adams-Bashforth method on eps.

    N steps take N + 1 evaluations of D, and add no noise. The first step is computed twice, as in
    CompVis' code: along the slope at its start, then along the mean of the slopes at its start and
    end. The second step uses two slopes, the third three, and all later steps four. The network may
    predict any quantity, since eps = (x - D) / sigma. As a loop, with t for sigma:

        for i in range(n):
            d = (x - D(x, t[i])) / t[i]
            if i == 0:
                ahead = x + (t[1] - t[0]) * d
                mean = (d + (ahead - D(ahead, t[1])) / t[1]) / 2
            else:                             # Weights of two, three, then four slopes.
                mean = sum(w * slope for w, slope in zip(adams_bashforth[i], (d, *before)))
            x = x + (t[i + 1] - t[i]) * mean
            before = (d, *before)

    The code scans over evaluations of D instead of steps; k = 1 is the second evaluation of the
    first step. `turns` is a pair of functions: the first converts a slope to the quantity that is
    averaged, the second converts the average back to a slope. The default averages the slopes
    themselves.
    """
    del noise  # This method adds no noise.
    n = len(sigmas) - 1
    # Do not correct a single step to 0, where no slope exists, or a step from pure noise.
    corrected = (sigmas[1] > 0) & (sigmas[0] < NO_SIGNAL)
    second = jnp.where(corrected, sigmas[1], sigmas[0])
    levels = jnp.concatenate([sigmas[:1], second[None], sigmas[1:-1]])
    starts = jnp.concatenate([sigmas[:1], sigmas[:1], sigmas[1:-1]])
    ends = jnp.concatenate([sigmas[1:2], sigmas[1:2], sigmas[2:]])
    half = jnp.where(corrected, 0.5, 0.0)
    weights = jnp.zeros((n + 1, 4)).at[0, 0].set(1).at[1, :2].set(jnp.array([half, 1 - half]))
    for i, row in enumerate(_ADAMS_BASHFORTH):
        weights = weights.at[2 + i :].set(jnp.array(row))

    def evaluate(carry, inputs):
        x, x_before, before, before_2, before_3 = carry  # x, and the slopes of three earlier steps.
        k, level, start, end, w = inputs
        # Multiply by 1 / level: how XLA rounds a division by a scalar depends on the batch size.
        slope = (x - denoise(x, same_level(level, x))) * (1 / level)
        slope = turns[0](slope, x, level)
        mean = w[0] * slope + w[1] * before + w[2] * before_2 + w[3] * before_3
        begin = jnp.where(k == 1, x_before, x)
        x_next = begin + (end - start) * turns[1](mean, begin, start)
        keep = lambda old, new: jnp.where(k == 1, old, new)
        slopes = keep(before, slope), keep(before_2, before), keep(before_3, before_2)
        return (x_next, x, *slopes), None

    zero = jnp.zeros_like(x)
    carry = (x, x, zero, zero, zero)
    inputs = (jnp.arange(n + 1), levels, starts, ends, weights)
    return jax.lax.scan(evaluate, carry, inputs)[0][0]


def plms_v(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """Sample with PLMS on v instead of eps, as diffusers' PNDM does for models that predict v.

    v = alpha * eps - sqrt(1 - alpha^2) * x0, with alpha = 1 / sqrt(1 + sigma^2). The average of the
    v of several steps is converted to a slope, using x at the start of the present step.
    """

    def to_v(d, x, sigma):
        c = jax.lax.rsqrt(1 + sigma**2)
        return d / c - sigma * c * x

    def to_slope(v, x, sigma):
        c = jax.lax.rsqrt(1 + sigma**2)
        return c * v + sigma * c**2 * x

    return plms(denoise, x, sigmas, noise, turns=(to_v, to_slope))


def lms(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """Sample with k-diffusion's linear multistep method, Adams-Bashforth of order 4 in sigma.

    The polynomial through the slopes of this step and of the last three is integrated exactly over
    the step. The first steps use fewer slopes. The sampler adds no noise.
    """
    del noise  # This method adds no noise.

    def step(carry, inputs):
        x, d_1, d_2, d_3 = carry  # x, and the slopes of three earlier steps.
        sigma, w = inputs
        d = (x - denoise(x, same_level(sigma, x))) * (1 / sigma)
        return (x + (w[0] * d + w[1] * d_1 + w[2] * d_2 + w[3] * d_3), d, d_1, d_2), None

    zero = jnp.zeros_like(x)
    inputs = (sigmas[:-1], _lms_weights(sigmas))
    return jax.lax.scan(step, (x, zero, zero, zero), inputs)[0][0]


def dpmpp_2m(
    denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws, *, steps: Annotated[int, Interval("(0, inf)")] = 15
) -> Images:
    """Sample with DPM-Solver++(2M) (Lu et al. 2022, Algorithm 2), a two-step method in -ln sigma.

    The sampler adds no noise. The first step and a step to 0 are of first order. `steps`
    is the number of steps in the grid. If it is below 15, the last step is always of first order,
    as in the authors' code.
    """
    del noise  # This method adds no noise.
    last = len(sigmas) - 2

    def step(carry, inputs):
        x, x0_before, h_before = carry
        i, sigma, sigma_next = inputs
        x0 = denoise(x, same_level(sigma, x))
        second_order = (h_before > 0) & (sigma_next > 0)
        if steps < 15:
            second_order &= i < last
        h = jnp.log(sigma / jnp.where(sigma_next > 0, sigma_next, sigma))
        weight = jnp.where(second_order, h / jnp.where(second_order, 2 * h_before, 1), 0)
        d = x0 + weight * (x0 - x0_before)
        return (d + sigma_next / sigma * (x - d), x0, h), None

    carry = (x, jnp.zeros_like(x), jnp.zeros(()))
    return jax.lax.scan(step, carry, (jnp.arange(last + 1), sigmas[:-1], sigmas[1:]))[0][0]


def dpmpp_2s(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """Sample with DPM-Solver++(2S) (Lu et al. 2022, Algorithm 1), in pairs of levels of the grid.

    The first step of a pair is of first order. The second one starts where the pair starts, and
    goes over both with the difference of D at the two levels. So N steps take N evaluations of D. A
    step to 0 is of first order. The sampler adds no noise.
    """
    del noise  # This method adds no noise.

    def step(carry, inputs):
        x, begin, x0_begin = carry  # The start of the pair, and D there.
        i, sigma_begin, sigma, sigma_next = inputs
        x0 = denoise(x, same_level(sigma, x))
        second = (i % 2 == 1) & (sigma_next > 0)
        h = jnp.log(sigma_begin / jnp.where(second, sigma_next, sigma / 2))
        r = jnp.where(second, jnp.log(sigma_begin / sigma) / h, 1)
        d = jnp.where(second, x0_begin + (x0 - x0_begin) / (2 * r), x0)
        start, level = jnp.where(second, begin, x), jnp.where(second, sigma_begin, sigma)
        return (d + sigma_next / level * (start - d), x, x0), None

    n = jnp.arange(len(sigmas) - 1)
    inputs = (n, sigmas[jnp.maximum(n - 1, 0)], sigmas[:-1], sigmas[1:])
    return jax.lax.scan(step, (x, x, jnp.zeros_like(x)), inputs)[0][0]


def unipc(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """Sample with UniPC (Zhao et al. 2023) of order 2 with B(h) = e^h - 1, in -ln sigma.

    N steps take N evaluations of D, and add no noise. The predictor is the step of `dpmpp_2m`; in
    the last step it is of first order. The corrector uses D at the end of the step, which the next
    step needs anyway. If h is the length of the step, g that of the previous step, and r = e^-h,
    the corrector computes

        x = r x_begin + (1 - r) (m0 + rho_0 (m0 - m1) h / g + rho_1 (D - m0)),

    where m0 and m1 are D at the start of this step and of the previous one, and D is evaluated at
    the end of this step. The weights solve equation 9 of Zhao et al., so the step is exact if D is
    quadratic in -ln sigma. In the first step, which has no m1, rho_0 is 0 and rho_1 is 1 / 2.
    """
    del noise  # This method adds no noise.
    last = len(sigmas) - 2

    def step(carry, inputs):
        x, begin, m0, m1, h, g = carry
        i, sigma, sigma_next = inputs
        d = denoise(x, same_level(sigma, x))
        # The weights of the corrector, rho_0 * h / g and rho_1; g = 0 marks the first step.
        phi_1, phi_2, phi_3 = jnp.expm1(-h), -h * phi(2, -h), -h * phi(3, -h)
        b_1, b_2 = phi_2 / phi_1, 2 * phi_3 / phi_1
        rho_0 = (b_1 - b_2) / (1 + g / h)
        second = g > 0
        times_ratio = jnp.where(second, rho_0 * h / jnp.where(second, g, 1), 0)
        rho_0, rho_1 = times_ratio, jnp.where(second, b_1 - rho_0, 0.5)
        r = jnp.exp(-h)
        corrected = r * begin + (1 - r) * (m0 + rho_0 * (m0 - m1) + rho_1 * (d - m0))
        x = jnp.where(i > 0, corrected, x)
        ahead = jnp.log(sigma / jnp.where(sigma_next > 0, sigma_next, sigma))
        weight = jnp.where((i > 0) & (i < last), ahead / (2 * h), 0)
        guess = d + weight * (d - m0)
        return (guess + sigma_next / sigma * (x - guess), x, d, m0, ahead, jnp.where(i, h, 0)), None

    zero = jnp.zeros_like(x)
    carry = (x, zero, zero, zero, jnp.ones(()), jnp.zeros(()))
    return jax.lax.scan(step, carry, (jnp.arange(last + 1), sigmas[:-1], sigmas[1:]))[0][0]


def deis(
    denoise: Denoiser,
    x: Images,
    sigmas: Sigmas,
    noise: Draws,
    *,
    order: Annotated[int, Interval("[1, 3]")] = 2,
    steps: Annotated[int, Interval("(0, inf)")] = 15,
) -> Images:
    """Sample with tAB-DEIS (Zhang & Chen 2023, equation 14) in ln sigma, of order 1, 2 or 3.

    N steps take N evaluations of D, and add no noise. A step from sigma_i extrapolates eps by a
    polynomial in u = ln(sigma / sigma_i) through the values of eps at the start of this step and of
    earlier ones. The polynomial is integrated exactly: x' = x + sum_j c_j eps_j, where c_j is the
    integral of the j-th Lagrange polynomial over sigma. The first steps are of lower order, and a
    step to 0 is of first order. `steps` is the number of steps in the grid. If it is below 15, the
    last two steps have at most the orders 2 and 1, as in diffusers.
    """
    del noise  # This method adds no noise.

    def step(carry, inputs):
        x, eps_1, eps_2 = carry
        i, sigma, sigma_1, sigma_2, sigma_next = inputs
        eps = (x - denoise(x, same_level(sigma, x))) / sigma
        v = jnp.log(jnp.where(sigma_next > 0, sigma_next / sigma, 1))
        m0, m1, m2 = (sigma * moment for moment in _moments(v))
        u1, u2 = jnp.log(sigma_1 / sigma), jnp.log(sigma_2 / sigma)
        c1 = m1 / jnp.where(i > 0, u1, 1)
        two = jnp.array([m0 - c1, c1, 0.0])
        three = jnp.array(
            [
                m0 + (m2 - (u1 + u2) * m1) / (u1 * u2),
                (m2 - u2 * m1) / (u1 * (u1 - u2)),
                (m2 - u1 * m1) / (u2 * (u2 - u1)),
            ]
        )
        step_order = jnp.minimum(i + 1, jnp.where(sigma_next > 0, order, 1))
        step_order = jnp.minimum(step_order, n - i) if steps < 15 else step_order
        one = jnp.array([sigma_next - sigma, 0.0, 0.0])
        c = jnp.where(step_order == 1, one, jnp.where(step_order == 2, two, three))
        return (x + c[0] * eps + c[1] * eps_1 + c[2] * eps_2, eps, eps_1), None

    n, zero = len(sigmas) - 1, jnp.zeros_like(x)
    before = lambda k: sigmas[jnp.maximum(jnp.arange(n) - k, 0)]
    inputs = (jnp.arange(n), sigmas[:-1], before(1), before(2), sigmas[1:])
    return jax.lax.scan(step, (x, zero, zero), inputs)[0][0]


def _lms_weights(sigmas: Sigmas) -> Float[Array, "n 4"]:
    """Return the weights of `lms`: integrals of Lagrange polynomials over each step.

    Gauss' quadrature with two nodes is exact for polynomials of degree 3.
    """
    n, k = jnp.arange(len(sigmas) - 1)[:, None], jnp.arange(4)
    exists = k <= n  # [n, 4]
    points = sigmas[jnp.maximum(n - k, 0)]  # [n, 4]
    others = exists[:, None] & (k != k[:, None])  # [n, 4, 4]; the last axis is multiplied over
    gaps = jnp.where(others, points[:, :, None] - points[:, None], 1)
    middle, half = (sigmas[1:] + sigmas[:-1]) / 2, (sigmas[1:] - sigmas[:-1]) / 2
    total = jnp.zeros_like(points)
    for node in (-(3**-0.5), 3**-0.5):
        ahead = (middle + node * half)[:, None, None] - points[:, None]  # [n, 1, 4]
        total += jnp.where(others, ahead / gaps, 1).prod(-1)
    return jnp.where(exists, half[:, None] * total, 0)


def _moments(v: Float[Array, ""]) -> list[Array]:
    """Return the integrals of u^k e^u over u from 0 to v, for k = 0, 1 and 2."""
    exact = (jnp.expm1(v), jnp.exp(v) * (v - 1) + 1, jnp.exp(v) * (v**2 - 2 * v + 2) - 2)
    # Near 0 the exact forms cancel, so sum v^(n + k + 1) / (n! (n + k + 1)) there.
    terms = range(10)
    series = [sum(v ** (n + k + 1) / (math.factorial(n) * (n + k + 1)) for n in terms) for k in range(3)]
    return [jnp.where(jnp.abs(v) < 0.5, s, e) for s, e in zip(series, exact, strict=True)]


def phi(k: int, z: Float[Array, ""]) -> Float[Array, ""]:
    """Compute the function phi_k(z) of exponential integrators, for k = 2 or 3.

    phi_1 = (e^z - 1) / z, and phi_k = (phi_{k-1} - 1 / (k - 1)!) / z.
    """
    # The exact form cancels near 0, so use a series there.
    series = sum(z**n / math.factorial(n + k) for n in range(10))
    exact = jnp.expm1(z) / z
    for j in range(1, k):
        exact = (exact - 1 / math.factorial(j)) / z
    return jnp.where(jnp.abs(z) < 0.5, series, exact)


# Weights of the current slope and of one, two or three earlier ones.
_ADAMS_BASHFORTH = ((3 / 2, -1 / 2, 0.0, 0.0), (23 / 12, -16 / 12, 5 / 12, 0.0), (55 / 24, -59 / 24, 37 / 24, -9 / 24))
