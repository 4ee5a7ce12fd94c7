"""Draw images with a Stable Diffusion model from texts, or edit pictures as texts describe."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.diffusion import guides, meanflow, precond, samplers
from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.diffusion.precond import Denoiser, Images, Precond
from diffusion_jax.task import Texts, to_range, with_span
from diffusion_jax.text import TextEncoder
from sd_jax import editing, previews
from sd_jax import vae as vae_module
from sd_jax.editing import IMAGE, MASK
from sd_jax.settings import Pipeline, Settings

NEGATIVE = "negative_"
_PIXELS = 2**20  # Pixels to decode at once per device; each takes about 2 KiB of feature maps.


def make_sample(p: Pipeline, *arguments: Any, **named: Any) -> Callable[..., Images]:
    """Return a function that draws a batch of images, for the field `sample` of a Task.

    The arguments are those of `make_begin`.
    """
    return samplers.make_sample(make_begin(p, *arguments, **named), p.sampler)


def make_begin(
    p: Pipeline,
    encoder: TextEncoder,
    preview: Preview | None = None,
    guide: Settings | None = None,
) -> samplers.Begin:
    """Return a function `begin` that prepares the sampler's arguments, as a samplers.Start.

    The arguments of `begin` are those of a Task's `sample`: (params, frozen, batch, keys,
    guidance). `frozen` holds the weights of the text encoder at "text", of the VAE at "vae", and of
    the guiding model, if there is one, at "guide". `batch` holds the tokens that `prompts` returns.
    To edit pictures, `batch` also holds "image", uint8 [B, H, W, 3], and for inpainting "mask",
    bool [B, H, W], which is True at the pixels to redraw (see diffusion_jax/diffusion/editing.py).

    Args:
        p: The model's settings. When pictures are edited, p.strength is the share of the sampling
            steps to take.
        encoder: The text encoder.
        preview: Called on the host at each evaluation of the denoiser, with small RGB images of the
            denoised latents and the noise level. The images have the height and width of the
            latents. None for no previews.
        guide: The settings of a second model that guides this one; None for no such model.
    """
    unet, vae, objective = p.unet, p.vae, p.diffusion.objective
    sigmas, time = samplers.sampling_grid(objective.noise, p.sampler)
    scalings, factor = objective.precond(time), vae_module.factor(vae)

    def begin(params, frozen, batch, keys, guidance):
        negatives = {k.removeprefix(NEGATIVE): v for k, v in batch.items()
                     if k.startswith(NEGATIVE)}  # fmt: skip
        empty = lambda: prompts(encoder, [""] * len(keys), "")
        conditions = {
            guides.COND: lambda: attended(p, encoder, frozen, batch),  # [B, L, D]
            guides.NEGATIVE: lambda: attended(p, encoder, frozen, negatives),
            guides.EMPTY: lambda: attended(p, encoder, frozen, empty()),
        }
        guide_of = None
        if guide:
            other = guide.diffusion.objective
            guide_of = _denoiser_of(guide.unet, frozen["guide"], other.scalings, other.span(sigmas))
        denoise = guidance_module.make_denoiser(
            p.sampler, guides.Model(scalings, sigmas), guidance,
            _denoiser_of(unet, params, scalings, objective.span(sigmas)), conditions, guide_of,
        )  # fmt: skip
        if preview is not None:
            denoise = previews.sketched(denoise, preview, p, frozen["vae"])
        wrap, size = (lambda sampler: sampler), p.output_shape
        if IMAGE in batch:
            wrap, size = editing.wrapper(p, frozen["vae"], batch, keys), batch[IMAGE].shape[1:3]
        shape = (*(side // factor for side in size), unet.in_channels)
        first = jnp.sqrt(1 + sigmas[0] ** 2) if p.sampler.unit_start else sigmas[0]
        x, noise = samplers.initial_noise(keys, shape, first), samplers.gaussian_noise(keys, shape)
        return samplers.Start(denoise, x, sigmas, noise, lambda x: finish(frozen, batch, x), wrap)

    def finish(frozen, batch, x):
        z = samplers.in_own_coordinates(x, sigmas[-1]) / p.latents.scale
        at_once = max(1, _PIXELS // (z.shape[1] * z.shape[2] * factor**2))
        decode = lambda z: vae.apply(frozen["vae"], z, method="decode")
        images = vae_module.decode_in_slices(decode, z, at_once)
        if MASK not in batch:
            return images
        return jnp.where(batch[MASK][..., None], images, to_range(batch[IMAGE]))

    return begin


def _denoiser_of(
    unet: Any, params: Any, scalings: Precond, span: meanflow.Span | None
) -> Callable[[Any], Denoiser]:
    """Return a function that maps a text context to the denoiser D(x, sigma).

    For MeanFlow models, `span` maps sigma to the time until the next lower level of the grid. For
    other models, it is None.
    """

    def denoiser_of(text):
        def denoise(x, sigma):
            context, _ = with_span(text, None, span and span(sigma))
            network: Any = lambda x, time: unet.apply(params, x, time, context)
            return precond.denoiser(network, scalings)(x, sigma)

        return denoise

    return denoiser_of


def prompts(encoder: TextEncoder, texts: Sequence[str], negative: str | Sequence[str]) -> Texts:
    """Return a sampling batch: the tokens of texts and of their negative prompts.

    `negative` is one negative prompt for all texts, or one per text. The keys of the negative
    prompts' tokens start with "negative_".
    """
    negatives = [negative] * len(texts) if isinstance(negative, str) else negative
    tokens = encoder.tokenize(negatives)
    return {**encoder.tokenize(texts), **{NEGATIVE + k: v for k, v in tokens.items()}}


def attended(
    p: Pipeline, encoder: TextEncoder, frozen: Any, batch: Mapping[str, Any]
) -> Float[Array, "B L D"]:
    """Encode a batch of tokens as the text context [B, L, D] that the UNet attends to.

    The context is padded with zeros to p.conditioning.pad_to tokens.
    """
    text = encoder.encode(frozen["text"], dict(batch))[0]
    padding = max(0, p.conditioning.pad_to - text.shape[1])
    return jnp.pad(text, ((0, 0), (0, padding), (0, 0)))
