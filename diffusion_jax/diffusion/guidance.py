"""Guidance and thresholds: from a network under several conditions to the D that samplers see.

A network gives D under the text, under the negative text and, for some kinds of guidance, under the
empty text. In autoguidance (Karras et al. 2024) a second network takes the place of the negative
text. A Guide combines these D into one; the wrappers in GUIDANCE change Guides, and those in
THRESHOLDS change denoisers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from diffusion_jax.config import named
from diffusion_jax.diffusion.noise import Scalar, Sigmas
from diffusion_jax.diffusion.precond import Denoiser, Images, Precond, Sigma

Guidance = Scalar | Float[Array, "B"]
COND, NEGATIVE, EMPTY, GUIDE = "cond", "negative", "empty", "guide"
Preview = Callable[[Float[ArrayLike, "B h w 3"], Float[ArrayLike, ""]], None]
Branches = Callable[[Images, Sigma, Sequence[str]], Mapping[str, Images]]
"""(x, sigma, condition names) to D under each of these conditions."""
Share = Annotated[int | float, "[0, 1]"]
Amount = Annotated[int | float, "[0, 1000]"]
Level = Annotated[int | float, "[0, inf]"]
_AXES = (1, 2, 3)


class Guide(NamedTuple):
    """How the D under several conditions become the one that samplers see."""

    combine: Callable[[Mapping[str, Images], Images, Sigma, Guidance], Images]
    """(D by condition name, x, sigma, guidance) to D."""
    other: str = NEGATIVE
    """The condition that guidance leads away from: NEGATIVE, or GUIDE."""
    needs: tuple[str, ...] = (COND, NEGATIVE)
    """The conditions whose D `combine` takes."""
    acts: Callable[[Float[Array, ""]], Bool[Array, ""]] | None = None
    """Whether guidance acts at a noise level, else D is that of the text; None for all levels."""


class Model(NamedTuple):
    """Facts about the guided model that the functions in GUIDANCE receive."""

    scalings: Precond
    sigmas: Sigmas
    """The noise levels of the sampling grid."""


def outward(other: str = NEGATIVE) -> Guide:
    """D_other + guidance * (D_cond - D_other) (Ho & Salimans 2022, equation 6).

    `guidance` is one number, or one per image; at 1 the result equals D_cond to the last bit.
    """

    def combine(d, x, sigma, guidance):
        excess = jnp.asarray(guidance, x.dtype) - 1
        return d[COND] + excess.reshape(-1, 1, 1, 1) * (d[COND] - d[other])

    return Guide(combine, other, (COND, other))


def led(
    s: Any,
    model: Model,
    guidance: Guidance | None,
    denoiser_of: Callable[[Any], Denoiser],
    conditions: Mapping[str, Callable[[], Any]],
    guide_of: Callable[[Any], Denoiser] | None = None,
) -> Denoiser:
    """Return the D that samplers see, guided as a config's `sampler` group says.

    Args:
        s: The `sampler` group.
        model: The guided model.
        guidance: The guidance, one or one per image; None for D of the text alone.
        denoiser_of: Makes D of the network from what it is conditioned on.
        conditions: Functions that compute the network's conditions, one row per image, by name.
        guide_of: The same as `denoiser_of` for a second, guiding network with the same text.
    """
    guide = make(s, model, GUIDE if guide_of else NEGATIVE)
    names = (COND,) if guidance is None else guide.needs
    rows = {name: condition() for name, condition in conditions.items() if name in names}
    second = guide_of(rows[COND]) if guide_of else None
    return guided(conditional(denoiser_of, rows, second), guidance, guide)


def guided(branches: Branches, guidance: Guidance | None, guide: Guide) -> Denoiser:
    """Return D(x, sigma) with guidance for samplers, or without it if `guidance` is None."""

    def plain(x, sigma):
        return branches(x, sigma, (COND,))[COND]

    def everywhere(x, sigma):
        assert guidance is not None
        return guide.combine(branches(x, sigma, guide.needs), x, sigma, guidance)

    if guidance is None or guide.acts is None:
        return plain if guidance is None else everywhere
    acts = guide.acts
    return lambda x, sigma: jax.lax.cond(acts(sigma[0]), everywhere, plain, x, sigma)


def make(s: Any, model: Model, other: str = NEGATIVE) -> Guide:
    """Build the Guide of a `sampler` group: `guiding`, from guidance_low to guidance_high."""
    check(s)
    guide = outward(other)
    for wrapper in bound("sampler.guiding", s.guiding):
        guide = wrapper(guide, model)
    if (s.guidance_low, s.guidance_high) != (0, float("inf")):
        within = named.Call("interval", (s.guidance_low, s.guidance_high))
        guide = named.bind("sampler.guiding", within, GUIDANCE)(guide, model)
    return guide


def check(s: Any) -> None:
    """Raise ValueError for cfg_pp with a sampler that evaluates D between the grid's levels."""
    (sampler,) = named.calls("sampler.name", getattr(s, "name", "ddim"))
    first = sampler.positional[0] if sampler.positional else getattr(s, "churn", 0)
    churn = sampler.by_name.get("churn", first)
    between = sampler.name == "restart" or (sampler.name == "heun" and churn > 0)
    if between and "cfg_pp" in s.guiding:
        raise ValueError(
            f"sampler.guiding is {s.guiding!r} and sampler.name is {s.name!r}, which evaluates the "
            "network between the levels of its grid: choose ddim or euler, or heun without churn"
        )


