"""Guidance and thresholds: what stands between a network under several texts and the D of samplers.

A network gives D under the text, under the negative text and, for some, under the empty one; for
the negative text a second network may stand (autoguidance, Karras et al. 2024). A Guide makes one D
of these, and wrappers change Guides.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from diffusion_jax.config import named
from diffusion_jax.diffusion import precond
from diffusion_jax.diffusion.noise import Scalar, Sigmas
from diffusion_jax.diffusion.precond import Denoiser, Images, Precond, Sigma

Scale = Scalar | Float[Array, "B"]
COND, NEGATIVE, EMPTY, GUIDE = "cond", "negative", "empty", "guide"
Preview = Callable[[Float[ArrayLike, "B h w 3"], Float[ArrayLike, ""]], None]
Branches = Callable[[Images, Sigma, Sequence[str]], Mapping[str, Images]]
"""(x, sigma, names) to D under each of them."""


class Guide(NamedTuple):
    """How several D become the one that samplers see."""

    combine: Callable[[Mapping[str, Images], Images, Sigma, Scale], Images]
    """(D by name, x, sigma, scale) to D."""
    other: str = NEGATIVE
    """What is led away from: NEGATIVE, or GUIDE."""
    needs: tuple[str, ...] = (COND, NEGATIVE)
    """The D that it combines."""
    acts: Callable[[Float[Array, ""]], Bool[Array, ""]] | None = None
    """Whether it does at a level, None for all; elsewhere D is that of the text."""
    neutral: float | None = 1.0
    """The scale at which it changes nothing, if there is one."""


class Model(NamedTuple):
    """What a wrapper may ask of the model that it guides."""

    scalings: Precond
    sigmas: Sigmas
    """The levels of sampling."""


def outward(other: str = NEGATIVE) -> Guide:
    """D_other + scale * (D_cond - D_other) (Ho & Salimans 2022, equation 6).

    `scale` is one number or one an image; at 1 the result is D_cond to the last bit.
    """

    def combine(d, x, sigma, scale):
        excess = jnp.asarray(scale, x.dtype) - 1
        return d[COND] + excess.reshape(-1, 1, 1, 1) * (d[COND] - d[other])

    return Guide(combine, other, (COND, other))


def led(
    s: Any,
    model: Model,
    scale: Scale | None,
    denoiser_of: Callable[[Any], Denoiser],
    conditions: Mapping[str, Callable[[], Any]],
    guide_of: Callable[[Any], Denoiser] | None = None,
) -> Denoiser:
    """The D that samplers see, as a config's `sampler` says; without guidance where scale is None.

    `conditions` make what a network is conditioned on, a row an image; `denoiser_of` and `guide_of`
    make D of it, of the network and of a second one that guides with the same text.
    """
    guide = make(s, model, GUIDE if guide_of else NEGATIVE)
    names = (COND,) if scale is None else guide.needs
    made = {name: condition() for name, condition in conditions.items() if name in names}
    second = guide_of(made[COND]) if guide_of else None
    return guided(conditional(denoiser_of, made, second), scale, guide)


def guided(branches: Branches, scale: Scale | None, guide: Guide) -> Denoiser:
    """The D that samplers see; of the text alone where `scale` is None."""

    def plain(x, sigma):
        return branches(x, sigma, (COND,))[COND]

    def everywhere(x, sigma):
        assert scale is not None
        return guide.combine(branches(x, sigma, guide.needs), x, sigma, scale)

    if scale is None or guide.acts is None:
        return plain if scale is None else everywhere
    acts = guide.acts
    return lambda x, sigma: jax.lax.cond(acts(sigma[0]), everywhere, plain, x, sigma)


def make(s: Any, model: Model, other: str = NEGATIVE) -> Guide:
    """The guidance of a config's `sampler`: `guiding` within guidance_low and guidance_high."""
    check(s)
    guide = outward(other)
    for wrapper in bound("sampler.guiding", s.guiding):
        guide = wrapper(guide, model)
    if (s.guidance_low, s.guidance_high) != (0, float("inf")):
        within = named.Call("interval", (s.guidance_low, s.guidance_high))
        guide = named.bind("sampler.guiding", within, GUIDANCE)(guide, model)
    return guide


def check(s: Any) -> None:
    """ValueError for cfg_pp with a sampler that evaluates D between the grid's levels."""
    (sampler,) = named.calls("sampler.name", getattr(s, "name", "ddim"))
    churned = getattr(s, "churn", 0) or sampler.positional or "churn" in sampler.by_name
    between = sampler.name == "restart" or (sampler.name == "heun" and churned)
    if between and "cfg_pp" in s.guiding:
        raise ValueError(
            f"sampler.guiding is {s.guiding!r} and sampler.name {s.name!r}, which evaluates the "
            "network between the levels of its grid: take ddim or euler, or heun without churn"
        )


def bound(field: str, text: str) -> list[functools.partial]:
    """The wrappers that a config's field names, as its annotation has them: see named.bound."""
    return [named.bind(field, call, GUIDANCE) for call in named.calls(field, text)]


def scales(s: Any, scale: int | float, rows: int) -> Float[np.ndarray, "N"] | None:
    """A scale for each image; None where guidance changes nothing, and need not be computed."""
    unused = Model(precond.epsilon(precond.log_snr), jnp.ones(1))
    return None if scale == make(s, unused).neutral else np.full(rows, scale, np.float32)


def conditional(
    denoiser_of: Callable[[Any], Denoiser],
    conditions: Mapping[str, Any],
    guide: Denoiser | None = None,
) -> Branches:
    """D of one network under several conditions, in one evaluation, and that of a guide.

    `conditions` hold a row an image. Under all of them a network sees each image as often, as
    neighbours, so that a sharded batch stays where it is.
    """
    join = lambda *rows: jnp.stack(rows, axis=1).reshape(-1, *rows[0].shape[1:])
    every = jax.tree.map(join, *conditions.values())  # Row n i + k is row i of the k-th.

    def branches(x, sigma, names):
        own = [name for name in conditions if name in names]
        rows = every if len(own) == len(conditions) else conditions[COND]
        found = by_rows(denoiser_of(rows))(x, sigma, own)
        return {**found, GUIDE: guide(x, sigma)} if guide and GUIDE in names else found

    return branches


def by_rows(denoise: Denoiser) -> Branches:
    """Of a D whose rows are under each name in turn."""

    def branches(x, sigma, names):
        d = denoise(x.repeat(len(names), axis=0), sigma.repeat(len(names)))
        each = d.reshape(-1, len(names), *x.shape[1:])  # [B, names, H, W, C]
        return {name: each[:, i] for i, name in enumerate(names)}

    return branches


# By sampler.threshold of a config. Imagen's alone: latents have no range to be held in.
THRESHOLDS: Mapping[str, Callable[..., Denoiser] | str] = {
    "dynamic": "diffusion_jax.diffusion.thresholds:dynamic",
    "static": "diffusion_jax.diffusion.thresholds:static",
    "none": lambda denoise: denoise,
}
_GUIDES = "diffusion_jax.diffusion.guides"
# By sampler.guiding of a config, in both systems; several are joined by +, the first innermost.
# Functions of a Guide and a Model; their own parameters follow `*` (see named).
GUIDANCE: Mapping[str, Callable[..., Guide] | str] = {
    name: f"{_GUIDES}:{name}"
    for name in ("cfg", "interval", "apg", "cfg_pp", "rescale", "perp_neg")
}
