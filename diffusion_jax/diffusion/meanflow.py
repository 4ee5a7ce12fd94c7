"""MeanFlow (Geng et al. 2025, arXiv 2505.13447): networks that draw in one step.

On the line z_t = (1 - t) x0 + t eps, the velocity is v = eps - x0. The network learns u(z_t, t, h),
the mean velocity of the flow over the times from t - h to t. One evaluation then goes from z_t to
z_{t - h} = z_t - h u, and z_1 - u(z_1, 1, 1) is an image. At h = 0, u is the velocity of the flow,
the mean of v given z_t.

In the coordinates of precond.py, t = sigma / (1 + sigma) and x = z_t / (1 - t). The denoiser of any
preconditioner implies u = (z_t - D) / t, and a step of Euler or DDIM from sigma to the level at
t - h is exactly the step above. So every network, prediction and grid works. The network reads h as
one more token after the text.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from diffusion_jax.config.ranges import Interval
from diffusion_jax.diffusion import precond
from diffusion_jax.diffusion.objective import Conditions, Denoise, Net, Noised, Objective
from diffusion_jax.diffusion.precond import Denoiser, Images, Network, Precond, Sigma

Times = Float[Array, "B"]
Velocity = Callable[[Any, Any, Images, Times, Times], Images]
"""Maps (params, condition, z, t, h) to u."""
Share = Annotated[int | float, Interval("[0, 1]")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanFlow(Denoise):
    """Train a network that draws in one step (Geng et al. 2025), with guidance built in."""

    omega: Annotated[int | float, Interval("[0, inf)")] = 1.0
    """Weight of the velocity v in the target. The learned guidance scale is omega / (1 - kappa)
    (section 4.2)."""
    kappa: Annotated[int | float, Interval("[0, 1)")] = 0.0
    """Weight, in the target, of the network's own prediction with the text."""
    low: Share = 0.0
    """The smallest time t at which the velocity is guided."""
    high: Share = 1.0
    """The largest time t at which the velocity is guided."""
    every: Annotated[int, Interval("[1, 1024]")] = 4
    """In each group of `every` images of a micro-batch, one image trains the mean velocity over an
    interval, and the others train the velocity at a single time. Choose a divisor of
    optimizer.micro_batch: otherwise, more images train over an interval."""
    norm_p: Share = 1.0
    """The exponent of the adaptive weight (see norm_eps); 0 weights all images equally."""
    norm_eps: Annotated[int | float, Interval("(0, inf)")] = 0.01
    """The squared error e of an image is divided by (e + norm_eps)^norm_p (equation 22)."""

    own_loss, takes_mask, straight = True, False, True

    def loss(
        self, objective: Objective, net: Net, params: Any, noised: Noised
    ) -> tuple[Float[Array, ""], Times, Sigma]:
        """Return the loss to minimise, and each image's mean (u - v)^2 and larger noise level.

        u is the mean velocity that the network predicts, and v = eps - x0. The two noise levels are
        the ends of the image's time interval.
        """
        first, second = noised.sigma(0), noised.sigma(1)
        low, high = jnp.minimum(first, second), jnp.maximum(first, second)
        u = velocity_of(net, objective.scalings)
        times = time_of(high), time_of(low)
        weighted, squares = losses(u, params, noised.x0, noised.eps, *times, noised.conditions, noised.kept, self)
        mean = (weighted if noised.weights is None else noised.weights * weighted).mean()
        return mean, squares / noised.x0[0].size, high

    def measured(self, net: Net, params: Any, text: Any, empty: Callable[[], Any], sigma: Sigma) -> Network:
        """Return the network at h = 0, without the guidance that it has learned."""
        h = jnp.zeros_like(sigma)
        return unguided(net(params, text, h), net(params, empty(), h), sigma, self)

    def denoiser(
        self, net: Net, params: Any, scalings: Precond, sigmas: Float[Array, "levels"]
    ) -> Callable[[Any], Denoiser]:
        """Return a function that maps a condition to D, where h spans a step of the sampler."""
        span = spans(sigmas)
        d = lambda condition, h: precond.denoiser(net(params, condition, h), scalings)
        return lambda condition: lambda x, sigma: d(condition, span(sigma))(x, sigma)


