"""Kinds of guidance, as the names in guidance.GUIDANCE have them: wrappers from Guide to Guide."""

from collections.abc import Mapping
from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Float

from diffusion_jax.diffusion.guidance import (
    COND,
    EMPTY,
    NEGATIVE,
    Guide,
    Model,
)
from diffusion_jax.diffusion.precond import Images

Share = Annotated[int | float, "[0, 1]"]
Amount = Annotated[int | float, "[0, 1000]"]
Level = Annotated[int | float, "[0, inf]"]
_AXES = (1, 2, 3)


def cfg(guide: Guide, model: Model) -> Guide:
    """Classifier-free guidance as it is."""
    del model
    return guide


def interval(guide: Guide, model: Model, *, low: Level = 0.0, high: Level = float("inf")) -> Guide:
    """Guidance from `low` to `high` alone (Kynkaanniemi et al. 2024); elsewhere D of the text.

    Elsewhere nothing but that is computed.
    """
    del model
    before = guide.acts or (lambda sigma: True)
    return guide._replace(acts=lambda sigma: before(sigma) & (low <= sigma) & (sigma <= high))


def apg(guide: Guide, model: Model, *, eta: Share = 0.0, norm: Amount = 0.0) -> Guide:
    """Adaptive projected guidance (Sadat et al. 2024, Algorithm 1), without its momentum.

    Of what is added to D its part along D, which oversaturates, counts `eta` times; what is added
    is at most `norm` long before the scale, for each image (0: any length).
    """
    del model
    if EMPTY in guide.needs:
        raise ValueError("perp_neg+apg: what perp_neg adds would not be projected: apg+perp_neg")

    def combine(d, x, sigma, scale):
        difference = d[COND] - d[guide.other]
        if norm:
            length = jnp.sqrt((difference**2).sum(_AXES, keepdims=True))
            difference = difference * jnp.minimum(1, norm / length)
        along = projected(difference, d[COND])
        update = difference - along + eta * along
        return guide.combine({**d, guide.other: d[COND] - update}, x, sigma, scale)

    return guide._replace(combine=combine)


def cfg_pp(guide: Guide, model: Model) -> Guide:
    """CFG++ (Chung et al. 2024, Algorithm 2): the scale is its lambda, from 0 to 1.

    It takes D_lambda = D_uncond + lambda (D_cond - D_uncond) for the image and the unconditional
    eps for the noise: x' = D_lambda + r (x - D_uncond) with r = sigma' / sigma of a step of DDIM.
    That is DDIM's step x' = D + r (x - D) with a scale lambda / (1 - r). It is for samplers that
    evaluate D at the grid's levels alone: `restart`, and `heun` with churn, are refused.
    """

    def combine(d, x, sigma, scale):
        later = jnp.where(model.sigmas < sigma[:, None] * (1 - 1e-5), model.sigmas, 0).max(1)  # [B]
        return guide.combine(d, x, sigma, scale / (1 - later / sigma))

    return guide._replace(combine=combine, neutral=None)


def rescale(guide: Guide, model: Model, *, phi: Share = 0.7) -> Guide:
    """Guidance rescale (Lin et al. 2024, equations 15 and 16), of what the network predicts.

    The guided prediction gets the standard deviation that it has with the text alone, by `phi`.
    """

    def combine(d, x, sigma, scale):
        c_skip, c_out, *_ = (c[:, None, None, None] for c in model.scalings(sigma))
        to_f = lambda denoised: (denoised - c_skip * x) / c_out
        guided = to_f(guide.combine(d, x, sigma, scale))
        ratio = to_f(d[COND]).std(_AXES, keepdims=True) / guided.std(_AXES, keepdims=True)
        return c_skip * x + c_out * guided * (phi * ratio + 1 - phi)

    return guide._replace(combine=combine)


def perp_neg(guide: Guide, model: Model, *, weight: Amount = 1.0) -> Guide:
    """Perp-Neg (Armandpour et al. 2023): of a negative prompt only what the prompt does not say.

    D_empty + scale (a - weight b), a = D_cond - D_empty and b the part of D_negative - D_empty that
    is perpendicular to a.
    """
    del model
    if guide.other != NEGATIVE:
        raise ValueError("perp_neg has the empty text beside the negative one: it takes no guide")

    def combine(d: Mapping[str, Images], x, sigma, scale):
        a, b = d[COND] - d[EMPTY], d[NEGATIVE] - d[EMPTY]
        cond = d[COND] - weight * (b - projected(b, a))
        return guide.combine({**d, COND: cond, NEGATIVE: d[EMPTY]}, x, sigma, scale)

    neutral = None if weight else guide.neutral
    return guide._replace(combine=combine, needs=(COND, EMPTY, NEGATIVE), neutral=neutral)


def projected(
    images: Float[Array, "B H W C"], onto: Float[Array, "B H W C"]
) -> Float[Array, "B H W C"]:
    """Each image's part along another one."""
    length_2 = jnp.maximum((onto**2).sum(_AXES, keepdims=True), 1e-12)
    return (images * onto).sum(_AXES, keepdims=True) / length_2 * onto
