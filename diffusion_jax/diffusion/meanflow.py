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

import functools
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from diffusion_jax.config.ranges import Interval
from diffusion_jax.diffusion import precond
from diffusion_jax.diffusion.precond import Images, Network, Precond, Sigma

Times = Float[Array, "B"]
Kept = Bool[Array, "B"]
IntervalNetwork = Callable[[Any, Any, Times], Callable[[Images, Times], Images]]
"""Maps (params, condition, h) to the network F(x, c_noise)."""
Velocity = Callable[[Any, Any, Images, Times, Times], Images]
"""Maps (params, condition, z, t, h) to u."""
Span = Callable[[Sigma], Times]
"""Maps noise levels to h."""
Share = Annotated[int | float, Interval("[0, 1]")]


class Conditions(NamedTuple):
    """Inputs of the network besides x and time: trees of arrays with one row per image."""

    mixed: Any
    """With the empty text for the images whose text is dropped."""
    text: Any
    """With each image's own text."""
    empty: Any
    """With the empty text for all images."""


class MeanFlow(NamedTuple):
    """Options of MeanFlow: the guidance that the network learns, and the weight of each image.

    `make` describes the fields.
    """

    omega: float = 1.0
    kappa: float = 0.0
    low: float = 0.0
    high: float = 1.0
    every: int = 1
    norm_p: float = 1.0
    norm_eps: float = 0.01


def make(
    *,
    omega: Annotated[int | float, Interval("[0, inf)")] = 1.0,
    kappa: Annotated[int | float, Interval("[0, 1)")] = 0.0,
    low: Share = 0.0,
    high: Share = 1.0,
    every: Annotated[int, Interval("[1, 1024]")] = 4,
    norm_p: Share = 1.0,
    norm_eps: Annotated[int | float, Interval("(0, inf)")] = 0.01,
) -> MeanFlow:
    """Train a network that draws in one step (Geng et al. 2025), with guidance built in.

    Configs name this function in diffusion.method. It returns the options of the method.

    Args:
        omega: Weight of the velocity v in the target. The learned guidance scale is
            omega / (1 - kappa) (section 4.2).
        kappa: Weight, in the target, of the network's own prediction with the text.
        low: The smallest time t at which the velocity is guided.
        high: The largest time t at which the velocity is guided.
        every: In each group of `every` images of a micro-batch, one image trains the mean velocity
            over an interval, and the others train the velocity at a single time. Choose a divisor
            of optimizer.micro_batch: otherwise, more images train over an interval.
        norm_p: The exponent of the adaptive weight (see norm_eps); 0 weights all images equally.
        norm_eps: The squared error e of an image is divided by (e + norm_eps)^norm_p (equation 22).
    """
    return MeanFlow(omega, kappa, low, high, every, norm_p, norm_eps)


def losses(
    velocity: Velocity, params: Any, x0: Images, eps: Images, t: Times, r: Times,
    conditions: Conditions, kept: Kept, s: MeanFlow,
) -> tuple[Times, Times]:  # fmt: skip
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
    frozen = functools.partial(velocity, jax.lax.stop_gradient(params))  # It computes the targets.
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
    velocity: Callable[..., Images], z: Images, v: Images, t: Times, conditions: Conditions,
    s: MeanFlow,
) -> Images:  # fmt: skip
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
    return lambda x, time: (
        ((1 - kappa) * text(x, time) - (1 - omega - kappa) * empty(x, time)) / omega
    )


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


def velocity_of(network: IntervalNetwork, scalings: Precond) -> Velocity:
    """Return the function u = (z - D) / t, where D is the denoiser that `network` computes."""

    def velocity(params, condition, z, t, h):
        denoise = precond.denoiser(network(params, condition, h), scalings)
        return (z - denoise(z / _each(1 - t), t / (1 - t))) / _each(t)

    return velocity


def time_of(sigma: Sigma) -> Times:
    """Return t = sigma / (1 + sigma), in [0, 1]."""
    return sigma / (1 + sigma)


def spans(sigmas: Float[Array, "levels"]) -> Span:
    """Return a function that maps noise levels to h.

    h is the difference in time t between a level and the next lower one of the grid `sigmas`.
    """

    def span(sigma):
        lower = sigmas < sigma[:, None] * (1 - 1e-6)  # [B, levels]
        return time_of(sigma) - time_of(jnp.where(lower, sigmas, 0).max(axis=1))

    return span


def _each(c: Array) -> Array:
    return c[:, None, None, None]
