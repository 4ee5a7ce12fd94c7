"""Preconditioning, which turns a raw network F into a denoiser D, and the loss that trains F.

Everything uses the variance-exploding coordinates of Karras et al. (2022): x = x0 + sigma * eps. A
variance-preserving model (DDPM, Stable Diffusion) is the same denoiser with
c_in = 1 / sqrt(1 + sigma^2).
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from diffusion_jax.config.named import Table

Sigma = Float[Array, "B"]
Images = Float[Array, "B H W C"]
Denoiser = Callable[[Images, Sigma], Images]
Network = Callable[[Images, Sigma], Images]
Distance = Callable[[Images], Images]


class Scalings(NamedTuple):
    """The scalings in D(x, sigma) = c_skip * x + c_out * F(c_in * x, c_noise), each [B]."""

    c_skip: Sigma
    c_out: Sigma
    c_in: Sigma
    c_noise: Sigma


Precond = Callable[[Sigma], Scalings]


def edm(sigma_data: float = 0.5) -> Precond:
    """Build EDM's preconditioner, which gives the inputs and targets of F unit variance.

    These are the scalings of Karras et al. 2022, Table 1. `sigma_data` is the standard deviation of
    the training images.
    """

    def scalings(sigma):
        total = jnp.sqrt(sigma**2 + sigma_data**2)
        return Scalings(
            c_skip=(sigma_data / total) ** 2,
            c_out=sigma * sigma_data / total,
            c_in=1 / total,
            c_noise=jnp.log(sigma) / 4,
        )

    return scalings


def epsilon(time: Callable[[Sigma], Sigma]) -> Precond:
    """Build the preconditioner of a network that predicts eps (DDPM).

    `time` maps sigma to c_noise.
    """

    def scalings(sigma):
        return Scalings(c_skip=jnp.ones_like(sigma), c_out=-sigma, c_in=1 / jnp.sqrt(1 + sigma**2), c_noise=time(sigma))

    return scalings


def x0(time: Callable[[Sigma], Sigma]) -> Precond:
    """Build the preconditioner of a network that predicts the clean image x0.

    `time` maps sigma to c_noise.
    """

    def scalings(sigma):
        return Scalings(
            c_skip=jnp.zeros_like(sigma),
            c_out=jnp.ones_like(sigma),
            c_in=1 / jnp.sqrt(1 + sigma**2),
            c_noise=time(sigma),
        )

    return scalings


def velocity(time: Callable[[Sigma], Sigma]) -> Precond:
    """Build the preconditioner of a network that predicts v (Salimans & Ho 2022, section 4).

    v = alpha * eps - sqrt(1 - alpha^2) * x0, with alpha = 1 / sqrt(1 + sigma^2). `time` maps sigma
    to c_noise.
    """

    def scalings(sigma):
        c_in = 1 / jnp.sqrt(1 + sigma**2)  # The alpha of the variance-preserving model.
        return Scalings(c_skip=c_in**2, c_out=-sigma * c_in, c_in=c_in, c_noise=time(sigma))

    return scalings


def flow(time: Callable[[Sigma], Sigma]) -> Precond:
    """Build the preconditioner of a network that predicts eps - x0 (rectified flow).

    The network's input is x_t = (1 - t) x0 + t eps (Liu et al. 2023; SD3, equation 13). With
    t = sigma / (1 + sigma), this input is x / (1 + sigma), and D = x_t - t F.
    """

    def scalings(sigma):
        left = 1 / (1 + sigma)
        return Scalings(c_skip=left, c_out=-sigma * left, c_in=left, c_noise=time(sigma))

    return scalings


PRECONDS = Table(edm=lambda time, *, sigma_data=0.5: edm(sigma_data), eps=epsilon, x0=x0, v=velocity, flow=flow)
"""The values of diffusion.predicts. Each function builds a preconditioner from `time`, a function
from sigma to c_noise."""
PrecondName = Annotated[str, PRECONDS]


def log_snr(sigma: Sigma) -> Sigma:
    """Compute the log-SNR ln(alpha^2 / (1 - alpha^2)) = -2 ln sigma.

    Networks that are trained with continuous noise get the log-SNR as their time input c_noise,
    except with the preconditioner `edm`.
    """
    return -2 * jnp.log(sigma)


def denoiser(network: Network, precond: Precond) -> Denoiser:
    """Build the denoiser D from a network F, whose weights and conditions are already bound.

    D returns float32 even if F computes in bfloat16, because the scalings are float32.
    """

    def denoise(x, sigma):
        c_skip, c_out, c_in, c_noise = precond(sigma)
        f = network(_per_image(c_in) * x, c_noise)
        return _per_image(c_skip) * x + _per_image(c_out) * f

    return denoise


def l2(residual: Images) -> Images:
    """Return the square of each error."""
    return residual**2


def l1(residual: Images) -> Images:
    """Return the absolute value of each error."""
    return jnp.abs(residual)


def huber(residual: Images) -> Images:
    """Return the Huber loss of each error r: r^2 / 2 if |r| is below 1, otherwise |r| - 1/2."""
    size = jnp.abs(residual)
    return jnp.where(size < 1, size**2 / 2, size - 0.5)


DISTANCES = Table(l2=l2, l1=l1, huber=huber)
"""The values that diffusion.distance can have in configs."""
DistanceName = Annotated[str, DISTANCES]


def loss(
    network: Network, precond: Precond, x0: Images, eps: Images, sigma: Sigma, distance: Distance = l2
) -> Float[Array, "B"]:
    """Compute each image's mean distance between F and its effective target (EDM, equation 8).

    F is the network's prediction at x = x0 + sigma * eps. x0 holds clean images in [-1, 1] or
    latents, and eps is standard normal. With the distance `l2`, the loss is
    |D - x0|^2 / c_out^2. This is EDM's weighted loss for the preconditioner `edm`, L_simple of DDPM
    for `epsilon`, and the v-loss for `velocity`.
    """
    return jnp.mean(distance(residual(network, precond, x0, eps, sigma)), axis=(1, 2, 3))


def residual(network: Network, precond: Precond, x0: Images, eps: Images, sigma: Sigma) -> Images:
    """Compute the prediction F at x = x0 + sigma * eps, minus its target (EDM, equation 8)."""
    scalings = precond(sigma)
    c_skip, c_out, c_in, _ = map(_per_image, scalings)
    scale = _per_image(sigma)
    f = network(c_in * (x0 + scale * eps), scalings.c_noise)
    # This is (x0 - c_skip * x) / c_out with x = x0 + sigma * eps written out. x0 - x would keep the
    # rounding error of x, which a small c_out magnifies.
    target = ((1 - c_skip) * x0 - c_skip * scale * eps) / c_out
    return f - target


def _per_image(c: Sigma) -> Float[Array, "B 1 1 1"]:
    return c[:, None, None, None]
