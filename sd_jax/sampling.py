"""What Stable Diffusion supplies to the shared loss and sampler: latents of a VAE, and prompts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from diffusion_jax import model
from diffusion_jax.config import picture_fields
from diffusion_jax.devices import programs
from diffusion_jax.diffusion import guidance_kinds, samplers
from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.diffusion.precond import Images
from diffusion_jax.model import SecondNetwork, System
from diffusion_jax.task import Texts, to_range
from diffusion_jax.text import TextEncoder
from diffusion_jax.text.encoder import WEIGHTS
from sd_jax import editing, masks
from sd_jax import vae as vae_module
from sd_jax.editing import IMAGE, MASK
from sd_jax.settings import Pipeline, Sampler, Settings
from sd_jax.unet import PIX2PIX
from sd_jax.vae import LatentArray, Moments

NEGATIVE = "negative_"
_PIXELS = 2**20  # Pixels to decode at once per device; each takes about 2 KiB of feature maps.


def make_sample(p: Pipeline, *arguments: Any, **named: Any) -> Callable[..., Images]:
    """Return a function that draws a batch of images, for the field `sample` of a Task.

    The arguments are those of `make_sampler_inputs`.
    """
    return samplers.make_sample(make_sampler_inputs(p, *arguments, **named), p.sampler)


def make_sampler_inputs(
    p: Pipeline,
    encoder: TextEncoder,
    preview: Preview | None = None,
    guide: Settings | None = None,
) -> samplers.InputsFunction:
    """Return the function `sampler_inputs` of a Task, which prepares the sampler's arguments.

    The arguments of `sampler_inputs` are those of a Task's `sample`: (params, frozen, batch, keys,
    guidance). `frozen` holds the weights of the text encoder at "text", of the VAE at "vae", and of
    the guiding model, if there is one, at "guide". `batch` holds the tokens that `prompts` returns.
    To edit pictures, `batch` also holds "image", uint8 [B, H, W, 3], and for inpainting "mask",
    bool [B, H, W], which is True at the pixels to redraw (see diffusion_jax/diffusion/editing.py).
    Without them, an inpainting UNet sees an empty picture, and redraws all of it.

    Args:
        p: The model's settings. When pictures are edited, p.strength is the share of the sampling
            steps to take.
        encoder: The text encoder.
        preview: Called on the host at each evaluation of the denoiser, with small RGB images of the
            denoised latents and the noise level. The images have the height and width of the
            latents. None for no previews.
        guide: The settings of a second model that guides this one; None for no such model.
    """
    guiding = guide and SecondNetwork(guide.unet, guide.diffusion)
    return model.make_sampler_inputs(system(p, encoder, preview), p.diffusion, p.sampler, guiding)


def system(p: Pipeline, encoder: TextEncoder, preview: Preview | None = None) -> System:
    """Return what Stable Diffusion supplies. The arguments are those of `make_sampler_inputs`."""
    unet, vae, factor = p.unet, p.vae, vae_module.factor(p.vae)
    named = picture_fields.read(p.fields)

    def example():
        size = p.latents.image_size // factor
        x = jnp.zeros((1, size, size, unet.in_channels))
        return {"x": x, "time": jnp.zeros(1), "text": jnp.zeros((1, 1, encoder.width))}

    def target(frozen, batch, keys):
        moments = batch.get("moments")
        if moments is None:
            pixels = to_range(batch[IMAGE], p.latents.pixels)
            moments: Any = vae.apply(frozen["vae"], pixels, method="encode")
        return p.latents.to_unet(posterior_sample(keys, moments))

    def text(frozen, batch):
        return {"text": attended(p, encoder, frozen, batch)}  # [B, L, D]

    def dropped(frozen, condition):
        given = condition["text"]
        if p.conditioning.drop_to != "empty":
            return {"text": jnp.zeros_like(given)}
        tokens = {name: jnp.asarray(row) for name, row in encoder.tokenize([""]).items()}
        return {"text": jnp.broadcast_to(attended(p, encoder, frozen, tokens), given.shape)}

    def conditions(frozen, batch):
        negatives = {k.removeprefix(NEGATIVE): v for k, v in batch.items()
                     if k.startswith(NEGATIVE)}  # fmt: skip
        empties = [""] * len(next(iter(batch.values())))

        def empty():
            if WEIGHTS not in batch or encoder.tokenize_weighted is None:
                return encoder.tokenize(empties)
            num_chunks = batch[WEIGHTS].shape[1] // encoder.max_tokens
            return encoder.tokenize_weighted(empties, num_chunks)

        def unseen():
            shape = len(empties), *sample_shape(batch)
            return {**text(frozen, negatives), "picture": jnp.zeros(shape)}

        known = {
            guidance_kinds.COND: lambda: text(frozen, batch),
            guidance_kinds.NEGATIVE: lambda: text(frozen, negatives),
            guidance_kinds.EMPTY: lambda: text(frozen, empty()),
        }
        return known | ({guidance_kinds.UNSEEN: unseen} if p.sees == PIX2PIX else {})

    def training_inputs(frozen, batch, x0, keys):
        if not p.sees:
            return {}
        mask = masks.random_masks(keys, *batch[IMAGE].shape[1:3])
        return {"picture": editing.seen(p, frozen["vae"], batch[IMAGE], mask)}

    def sampling_inputs(frozen, batch, keys, x0):
        if x0 is not None or not p.sees:
            return keys, training_inputs(frozen, batch, x0, keys)
        shape = len(next(iter(batch.values()))), *p.output_shape
        pictures = jnp.asarray(batch.get(IMAGE, np.zeros((*shape, 3), np.uint8)))
        mask = jnp.asarray(batch.get(MASK, np.ones(pictures.shape[:3], bool)))
        return keys, {"picture": editing.seen(p, frozen["vae"], pictures, mask)}

    def sample_shape(batch):
        height, width = batch[IMAGE].shape[1:3] if IMAGE in batch else p.output_shape
        return height // factor, width // factor, p.vae.latent_channels

    def decode(frozen, batch, x):
        z = p.latents.to_vae(x)
        at_once = max(1, _PIXELS // (z.shape[1] * z.shape[2] * factor**2))
        to_pixels = lambda z: vae.apply(frozen["vae"], z, method="decode")
        images = vae_module.decode_in_slices(to_pixels, z, at_once)
        if MASK not in batch:
            return images
        return jnp.where(batch[MASK][..., None], images, to_range(batch[IMAGE]))

    def wrap_denoiser(frozen, denoise):
        if not preview:
            return denoise
        matrix, grey = colours(p, frozen["vae"])
        return programs.watched(denoise, preview, lambda x0: x0 @ matrix + grey)

    return System(
        unet=unet,
        example=example,
        target=target,
        text=text,
        dropped=dropped,
        conditions=conditions,
        sample_shape=sample_shape,
        decode=decode,
        editor=lambda frozen, batch, keys: editing.editor(p, frozen["vae"], batch, keys),
        training_inputs=training_inputs,
        sampling_inputs=sampling_inputs,
        wrap_denoiser=wrap_denoiser,
        fields=named,
        field_values=picture_fields.values(named, p.sampler.fields),
        unit_start=p.sampler.unit_start,
    )


def posterior_sample(keys: Key[Array, "B"], moments: Moments) -> LatentArray:
    """Draw the latents of each image from the posterior with the given moments.

    The result is not standardized; latents.to_unet does so.
    """
    shape = (*moments.shape[1:3], moments.shape[3] // 2)
    noise = samplers.gaussian_noise(keys, shape)(jnp.zeros((), jnp.int32))
    return vae_module.sample(moments, noise)


def prompts(encoder: TextEncoder, texts: Sequence[str], negative: str | Sequence[str]) -> Texts:
    """Return a sampling batch: the tokens of texts and of their negative prompts.

    `negative` is one negative prompt for all texts, or one per text. The keys of the negative
    prompts' tokens start with "negative_".
    """
    negatives = [negative] * len(texts) if isinstance(negative, str) else negative
    tokens = encoder.tokenize(negatives)
    return {**encoder.tokenize(texts), **{NEGATIVE + k: v for k, v in tokens.items()}}


def weighted_prompts(encoder: TextEncoder, texts: Sequence[str], negative: str) -> Texts:
    """Return a sampling batch like `prompts`, but read the weights in texts.

    Raises ValueError if the encoder is not CLIP, or a weight is not a number.
    """
    if encoder.tokenize_weighted is None:
        raise ValueError(
            f"sampler.prompt_weights is True, but the text encoder is {encoder.name!r}: only CLIP "
            "reads weights in prompts"
        )
    # Tokenizing all texts together gives prompts and negative prompts the same number of chunks.
    tokens = encoder.tokenize_weighted([*texts, negative], 1)
    negatives = {NEGATIVE + k: np.repeat(v[-1:], len(texts), 0) for k, v in tokens.items()}
    return {**{k: v[:-1] for k, v in tokens.items()}, **negatives}


def tokenizer(sampler: Sampler) -> Callable[[TextEncoder, Sequence[str], str], Texts]:
    """Return the function that reads prompts as the sampler's settings say."""
    return weighted_prompts if sampler.prompt_weights else prompts


