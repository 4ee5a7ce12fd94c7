"""Guidance and thresholds: functions that build the denoiser D that samplers call.

D(x, sigma) is the estimate of the clean image. A network computes it for the text, for the negative
text and, for some kinds of guidance, for the empty text. Autoguidance (Karras et al. 2024) uses a
second network instead of the negative text. A Guide combines these estimates into one. A function
in GUIDANCE takes a Guide and returns a new one. A function in THRESHOLDS takes a denoiser and
returns a new one.
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
"""A function from (x, sigma, condition names) to D(x, sigma) under each of these conditions."""
Share = Annotated[int | float, "[0, 1]"]
Amount = Annotated[int | float, "[0, 1000]"]
Level = Annotated[int | float, "[0, inf]"]
_AXES = (1, 2, 3)


class Guide(NamedTuple):
    """A rule that combines D under several conditions into the D that samplers call."""

    combine: Callable[[Mapping[str, Images], Images, Sigma, Guidance], Images]
    """Maps (D by condition name, x, sigma, guidance) to the guided D."""
    other: str = NEGATIVE
    """The condition from which guidance leads away: NEGATIVE, or GUIDE for a second network."""
    needs: tuple[str, ...] = (COND, NEGATIVE)
    """The conditions under which `combine` needs D."""
    applies: Callable[[Float[Array, ""]], Bool[Array, ""]] | None = None
    """Returns whether guidance applies at a noise level. At other levels D is D_cond, computed from
    the text alone. None applies guidance at all levels."""


class Model(NamedTuple):
    """The properties of the guided model that the functions in GUIDANCE receive."""

    scalings: Precond
    sigmas: Sigmas
    """The noise levels of the sampling grid."""


def outward(other: str = NEGATIVE) -> Guide:
    """Build a Guide that computes D_other + guidance * (D_cond - D_other).

    This is equation 6 of Ho & Salimans 2022. `guidance` is one number, or one number per image. At
    guidance 1 the result is bitwise equal to D_cond.
    """

    def combine(d, x, sigma, guidance):
        excess = jnp.asarray(guidance, x.dtype) - 1
        return d[COND] + excess.reshape(-1, 1, 1, 1) * (d[COND] - d[other])

    return Guide(combine, other, (COND, other))


def make_denoiser(
    s: Any,
    model: Model,
    guidance: Guidance | None,
    denoiser_of: Callable[[Any], Denoiser],
    conditions: Mapping[str, Callable[[], Any]],
    guide_of: Callable[[Any], Denoiser] | None = None,
) -> Denoiser:
    """Build the guided denoiser that a config's `sampler` group describes.

    Args:
        s: The `sampler` group.
        model: The properties of the guided model.
        guidance: One number, or one number per image. With None there is no guidance: the result is
            D under the text.
        denoiser_of: Takes a condition and returns the network's D under it.
        conditions: Maps each condition's name to a function without arguments. The function
            computes the condition, one row per image.
        guide_of: The same as `denoiser_of`, for the second network in autoguidance. This network
            gets the same text as the first. None without autoguidance.
    """
    guide = make(s, model, GUIDE if guide_of else NEGATIVE)
    names = (COND,) if guidance is None else guide.needs
    rows = {name: condition() for name, condition in conditions.items() if name in names}
    second = guide_of(rows[COND]) if guide_of else None
    return guided(conditional(denoiser_of, rows, second), guidance, guide)


def guided(branches: Branches, guidance: Guidance | None, guide: Guide) -> Denoiser:
    """Return the guided denoiser D(x, sigma). If `guidance` is None, return D under the text."""

    def plain(x, sigma):
        return branches(x, sigma, (COND,))[COND]

    def everywhere(x, sigma):
        assert guidance is not None
        return guide.combine(branches(x, sigma, guide.needs), x, sigma, guidance)

    if guidance is None or guide.applies is None:
        return plain if guidance is None else everywhere
    applies = guide.applies
    return lambda x, sigma: jax.lax.cond(applies(sigma[0]), everywhere, plain, x, sigma)


def make(s: Any, model: Model, other: str = NEGATIVE) -> Guide:
    """Build the Guide that a config's `sampler` group describes.

    The field `guiding` names the kinds of guidance. They apply at noise levels from guidance_low to
    guidance_high. `other` is the condition from which guidance leads away.
    """
    check(s)
    guide = outward(other)
    for wrapper in bound("sampler.guiding", s.guiding):
        guide = wrapper(guide, model)
    if (s.guidance_low, s.guidance_high) != (0, float("inf")):
        within = named.Call("interval", (s.guidance_low, s.guidance_high))
        guide = named.bind("sampler.guiding", within, GUIDANCE)(guide, model)
    return guide


def check(s: Any) -> None:
    """Raise ValueError if cfg_pp is used with a sampler that evaluates D between grid levels."""
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
    """Parse names joined by +, such as "apg(norm=5) + rescale", and look them up in GUIDANCE.

    Return the functions with their parameters bound. Raises ValueError if a name or a parameter is
    unknown. `field` is the name of the config field, for error messages.
    """
    return [named.bind(field, call, GUIDANCE) for call in named.calls(field, text, GUIDANCE)]


def by_image(guiding: str, guidance: int | float, num_images: int) -> Float[np.ndarray, "N"] | None:
    """Return the guidance as an array with one number per image.

    Return None if the guidance is 1 and has no effect, so that only D under the text is needed.
    """
    kinds = {call.name for call in named.calls("sampler.guiding", guiding)}
    if guidance == 1 and kinds <= {*PLAIN_AT_1}:
        return None
    return np.full(num_images, guidance, np.float32)


def conditional(
    denoiser_of: Callable[[Any], Denoiser],
    conditions: Mapping[str, Any],
    guide: Denoiser | None = None,
) -> Branches:
    """Return a function that evaluates a network under several conditions in one joined batch.

    If a second denoiser `guide` is given, its D is returned too, under the name GUIDE. Each of the
    `conditions` has one row per image. In the joined batch, the rows of an image are neighbours, so
    that a sharded batch needs no communication.
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
    """Split D of a joined batch by condition.

    The denoiser's rows are ordered by image, and by condition within an image.
    """

    def branches(x, sigma, names):
        d = denoise(x.repeat(len(names), axis=0), sigma.repeat(len(names)))
        each = d.reshape(-1, len(names), *x.shape[1:])  # [B, names, H, W, C]
        return {name: each[:, i] for i, name in enumerate(names)}

    return branches


