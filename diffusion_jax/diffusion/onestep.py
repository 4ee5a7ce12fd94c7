"""Single-step samplers: Heun's method, Euler's method, DPM-Solver-2, DDIM, DDPM and LCM.

Each step uses only the current x, unlike the steps of the samplers in multistep.py.

In all modules, a sampler is a function `sampler(denoise, x, sigmas, noise)`:

    denoise: D(x, sigma), which includes guidance, thresholds and conditions.
    x: The start: noise of standard deviation sigmas[0], or a noisy image at this level.
    sigmas: The N + 1 decreasing levels of N steps.
    noise: noise(i) is the standard normal draw of step i.

The function returns x at the last level, which is 0 or the smallest level of a schedule. Configs
can set the keyword-only parameters of a sampler. Loops are scans, so that every sampler traces
`denoise` only once. Where the code looks different from the cited paper, a docstring or comment
shows the paper's form.
"""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from diffusion_jax.config.ranges import Interval
from diffusion_jax.diffusion.noise import Scalar, Sigmas
from diffusion_jax.diffusion.precond import Denoiser, Images, Sigma

Draws = Callable[[Int[Array, ""]], Images]
SamplerFunction = Callable[[Denoiser, Images, Sigmas, Draws], Images]
NO_SIGNAL = 1e4
"""Above this noise level, x contains practically no signal. Rectified flow and zero terminal SNR
start at 2^20. A step from there ends at a far smaller level, where the slope is unrelated to the
slope along the step, so Heun's correction would only amplify noise."""


def heun(
    denoise: Denoiser,
    x: Images,
    sigmas: Sigmas,
    noise: Draws,
    *,
    churn: Annotated[Scalar, Interval("[0, 1000]")] = 0.0,
    s_min: Annotated[Scalar, Interval("[0, inf)")] = 0.0,
    s_max: Annotated[Scalar, Interval("(0, inf]")] = float("inf"),
    s_noise: Annotated[Scalar, Interval("(0, inf)")] = 1.0,
) -> Images:
    """Sample with Heun's method, and with noise churn at levels in [s_min, s_max] if churn > 0.

    This is Algorithm 2 of EDM (Karras et al. 2022). N steps take 2 N - 1 evaluations of D. EDM's
    loop, with t for sigma:

        for i in range(n):
            gamma = min(churn / n, sqrt(2) - 1) if s_min <= t[i] <= s_max else 0
            t_hat = t[i] + gamma * t[i]                                   # Add noise.
            x_hat = x + sqrt(t_hat**2 - t[i]**2) * s_noise * noise(i)
            d = (x_hat - D(x_hat, t_hat)) / t_hat                         # Slope.
            x = x_hat + (t[i + 1] - t_hat) * d                            # Euler's step.
            if t[i + 1] != 0:                                             # Heun's correction.
                d_next = (x - D(x, t[i + 1])) / t[i + 1]
                x = x_hat + (t[i + 1] - t_hat) * (d + d_next) / 2

    EDM's loop evaluates D in two places, so the network would be compiled twice. The code here
    scans over evaluations instead of steps: evaluation k = 2 i is for Euler's step i, and
    k = 2 i + 1 for Heun's correction of step i. The last step has no correction, even if it ends
    above 0. Steps that start above NO_SIGNAL have none either.
    """
    inside = (s_min <= sigmas) & (sigmas <= s_max)
    gammas = jnp.where(inside, jnp.minimum(churn / (len(sigmas) - 1), 2**0.5 - 1), 0)
    return heun_steps(denoise, x, sigmas, gammas, noise, s_noise)


def heun_steps(
    denoise: Denoiser, x: Images, sigmas: Sigmas, gammas: Float[Array, "..."], noise: Draws, s_noise: Scalar = 1.0
) -> Images:
    """Run Heun's method, with a separate amount of churn for each step.

    Step i first adds noise, which raises the noise level by the factor 1 + gammas[i]. `s_noise`
    scales this noise.
    """
    n = len(sigmas) - 1

    def evaluate(carry, k):
        x, x_hat, d = carry  # x_hat and d: the start of the step, and the slope there.
        i, first = k // 2, k % 2 == 0
        sigma, sigma_next, gamma = sigmas[i], sigmas[i + 1], gammas[i]
        sigma_hat = sigma * (1 + gamma)
        # sqrt(sigma_hat^2 - sigma^2), in a form that rounding cannot make negative.
        added = s_noise * sigma * jnp.sqrt(gamma * (2 + gamma))
        x = x + jnp.where(first, added, 0) * noise(i)
        level = jnp.where(first, sigma_hat, sigma_next)

        d_here = (x - denoise(x, same_level(level, x))) / level
        x_hat = jnp.where(first, x, x_hat)
        mean = jnp.where(sigma_hat > NO_SIGNAL, d, (d + d_here) / 2)
        slope = jnp.where(first, d_here, mean)
        return (x_hat + (sigma_next - sigma_hat) * slope, x_hat, d_here), None

    return jax.lax.scan(evaluate, (x, x, jnp.zeros_like(x)), jnp.arange(2 * n - 1))[0][0]