def attended(
    p: Pipeline, encoder: TextEncoder, frozen: Any, batch: Mapping[str, Any]
) -> Float[Array, "B L D"]:
    """Encode a batch of tokens as the text context [B, L, D] that the UNet attends to.

    The context is padded with zeros to p.conditioning.pad_to tokens.
    """
    text = encoder.encode(frozen["text"], dict(batch))[0]
    padding = max(0, p.conditioning.pad_to - text.shape[1])
    return jnp.pad(text, ((0, 0), (0, padding), (0, 0)))


def colours(p: Pipeline, vae_params: Any) -> tuple[Float[Array, "Z 3"], Float[Array, "3"]]:
    """Return a linear approximation of the VAE's decoder: a matrix [Z, 3] and a colour [3].

    The RGB colour of a scaled latent z is about z @ matrix + colour. The colour is that of a zero
    latent. The matrix holds the decoder's finite-difference derivatives by each of the Z latent
    channels, for latents that are constant over the image.
    """
    z = p.vae.latent_channels
    flat = p.latents.to_vae(jnp.concatenate([jnp.eye(z), -jnp.eye(z), jnp.zeros((1, z))]))
    latents = jnp.broadcast_to(flat[:, None, None], (len(flat), 4, 4, z))
    images: Any = p.vae.apply(vae_params, latents, method="decode")
    means = images.mean((1, 2))  # [2 Z + 1, 3]
    return (means[:z] - means[z:-1]) / 2, means[-1]