def losses(
    velocity: Velocity,
    params: Any,
    x0: Images,
    eps: Images,
    t: Times,
    r: Times,
    conditions: Conditions,
    kept: Bool[Array, "B"],
    s: MeanFlow,
) -> tuple[Times, Times]:
    """Compute each image's weighted loss, which training minimises, and each image's |u - v|^2.

    Args:
        velocity: The function u.
        params: The task's parameters.
        x0: Clean images in [-1, 1], or their latents if the model works on latents.
        eps: Standard normal noise.
        t: The end of each image's interval of times, in [0, 1].
        r: The start of the interval, at most t. It is used for every s.every-th image only; the
            others have h = 0.
        conditions: The conditions of the images.
        kept: True for the images whose text is not dropped. The other images, which have the empty
            text, train the velocity without guidance.
        s: The options of MeanFlow: the guidance to learn, and the weights of images.
    """
    z, v = _each(1 - t) * x0 + _each(t) * eps, eps - x0
    frozen = functools.partial(velocity, jax.lax.stop_gradient(params))  # For the targets.
    target = jnp.where(_each(kept), guided(frozen, z, v, t, conditions, s), v)
    h = jnp.where(jnp.arange(len(t)) % s.every == 0, t - r, 0)
    # Only every s.every-th image needs the derivative. If s.every does not divide the batch, it is
    # computed for all images. train/memory.py needs this: it traces a batch of 1009 images, whose
    # arrays must have sizes proportional to the batch.
    rows = slice(None, None, s.every if len(t) % s.every == 0 else 1)

    # The MeanFlow identity (equation 6): u = v - h du/dt along the flow.
    some = jax.tree.map(lambda x: x[rows], conditions.mixed)
    along = lambda z, t, r: frozen(some, z, t, t - r)
    of_rows = (z[rows], t[rows], r[rows])
    change = derivative(along, of_rows, (target[rows], jnp.ones_like(of_rows[1]), 0 * of_rows[2]))
    target = jax.lax.stop_gradient(target.at[rows].add(-_each(h[rows]) * change))
    u = velocity(params, conditions.mixed, z, t, h)
    error = ((u - target) ** 2).sum((1, 2, 3))
    weight = jax.lax.stop_gradient((error + s.norm_eps) ** s.norm_p)
    return error / weight, ((u - v) ** 2).sum((1, 2, 3))


def guided(
    velocity: Callable[..., Images], z: Images, v: Images, t: Times, conditions: Conditions, s: MeanFlow
) -> Images:
    """Return the guided velocity omega v + (1 - omega - kappa) u_empty + kappa u_text.

    This is equation 20 of Geng et al. 2025. u_empty and u_text are the network's u at h = 0 with
    the empty text and with the image's text. For images whose time t is outside of [s.low, s.high],
    the guided velocity is v. `velocity` maps (condition, z, t, h) to u.
    """
    if s.omega == 1 and s.kappa == 0:
        return v
    omega, kappa = _guidance(t, s)
    none = jnp.zeros_like(t)
    out = omega * v + (1 - omega - kappa) * velocity(conditions.empty, z, t, none)
    return out + kappa * velocity(conditions.text, z, t, none) if s.kappa else out


def unguided(text: Network, empty: Network, sigma: Sigma, s: MeanFlow) -> Network:
    """Return the network F of the velocity v, without the guidance that training has built in.

    `text` and `empty` are F at h = 0 with the image's text and with the empty text. The solution of
    `guided` is u_text = omega v + (1 - omega - kappa) u_empty + kappa u_text, and F is linear in u,
    with equal coefficients for all three. With omega 0, the network learns no v; return `text`.
    """
    if s.omega == 0 or (s.omega == 1 and s.kappa == 0):
        return text
    omega, kappa = _guidance(time_of(sigma), s)
    return lambda x, time: ((1 - kappa) * text(x, time) - (1 - omega - kappa) * empty(x, time)) / omega


def _guidance(t: Times, s: MeanFlow) -> tuple[Images, Images]:
    """Return omega and kappa at the times t, [B, 1, 1, 1]: 1 and 0 outside of [s.low, s.high]."""
    inside = (s.low <= t) & (t <= s.high)
    return _each(jnp.where(inside, s.omega, 1.0)), _each(jnp.where(inside, s.kappa, 0.0))


def derivative(f: Callable[..., Array], at: tuple[Array, ...], along: tuple[Array, ...]) -> Array:
    """Return the derivative of f at the arguments `at`, in the direction `along`.

    It is computed by transposing f's reverse-mode derivative (jax.vjp), because group norm and
    blockwise attention define no forward-mode derivative (jax.jvp).
    """
    y, reverse = jax.vjp(f, *at)
    _, transpose = jax.vjp(reverse, jnp.zeros_like(y))
    return transpose(along)[0]


def velocity_of(net: Net, scalings: Precond) -> Velocity:
    """Return the function u = (z - D) / t, where D is the denoiser that `net` computes."""

    def velocity(params, condition, z, t, h):
        denoise = precond.denoiser(net(params, condition, h), scalings)
        return (z - denoise(z / _each(1 - t), t / (1 - t))) / _each(t)

    return velocity


def time_of(sigma: Sigma) -> Times:
    """Return t = sigma / (1 + sigma), in [0, 1]."""
    return sigma / (1 + sigma)


def spans(sigmas: Float[Array, "levels"]) -> Callable[[Sigma], Times]:
    """Return a function that maps noise levels to h.

    h is the difference in time t between a level and the next lower one of the grid `sigmas`.
    """

    def span(sigma):
        lower = sigmas < sigma[:, None] * (1 - 1e-6)  # [B, levels]
        return time_of(sigma) - time_of(jnp.where(lower, sigmas, 0).max(axis=1))

    return span


def _each(c: Array) -> Array:
    return c[:, None, None, None]