def bound(field: str, text: str) -> list[functools.partial]:
    """Return the wrappers that a field names, such as "apg(norm=5) + rescale". See named.bound."""
    return [named.bind(field, call, GUIDANCE) for call in named.calls(field, text)]


def by_image(guiding: str, guidance: int | float, num_images: int) -> Float[np.ndarray, "N"] | None:
    """Return the guidance of each image, or None if D is then that of the text alone."""
    kinds = {call.name for call in named.calls("sampler.guiding", guiding)}
    if guidance == 1 and kinds <= {*PLAIN_AT_1}:
        return None
    return np.full(num_images, guidance, np.float32)


def conditional(
    denoiser_of: Callable[[Any], Denoiser],
    conditions: Mapping[str, Any],
    guide: Denoiser | None = None,
) -> Branches:
    """Return the D of one network under several conditions, in one evaluation, and of a guide.

    `conditions` have one row per image. The rows of an image stay neighbours in the joined batch,
    so that a sharded batch needs no communication.
    """
    join = lambda *rows: jnp.stack(rows, axis=1).reshape(-1, *rows[0].shape[1:])
    joined = jax.tree.map(join, *conditions.values())  # Row n i + k: image i, condition k of n.

    def branches(x, sigma, names):
        own = [name for name in conditions if name in names]
        rows = joined if len(own) == len(conditions) else conditions[COND]
        d = by_rows(denoiser_of(rows))(x, sigma, own)
        return {**d, GUIDE: guide(x, sigma)} if guide and GUIDE in names else d

    return branches


def by_rows(denoise: Denoiser) -> Branches:
    """Return the D of a denoiser whose rows are under each condition in turn."""

    def branches(x, sigma, names):
        d = denoise(x.repeat(len(names), axis=0), sigma.repeat(len(names)))
        each = d.reshape(-1, len(names), *x.shape[1:])  # [B, names, H, W, C]
        return {name: each[:, i] for i, name in enumerate(names)}

    return branches


# The entries of GUIDANCE: wrappers of a Guide, given the Model that is guided.


def cfg(guide: Guide, model: Model) -> Guide:
    """Plain classifier-free guidance: the Guide is unchanged."""
    del model
    return guide


def interval(guide: Guide, model: Model, *, low: Level = 0.0, high: Level = float("inf")) -> Guide:
    """Guide only at noise levels from `low` to `high` (Kynkaanniemi et al. 2024).

    At other levels, D of the text is all that is computed.
    """
    del model
    before = guide.acts or (lambda sigma: True)
    return guide._replace(acts=lambda sigma: before(sigma) & (low <= sigma) & (sigma <= high))


def apg(guide: Guide, model: Model, *, eta: Share = 0.0, norm: Amount = 0.0) -> Guide:
    """Adaptive projected guidance (Sadat et al. 2024, Algorithm 1), without its momentum.

    Scales the part of the update parallel to D_cond, which causes oversaturation, by `eta`. Clips
    the update of each image to the length `norm` before guidance multiplies it (0: no limit).
    """
    del model
    if EMPTY in guide.needs:
        raise ValueError(
            "sampler.guiding has apg after perp_neg, whose update apg would not project: write "
            "apg+perp_neg"
        )

    def combine(d, x, sigma, guidance):
        difference = d[COND] - d[guide.other]
        if norm:
            length = jnp.sqrt((difference**2).sum(_AXES, keepdims=True))
            difference = difference * jnp.minimum(1, norm / length)
        along = projected(difference, d[COND])
        update = difference - along + eta * along
        return guide.combine({**d, guide.other: d[COND] - update}, x, sigma, guidance)

    return guide._replace(combine=combine)


