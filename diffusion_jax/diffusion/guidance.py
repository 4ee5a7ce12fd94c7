"""Guidance and thresholds: functions that build the denoiser D that samplers call.

D(x, sigma) is the estimate of the clean image. A network computes it with the text, with the
negative text and, for some kinds of guidance, with the empty text. Autoguidance (Karras et al.
2024) uses a second network instead of the negative text. A Guide combines these estimates into one
(guidance_kinds.py).

A function in GUIDANCE takes a Guide and returns a new one. A function in THRESHOLDS takes a
denoiser and returns a new one.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

from diffusion_jax.config.named import Table
from diffusion_jax.diffusion import guidance_kinds, onestep
from diffusion_jax.diffusion.guidance_kinds import COND, GUIDE, NEGATIVE, Guidance, Guide, GuidedModel, outward
from diffusion_jax.diffusion.noise import Scalar
from diffusion_jax.diffusion.precond import Denoiser, Images, Sigma

if TYPE_CHECKING:
    from diffusion_jax.diffusion.groups import Sampler

Preview = Callable[[Float[ArrayLike, "B h w 3"], Float[ArrayLike, ""]], None]
Branches = Callable[[Images, Sigma, Sequence[str]], Mapping[str, Images]]
"""Maps (x, sigma, condition names) to a dict that holds D(x, sigma) for each of these names."""


def make_denoiser(
    s: "Sampler",
    model: GuidedModel,
    guidance: Guidance | None,
    denoiser_of: Callable[[Any], Denoiser],
    conditions: Mapping[str, Callable[[], Any]],
    guide_of: Callable[[Any], Denoiser] | None = None,
) -> Denoiser:
    """Build the guided denoiser that a config's `sampler` group describes.

    Args:
        s: The `sampler` group.
        model: The properties of the guided model.
        guidance: The guidance scale, as one number or one number per image. With None, there is no
            guidance: the result is D with the text alone.
        denoiser_of: Maps a condition to the D of the network under this condition.
        conditions: Maps the name of each condition to a function without arguments, which computes
            the condition, one row per image. Only the functions that guidance needs are called.
        guide_of: For autoguidance, the same as `denoiser_of` but for the second network, which gets
            the same text as the first network. None without autoguidance.

    Raises:
        ValueError: The kinds of guidance do not fit each other, or the model.
    """
    guide = make(s, model, GUIDE if guide_of else NEGATIVE)
    names = (COND,) if guidance is None else guide.needs
    rows = {name: condition() for name, condition in conditions.items() if name in names}
    second = guide_of(rows[COND]) if guide_of else None
    return guided(conditional(denoiser_of, rows, second), guidance, guide)


def guided(branches: Branches, guidance: Guidance | None, guide: Guide) -> Denoiser:
    """Return a denoiser that evaluates D under several conditions and combines them with `guide`.

    `branches` evaluates D under the conditions. `guidance` is the guidance scale. If it is None,
    the denoiser is D with the text alone. The text alone is also used at noise levels where
    `guide.applies` returns False. The level of the first image decides for the whole batch.
    """

    def plain(x, sigma):
        return branches(x, sigma, (COND,))[COND]

    def everywhere(x, sigma):
        assert guidance is not None
        return guide.combine(branches(x, sigma, guide.needs), x, sigma, guidance)

    if guidance is None or guide.applies is None:
        return plain if guidance is None else everywhere
    applies = guide.applies
    return lambda x, sigma: jax.lax.cond(applies(sigma[0]), everywhere, plain, x, sigma)


def make(s: "Sampler", model: GuidedModel, other: str = NEGATIVE) -> Guide:
    """Build the Guide that a config's `sampler` group describes.

    The field `guiding` names the kinds of guidance. They apply at noise levels from guidance_low to
    guidance_high. `model` is the guided model. `other` is the condition from which guidance leads
    away: NEGATIVE, or GUIDE for autoguidance.

    Raises:
        ValueError: The kinds of guidance do not fit each other.
    """
    guide = outward(other)
    for wrapper in s.guides:
        guide = wrapper(guide, model)
    if (s.guidance_low, s.guidance_high) != (0, float("inf")):
        guide = guidance_kinds.interval(guide, model, low=s.guidance_low, high=s.guidance_high)
    return guide


def check(s: "Sampler", *, sees_picture: bool = False) -> None:
    """Raise ValueError if the sampler or the network cannot be guided as s.guiding says.

    cfg_pp needs a sampler with straight steps, for which its scale holds. pix2pix needs a network
    that sees the picture to edit, as `sees_picture` says.
    """
    kinds = [wrapper.func for wrapper in s.guides]
    if guidance_kinds.pix2pix in kinds and not sees_picture:
        raise ValueError(
            f"sampler.guiding is {s.guiding!r}, but pix2pix needs a network that sees the picture "
            "to edit (InstructPix2Pix): choose cfg or another kind of guidance"
        )
    uses_cfg_pp = guidance_kinds.cfg_pp in kinds
    if uses_cfg_pp and not onestep.is_straight(s.method.sampler):
        raise ValueError(
            f"sampler.guiding is {s.guiding!r}, but cfg_pp cannot be used with sampler.name "
            f"{s.name!r}, because its scale holds for straight steps from level to level only: "
            "choose euler, or ddim with sampler.eta 0"
        )


def bound(s: "Sampler") -> list[functools.partial]:
    """Return the functions that the field `guiding` of a config's `sampler` group names.

    Raises ValueError if a name or a parameter is unknown.
    """
    return GUIDANCE.all_bound("sampler.guiding", s.guiding)


def scale_per_image(s: "Sampler", guidance: int | float, num_images: int) -> Float[np.ndarray, "N"] | None:
    """Return an array that repeats the scale `guidance` for each image, or None.

    The result is None if guidance has no effect, so that the network need only be evaluated with
    the text alone. This is so if the scale is 1 and PLAIN_AT_1 contains all kinds of guidance that
    the config's `sampler` group `s` names.
    """
    if guidance == 1 and all(wrapper.func in PLAIN_AT_1 for wrapper in s.guides):
        return None
    return np.full(num_images, guidance, np.float32)


def conditional(
    denoiser_of: Callable[[Any], Denoiser], conditions: Mapping[str, Any], second: Denoiser | None = None
) -> Branches:
    """Return a function that evaluates a network under several conditions in one joined batch.

    `denoiser_of` maps a condition to the network's denoiser. `conditions` maps names to conditions
    with one row per image. In the joined batch, the rows of an image are neighbours, so that a
    sharded batch needs no communication. The returned function must be called either with the names
    of all conditions or with COND alone. If there is a denoiser `second`, it computes D for the
    name GUIDE.
    """
    join = lambda *rows: jnp.stack(rows, axis=1).reshape(-1, *rows[0].shape[1:])
    joined = jax.tree.map(join, *conditions.values())  # Row n i + k: image i, condition k of n.

    def branches(x, sigma, names):
        own = [name for name in conditions if name in names]
        denoise = denoiser_of(joined if len(own) == len(conditions) else conditions[COND])
        d = denoise(x.repeat(len(own), axis=0), sigma.repeat(len(own)))
        each = d.reshape(-1, len(own), *x.shape[1:])  # [B, names, H, W, C]
        by_name = {name: each[:, i] for i, name in enumerate(own)}
        return {**by_name, GUIDE: second(x, sigma)} if second and GUIDE in names else by_name

    return branches


class _Joined(Table):
    joins = True


GUIDANCE = _Joined(
    cfg=guidance_kinds.cfg,
    interval=guidance_kinds.interval,
    apg=guidance_kinds.apg,
    cfg_pp=guidance_kinds.cfg_pp,
    rescale=guidance_kinds.rescale,
    perp_neg=guidance_kinds.perp_neg,
    pix2pix=guidance_kinds.pix2pix,
    cfg_zero=guidance_kinds.cfg_zero,
    tcfg=guidance_kinds.tcfg,
    fdg=guidance_kinds.fdg,
)
"""The names that sampler.guiding can join by +. In "first+second", `second` wraps the Guide that
`first` returns. So at each evaluation, `second` runs first: it may change the estimates of D or the
guidance scale before it calls `first`, and the result afterwards, as `rescale` does. An entry
"MODULE:FUNCTION" is imported on use."""
GuidingName = Annotated[str, GUIDANCE]
PLAIN_AT_1 = (
    guidance_kinds.cfg,
    guidance_kinds.interval,
    guidance_kinds.apg,
    guidance_kinds.rescale,
    guidance_kinds.tcfg,
    guidance_kinds.fdg,
)
"""The kinds of guidance that have no effect at guidance scale 1: the guided D equals D_cond."""


def dynamic(denoise: Denoiser, *, percentile: Scalar = 99.5) -> Denoiser:
    """Apply dynamic thresholding (Imagen, section 2.3): clip x0 to [-s, s] and divide it by s.

    x0 is the image that `denoise` predicts, and s is the given percentile of |x0| in this image,
    but at least 1. The result is a denoiser that returns the clipped images.
    """

    def thresholded(x, sigma):
        x0 = denoise(x, sigma)
        s = jnp.percentile(jnp.abs(x0), percentile, axis=(1, 2, 3), keepdims=True)
        s = jnp.maximum(s, 1)
        return jnp.clip(x0, -s, s) / s

    return thresholded


def static(denoise: Denoiser) -> Denoiser:
    """Clip the predicted images to [-1, 1] (Imagen, section 2.3)."""
    return lambda x, sigma: jnp.clip(denoise(x, sigma), -1, 1)


THRESHOLDS = Table(dynamic=dynamic, static=static, none=lambda denoise: denoise)
"""The functions that sampler.threshold can name in configs. Only Imagen has this field, because the
latents of Stable Diffusion have no fixed range."""
ThresholdName = Annotated[str, THRESHOLDS]