# The entries of GUIDANCE: functions from a Guide and the guided Model to a new Guide.


def cfg(guide: Guide, model: Model) -> Guide:
    """Return the Guide unchanged: plain classifier-free guidance."""
    del model
    return guide


def interval(guide: Guide, model: Model, *, low: Level = 0.0, high: Level = float("inf")) -> Guide:
    """Apply guidance only at noise levels from `low` to `high` (Kynkaanniemi et al. 2024).

    At other levels, the network is evaluated under the text only.
    """
    del model
    before = guide.applies or (lambda sigma: True)
    return guide._replace(applies=lambda sigma: before(sigma) & (low <= sigma) & (sigma <= high))


def apg(guide: Guide, model: Model, *, eta: Share = 0.0, norm: Amount = 0.0) -> Guide:
    """Apply adaptive projected guidance (Sadat et al. 2024, Algorithm 1), without its momentum.

    The update is D_cond - D_other. First, the update of each image is clipped to the length `norm`;
    0 means no limit. Then its part parallel to D_cond, which causes oversaturation, is multiplied
    by `eta`. Finally, guidance multiplies the update.
    """
    del model
    if EMPTY in guide.needs:
        raise ValueError(
            "sampler.guiding has apg after perp_neg, but apg cannot project perp_neg's update: "
            "write apg+perp_neg"
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
    """Apply CFG++ (Chung et al. 2024, Algorithm 2). The guidance is the paper's lambda, 0 to 1.

    A CFG++ step adds unconditional noise to the guided image
    D_lambda = D_uncond + lambda (D_cond - D_uncond). For a step from sigma to sigma' and
    r = sigma' / sigma, this is

        x' = D_lambda + r (x - D_uncond).

    It equals DDIM's step x' = D + r (x - D) at the guidance lambda / (1 - r). The sampler must
    evaluate D at the grid's levels only: `check` rejects `restart`, and `heun` with churn.
    """

    def combine(d, x, sigma, guidance):
        later = jnp.where(model.sigmas < sigma[:, None] * (1 - 1e-5), model.sigmas, 0).max(1)  # [B]
        return guide.combine(d, x, sigma, guidance / (1 - later / sigma))

    return guide._replace(combine=combine)


def rescale(guide: Guide, model: Model, *, phi: Share = 0.7) -> Guide:
    """Rescale the guided prediction of the network (Lin et al. 2024, equations 15 and 16).

    A copy of the guided prediction is scaled to the standard deviation of the conditional one. The
    result is phi times this copy plus 1 - phi times the guided prediction.
    """

    def combine(d, x, sigma, guidance):
        c_skip, c_out, *_ = (c[:, None, None, None] for c in model.scalings(sigma))
        to_f = lambda denoised: (denoised - c_skip * x) / c_out
        guided = to_f(guide.combine(d, x, sigma, guidance))
        ratio = to_f(d[COND]).std(_AXES, keepdims=True) / guided.std(_AXES, keepdims=True)
        return c_skip * x + c_out * guided * (phi * ratio + 1 - phi)

    return guide._replace(combine=combine)


def perp_neg(guide: Guide, model: Model, *, weight: Amount = 1.0) -> Guide:
    """Apply Perp-Neg (Armandpour et al. 2023): keep what the negative text shares with the prompt.

    D is D_empty + guidance * (a - weight * b), where a = D_cond - D_empty, and b is the part of
    D_negative - D_empty that is perpendicular to a.
    """
    del model
    if guide.other != NEGATIVE:
        raise ValueError(
            "sampler.guiding has perp_neg, which guides by the negative and the empty text, "
            "but --guide names a second model to guide by: remove one of the two"
        )

    def combine(d: Mapping[str, Images], x, sigma, guidance):
        a, b = d[COND] - d[EMPTY], d[NEGATIVE] - d[EMPTY]
        cond = d[COND] - weight * (b - projected(b, a))
        return guide.combine({**d, COND: cond, NEGATIVE: d[EMPTY]}, x, sigma, guidance)

    return guide._replace(combine=combine, needs=(COND, EMPTY, NEGATIVE))


def projected(
    images: Float[Array, "B H W C"], onto: Float[Array, "B H W C"]
) -> Float[Array, "B H W C"]:
    """Project each image of a batch onto the image in the same row of `onto`."""
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
"""The names that sampler.guiding can combine by +. Functions apply from left to right. A table
value "MODULE:FUNCTION" is imported on use."""
GuidingName = Annotated[str, bound]
PLAIN_AT_1 = ("cfg", "interval", "apg", "rescale")
"""The kinds of guidance that have no effect at guidance 1, where D equals D_cond."""


def dynamic(denoise: Denoiser, *, percentile: Scalar = 99.5) -> Denoiser:
    """Apply dynamic thresholding (Imagen, section 2.3): clip x0 to [-s, s] and divide it by s.

    s is the given percentile of |x0| in each image, and at least 1.
    """

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
"""The values that sampler.threshold can have in configs. Only Imagen has this field, because the
latents of Stable Diffusion have no fixed range."""
ThresholdName = Annotated[str, named.checked(THRESHOLDS)]