def cfg_pp(guide: Guide, model: Model) -> Guide:
    """CFG++ (Chung et al. 2024, Algorithm 2): the guidance is its lambda, from 0 to 1.

    It takes D_lambda = D_uncond + lambda (D_cond - D_uncond) for the image and the unconditional
    eps for the noise: x' = D_lambda + r (x - D_uncond), with r = sigma' / sigma of a DDIM step.
    This equals DDIM's step x' = D + r (x - D) at the guidance lambda / (1 - r). It needs a sampler
    that evaluates D at the grid's levels only: `check` refuses `restart`, and `heun` with churn.
    """

    def combine(d, x, sigma, guidance):
        later = jnp.where(model.sigmas < sigma[:, None] * (1 - 1e-5), model.sigmas, 0).max(1)  # [B]
        return guide.combine(d, x, sigma, guidance / (1 - later / sigma))

    return guide._replace(combine=combine)


def rescale(guide: Guide, model: Model, *, phi: Share = 0.7) -> Guide:
    """Guidance rescale (Lin et al. 2024, equations 15 and 16) of what the network predicts.

    Mixes the guided prediction with its copy of the standard deviation of D_cond's, by `phi`.
    """

    def combine(d, x, sigma, guidance):
        c_skip, c_out, *_ = (c[:, None, None, None] for c in model.scalings(sigma))
        to_f = lambda denoised: (denoised - c_skip * x) / c_out
        guided = to_f(guide.combine(d, x, sigma, guidance))
        ratio = to_f(d[COND]).std(_AXES, keepdims=True) / guided.std(_AXES, keepdims=True)
        return c_skip * x + c_out * guided * (phi * ratio + 1 - phi)

    return guide._replace(combine=combine)


def perp_neg(guide: Guide, model: Model, *, weight: Amount = 1.0) -> Guide:
    """Perp-Neg (Armandpour et al. 2023): lead away only from what the prompt does not contain.

    D_empty + guidance (a - weight b), where a = D_cond - D_empty and b is the part of
    D_negative - D_empty that is perpendicular to a.
    """
    del model
    if guide.other != NEGATIVE:
        raise ValueError(
            "sampler.guiding has perp_neg, which needs the negative and the empty text, and a "
            "second model guides: remove one of the two"
        )

    def combine(d: Mapping[str, Images], x, sigma, guidance):
        a, b = d[COND] - d[EMPTY], d[NEGATIVE] - d[EMPTY]
        cond = d[COND] - weight * (b - projected(b, a))
        return guide.combine({**d, COND: cond, NEGATIVE: d[EMPTY]}, x, sigma, guidance)

    return guide._replace(combine=combine, needs=(COND, EMPTY, NEGATIVE))


def projected(
    images: Float[Array, "B H W C"], onto: Float[Array, "B H W C"]
) -> Float[Array, "B H W C"]:
    """Project each image onto another one."""
    length_2 = jnp.maximum((onto**2).sum(_AXES, keepdims=True), 1e-12)
    return (images * onto).sum(_AXES, keepdims=True) / length_2 * onto


GUIDANCE: dict[str, Callable[..., Guide] | str] = {
    "cfg": cfg,
    "interval": interval,
    "apg": apg,
    "cfg_pp": cfg_pp,
    "rescale": rescale,
    "perp_neg": perp_neg,
}
"""Values of sampler.guiding, joined by + with the innermost first; also "MODULE:FUNCTION"."""
GuidingName = Annotated[str, bound]
PLAIN_AT_1 = ("cfg", "interval", "apg", "rescale")
"""The names in GUIDANCE that give D of the text itself at guidance 1, which by_image uses."""


def dynamic(denoise: Denoiser, *, percentile: Scalar = 99.5) -> Denoiser:
    """Clip x0 to its own percentile s >= 1, then divide by s (Imagen, section 2.3)."""

    def thresholded(x, sigma):
        x0 = denoise(x, sigma)
        s = jnp.percentile(jnp.abs(x0), percentile, axis=(1, 2, 3), keepdims=True)
        s = jnp.maximum(s, 1)
        return jnp.clip(x0, -s, s) / s

    return thresholded


def static(denoise: Denoiser) -> Denoiser:
    """Clip x0 to [-1, 1] (Imagen, section 2.3)."""
    return lambda x, sigma: jnp.clip(denoise(x, sigma), -1, 1)


THRESHOLDS: dict[str, Callable[..., Denoiser] | str] = {
    "dynamic": dynamic,
    "static": static,
    "none": lambda denoise: denoise,
}
"""Values of sampler.threshold, for Imagen alone: latents have no range to clip to."""
ThresholdName = Annotated[str, named.checked(THRESHOLDS)]
