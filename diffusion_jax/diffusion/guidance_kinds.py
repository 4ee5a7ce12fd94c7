"""Kinds of guidance: functions that take a Guide and a GuidedModel, and return a new Guide.

The table GUIDANCE in guidance.py lists these functions. D is the estimate of the clean image.
D_cond is D with the text, and D_other is the estimate from which guidance leads away. F_cond and
F_other are the corresponding predictions of the network. Most kinds of guidance change only
D_other, and then call the `combine` of the Guide that they received.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from diffusion_jax.config.ranges import Interval
from diffusion_jax.diffusion.noise import Scalar, Sigmas
from diffusion_jax.diffusion.precond import Images, Precond, Sigma

Guidance = Scalar | Float[Array, "B"]
COND, NEGATIVE, EMPTY, GUIDE = "cond", "negative", "empty", "guide"
UNSEEN = "unseen"
"""The condition of the negative text without the picture that the network edits."""
Share = Annotated[int | float, Interval("[0, 1]")]
Factor = Annotated[int | float, Interval("[0, 1000]")]
Level = Annotated[int | float, Interval("[0, inf]")]
StepCount = Annotated[int, Interval("[0, 1000]")]
_AXES = (1, 2, 3)


class Guide(NamedTuple):
    """A rule that combines the estimates D under several conditions into the guided D."""

    combine: Callable[[Mapping[str, Images], Images, Sigma, Guidance], Images]
    """Maps (a dict from condition names to D, x, sigma, guidance scale) to the guided D."""
    other: str = NEGATIVE
    """The condition from which guidance leads away: NEGATIVE, or GUIDE for a second network."""
    needs: tuple[str, ...] = (COND, NEGATIVE)
    """The names of the conditions for which `combine` needs D."""
    applies: Callable[[Float[Array, ""]], Bool[Array, ""]] | None = None
    """Returns whether guidance applies at a noise level. Where it returns False, D is D_cond, and
    the network is evaluated with the text alone. None applies guidance at all levels."""


class GuidedModel(NamedTuple):
    """The properties of the guided model that the functions in GUIDANCE receive."""

    scalings: Precond
    sigmas: Sigmas
    """The noise levels of the sampling grid."""


def outward(other: str = NEGATIVE) -> Guide:
    """Build a Guide that computes D_other + guidance * (D_cond - D_other).

    This is equation 6 of Ho & Salimans 2022. `guidance` is one number, or one number per image. At
    guidance scale 1, the result is bitwise equal to D_cond.
    """

    def combine(d, x, sigma, guidance):
        excess = jnp.asarray(guidance, x.dtype) - 1
        return d[COND] + excess.reshape(-1, 1, 1, 1) * (d[COND] - d[other])

    return Guide(combine, other, (COND, other))


def cfg(guide: Guide, model: GuidedModel) -> Guide:
    """Return the Guide unchanged: plain classifier-free guidance."""
    del model
    return guide


def interval(guide: Guide, model: GuidedModel, *, low: Level = 0.0, high: Level = float("inf")) -> Guide:
    """Apply guidance only at noise levels from `low` to `high` (Kynkaanniemi et al. 2024).

    At other levels, the network is evaluated with the text alone, which costs less.
    """
    del model
    before = guide.applies or (lambda sigma: True)
    return guide._replace(applies=lambda sigma: before(sigma) & (low <= sigma) & (sigma <= high))


def apg(guide: Guide, model: GuidedModel, *, eta: Share = 0.0, norm: Factor = 0.0) -> Guide:
    """Apply adaptive projected guidance (Sadat et al. 2024, Algorithm 1), without its momentum.

    The update of an image is D_cond - D_other. First, an update that is longer than `norm` is
    shortened to this length; `norm` 0 means no limit. Then the part of the update parallel to
    D_cond, which causes oversaturation, is multiplied by `eta`. Guidance uses the changed update in
    place of D_cond - D_other.
    """
    del model
    _check_order(guide, "apg")

    def combine(d, x, sigma, guidance):
        difference = d[COND] - d[guide.other]
        if norm:
            length = jnp.sqrt((difference**2).sum(_AXES, keepdims=True))
            difference = difference * jnp.minimum(1, norm / length)
        along = projected(difference, d[COND])
        update = difference - along + eta * along
        return guide.combine({**d, guide.other: d[COND] - update}, x, sigma, guidance)

    return guide._replace(combine=combine)


def cfg_pp(guide: Guide, model: GuidedModel) -> Guide:
    """Apply CFG++ (Chung et al. 2024, Algorithm 2). The guidance scale is its lambda, from 0 to 1.

    CFG++ adds the noise of the unconditional estimate D_uncond, here D_other, to the guided image
    D_lambda = D_uncond + lambda (D_cond - D_uncond). With r = sigma' / sigma, a step from sigma to
    sigma' is

        x' = D_lambda + r (x - D_uncond).

    This equals DDIM's step x' = D + r (x - D) at the guidance scale lambda / (1 - r). Other steps
    need other scales, so `guidance.check` accepts only `euler`, and `ddim` with eta 0.
    """

    def combine(d, x, sigma, guidance):
        later = jnp.where(model.sigmas < sigma[:, None] * (1 - 1e-5), model.sigmas, 0).max(1)  # [B]
        return guide.combine(d, x, sigma, guidance / (1 - later / sigma))

    return guide._replace(combine=combine)


def rescale(guide: Guide, model: GuidedModel, *, phi: Share = 0.7) -> Guide:
    """Rescale the guided prediction of the network (Lin et al. 2024, equations 15 and 16).

    The guided prediction of each image is scaled to the standard deviation of F_cond. The result is
    phi times this scaled prediction plus (1 - phi) times the original guided prediction.
    """

    def combine(d, x, sigma, guidance):
        to_f, to_d = _predictions(model, x, sigma)
        guided = to_f(guide.combine(d, x, sigma, guidance))
        ratio = to_f(d[COND]).std(_AXES, keepdims=True) / guided.std(_AXES, keepdims=True)
        return to_d(guided * (phi * ratio + 1 - phi))

    return guide._replace(combine=combine)


def cfg_zero(guide: Guide, model: GuidedModel, *, zero: StepCount = 1) -> Guide:
    """Apply CFG-Zero* (Fan et al. 2025, Algorithm 1) to the predictions F of the network.

    In each image, F_other is multiplied by the factor that brings it nearest to F_cond. In the
    first `zero` steps, the guided F is 0. Fan et al. define this for the velocity of flow models.
    """
    _check_order(guide, "cfg_zero")

    def combine(d, x, sigma, guidance):
        to_f, to_d = _predictions(model, x, sigma)
        nearest = projected(to_f(d[COND]), to_f(d[guide.other]))
        out = guide.combine({**d, guide.other: to_d(nearest)}, x, sigma, guidance)
        if not zero:
            return out
        last = model.sigmas[min(zero, len(model.sigmas)) - 1] * (1 - 1e-5)
        return jnp.where((sigma >= last)[:, None, None, None], to_d(jnp.zeros_like(x)), out)

    return guide._replace(combine=combine)


def tcfg(guide: Guide, model: GuidedModel) -> Guide:
    """Apply tangential damping (Kwon et al. 2025, TCFG) to the predictions F of the network.

    F_other is projected onto the first right singular vector of the matrix with the rows F_cond and
    F_other. This vector is parallel to cos(t) F_cond + sin(t) F_other, where

        tan(2 t) = 2 F_cond . F_other / (|F_cond|^2 - |F_other|^2).
    """
    _check_order(guide, "tcfg")

    def combine(d, x, sigma, guidance):
        to_f, to_d = _predictions(model, x, sigma)
        cond, other = to_f(d[COND]), to_f(d[guide.other])
        dot = lambda a, b: (a * b).sum(_AXES, keepdims=True)
        gap, shared = dot(cond, cond) - dot(other, other), 2 * dot(cond, other)
        length = jnp.maximum(jnp.sqrt(gap**2 + shared**2), 1e-12)
        damped = (shared * cond + (length - gap) * other) / (2 * length)
        return guide.combine({**d, guide.other: to_d(damped)}, x, sigma, guidance)

    return guide._replace(combine=combine)


def fdg(guide: Guide, model: GuidedModel, *, low: Share = 0.5) -> Guide:
    """Apply frequency-decoupled guidance (Sadat et al. 2025, Algorithm 1) with two frequency bands.

    The low frequencies of the update D_cond - D_other are multiplied by `low`. At the guidance
    scale w, high frequencies are thus guided with w, and low ones with 1 + low * (w - 1). The bands
    are the levels of a Laplacian pyramid.
    """
    del model
    _check_order(guide, "fdg")

    def combine(d, x, sigma, guidance):
        update = d[COND] - d[guide.other]
        update -= (1 - low) * low_frequencies(update)
        return guide.combine({**d, guide.other: d[COND] - update}, x, sigma, guidance)

    return guide._replace(combine=combine)


def perp_neg(guide: Guide, model: GuidedModel, *, weight: Factor = 1.0) -> Guide:
    """Apply Perp-Neg (Armandpour et al. 2023): ignore what prompt and negative text share.

    The guided D is D_empty + guidance * (a - weight * b), where a = D_cond - D_empty, and b is the
    part of D_negative - D_empty that is perpendicular to a.
    """
    del model
    if guide.other != NEGATIVE:
        raise ValueError(
            "sampler.guiding has perp_neg, which needs the negative text, but --guide replaces "
            "this text by a second model: remove perp_neg from sampler.guiding, or leave out "
            "--guide"
        )

    def combine(d: Mapping[str, Images], x, sigma, guidance):
        a, b = d[COND] - d[EMPTY], d[NEGATIVE] - d[EMPTY]
        cond = d[COND] - weight * (b - projected(b, a))
        return guide.combine({**d, COND: cond, NEGATIVE: d[EMPTY]}, x, sigma, guidance)

    return guide._replace(combine=combine, needs=(COND, EMPTY, *guide.needs[1:]))


def pix2pix(guide: Guide, model: GuidedModel, *, image_scale: Factor = 1.5) -> Guide:
    """Apply InstructPix2Pix's second guidance scale (Brooks et al. 2023, equation 3).

    The result is D_unseen + image_scale (D_other - D_unseen) + guidance (D_cond - D_other), where
    D_unseen is D without the picture to edit, and D_other with the picture but without the text.
    """
    del model

    def combine(d, x, sigma, guidance):
        excess = (image_scale - 1) * (d[guide.other] - d[UNSEEN])
        return guide.combine(d, x, sigma, guidance) + excess

    return guide._replace(combine=combine, needs=(*guide.needs, UNSEEN))


def projected(images: Float[Array, "B H W C"], onto: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
    """Project each image, as a vector, onto the image in the same row of `onto`."""
    length_2 = jnp.maximum((onto**2).sum(_AXES, keepdims=True), 1e-12)
    return (images * onto).sum(_AXES, keepdims=True) / length_2 * onto


def low_frequencies(images: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
    """Compute the low frequencies of images, as in a Laplacian pyramid.

    The images are blurred, halved, enlarged, and blurred a second time. The blur is that of Burt &
    Adelson 1983. Images are halved and enlarged by linear interpolation.
    """
    batch, height, width, channels = images.shape
    small = (batch, height // 2, width // 2, channels)
    halved = jax.image.resize(_blurred(images), small, "linear", antialias=False)
    return _blurred(jax.image.resize(halved, images.shape, "linear"))


def _blurred(images: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
    """Convolve with (1, 4, 6, 4, 1) / 16 along both axes. Borders are padded by reflection."""
    for axis in (1, 2):
        size, pad = images.shape[axis], [(2 * (a == axis), 2 * (a == axis)) for a in range(4)]
        padded = jnp.pad(images, pad, mode="reflect")
        far, near, middle, near_2, far_2 = (jax.lax.slice_in_dim(padded, i, i + size, axis=axis) for i in range(5))
        images = (far + far_2 + 4 * (near + near_2) + 6 * middle) / 16
    return images


def _predictions(model: GuidedModel, x: Images, sigma: Sigma):
    """Return two functions: one converts D to the network's prediction F, the other F to D.

    D and F are related by D = c_skip x + c_out F.
    """
    c_skip, c_out, *_ = (c[:, None, None, None] for c in model.scalings(sigma))
    return lambda d: (d - c_skip * x) / c_out, lambda f: c_skip * x + c_out * f


def _check_order(guide: Guide, name: str) -> None:
    """Raise ValueError if the guidance `name` follows perp_neg in sampler.guiding.

    The guidance `name` changes D_other. After perp_neg, D_other is the estimate with the negative
    text, but perp_neg leads away from the estimate with the empty text.
    """
    if EMPTY in guide.needs:
        raise ValueError(
            f"sampler.guiding has {name} after perp_neg, where {name} cannot change the estimate "
            f"from which perp_neg leads away: write {name}+perp_neg"
        )