def ddim(
    denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws, *, eta: Annotated[Scalar, Interval("[0, 1]")] = 0.0
) -> Images:
    """Sample with DDIM (Song et al. 2021, equation 12).

    `eta` in [0, 1] scales the new noise of each step. With eta = 0, DDIM is Euler's method in
    sigma, without new noise. With eta = 1, a step draws from DDPM's posterior.
    """

    def step(x, inputs):
        i, sigma, sigma_next = inputs
        x0 = denoise(x, same_level(sigma, x))
        r = sigma_next / sigma
        up = eta * sigma_next * jnp.sqrt(1 - r**2)
        # sqrt(sigma_next^2 - up^2) / sigma, without cancellation at eta = 1.
        down = r * jnp.sqrt((1 - eta**2) + (eta * r) ** 2)
        return x0 + down * (x - x0) + up * noise(i), None

    return jax.lax.scan(step, x, (jnp.arange(len(sigmas) - 1), sigmas[:-1], sigmas[1:]))[0]


def euler(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """Sample with Euler's method in sigma, which equals `ddim` with eta = 0."""
    return ddim(denoise, x, sigmas, noise)


def euler_ancestral(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """Sample with k-diffusion's ancestral Euler method, which equals `ddim` with eta = 1."""
    return ddim(denoise, x, sigmas, noise, eta=1.0)


def dpm2(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """Sample with DPM-Solver-2 in the form of Karras et al. 2022 (k-diffusion's sample_dpm_2).

    N steps take 2 N - 1 evaluations of D: the slope of a step is that at its middle in ln sigma.
    The last step follows the slope at its start. Steps that start above NO_SIGNAL do so, too.
    """
    return _dpm2(denoise, x, sigmas, noise, 0.0)


def dpm2_ancestral(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """Sample with k-diffusion's ancestral DPM-Solver-2.

    Each step takes `dpm2` below the next level, and then adds noise up to this level. The last step
    adds none.
    """
    return _dpm2(denoise, x, sigmas, noise, 1.0)


def _dpm2(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws, eta: float) -> Images:
    start, end = sigmas[:-1], sigmas[1:]
    r = end / start
    up = (eta * end * jnp.sqrt(1 - r**2)).at[-1].set(0)
    down = (end * jnp.sqrt((1 - eta**2) + (eta * r) ** 2)).at[-1].set(end[-1])
    # With eta = 1, the middle is the end. The factor keeps it off the levels of the grid, because
    # the grid may round the times of its levels. The last step has only its first evaluation.
    middle = (jnp.sqrt(start * down) * (1 + 1e-6)).at[-1].set(end[-1])

    def evaluate(carry, k):
        x, begin, d = carry  # begin and d: the start of the step, and the slope there.
        i, first = k // 2, k % 2 == 0
        level = jnp.where(first, start[i], middle[i])
        d_here = (x - denoise(x, same_level(level, x))) / level
        begin = jnp.where(first, x, begin)
        slope = jnp.where(first | (start[i] <= NO_SIGNAL), d_here, d)
        target = jnp.where(first, middle[i], down[i])
        added = jnp.where(first, 0, up[i]) * noise(i)
        return (begin + (target - start[i]) * slope + added, begin, d_here), None

    evaluations = jnp.arange(2 * len(start) - 1)
    return jax.lax.scan(evaluate, (x, x, jnp.zeros_like(x)), evaluations)[0][0]


def ddpm(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """Sample with DDPM's ancestral sampler (Ho et al. 2020, Algorithm 2), on any sampling grid.

    If the levels end above 0, the last step adds no noise and returns the posterior mean, as in
    Algorithm 2. If they end at 0, this equals `ddim` with eta = 1.
    """
    last = len(sigmas) - 2
    all_but_last = lambda i: jnp.where(i < last, noise(i), 0)
    return ddim(denoise, x, sigmas, all_but_last, eta=1.0)


def lcm(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """Sample a latent consistency model (Luo et al. 2023, Algorithm 1), in 1 to 8 steps.

    Each step replaces x by the predicted image with new noise of the next level. Only models that
    are distilled to predict the end of the ODE draw well with it. The paper mixes 7e-6 of x or less
    into the prediction; this is left out.
    """

    def step(x, inputs):
        i, sigma, sigma_next = inputs
        return denoise(x, same_level(sigma, x)) + sigma_next * noise(i), None

    return jax.lax.scan(step, x, (jnp.arange(len(sigmas) - 1), sigmas[:-1], sigmas[1:]))[0]


def is_straight(sampler: Any) -> bool:
    """Return whether a bound sampler is Euler's method: `euler`, or `ddim` with eta 0."""
    return sampler.func in (ddim, euler) and not sampler.keywords.get("eta")


def same_level(sigma: Float[Array, ""], x: Images) -> Sigma:
    """Return an array [B] that repeats one noise level for each image of the batch x."""
    return jnp.full(x.shape[:1], sigma, x.dtype)
