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

    Takes the arguments of `make_sampler_inputs`.
    """
    return samplers.make_sample(make_sampler_inputs(p, *arguments, **named), p.sampler)


def make_sampler_inputs(
    p: Pipeline, encoder: TextEncoder, preview: Preview | None = None, guide: Settings | None = None
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
    system = StableDiffusion(p, encoder, preview)
    return model.make_sampler_inputs(system, p.diffusion, p.sampler, guiding)


class StableDiffusion(System):
    """What Stable Diffusion supplies: latents of a VAE, and prompts."""

    def __init__(
        self, p: Pipeline, encoder: TextEncoder, preview: Preview | None = None, field_drop_prob: float = 0.0
    ) -> None:
        """Store the arguments, which `make_sampler_inputs` and `System` describe."""
        self.p, self.encoder, self.preview = p, encoder, preview
        self.unet, self.factor = p.unet, vae_module.factor(p.vae)
        self.fields = picture_fields.read(p.fields)
        self.field_values = picture_fields.values(self.fields, p.sampler.fields)
        self.field_drop_prob = field_drop_prob if self.fields else 0.0
        self.unit_start = p.sampler.unit_start

    def example(self):
        """Return zeros, with one token of text."""
        size = self.p.latents.image_size // self.factor
        x = jnp.zeros((1, size, size, self.unet.in_channels))
        return {"x": x, "time": jnp.zeros(1), "text": jnp.zeros((1, 1, self.encoder.width))}

    def target(self, frozen, batch, keys):
        """Return latents, drawn from the posterior with the batch's moments or those of the VAE."""
        moments = batch.get("moments")
        if moments is None:
            pixels = to_range(batch[IMAGE], self.p.latents.pixels)
            moments: Any = self.p.vae.apply(frozen["vae"], pixels, method="encode")
        return self.p.latents.to_unet(posterior_sample(keys, moments))

    def text(self, frozen, batch):
        return {"text": attended(self.p, self.encoder, frozen, batch)}  # [B, L, D]

    def dropped(self, frozen, condition):
        """Return the text that conditioning.drop_to names: zeros, or the empty text."""
        given = condition["text"]
        if self.p.conditioning.drop_to != "empty":
            return {"text": jnp.zeros_like(given)}
        tokens = {name: jnp.asarray(row) for name, row in self.encoder.tokenize([""]).items()}
        empty = attended(self.p, self.encoder, frozen, tokens)
        return {"text": jnp.broadcast_to(empty, given.shape)}

    def conditions(self, frozen, batch):
        """Return a function for each text, and UNSEEN if the UNet sees the picture to edit."""
        negatives = {k.removeprefix(NEGATIVE): v for k, v in batch.items() if k.startswith(NEGATIVE)}
        empties = [""] * len(next(iter(batch.values())))

        def empty():
            if WEIGHTS not in batch or self.encoder.tokenize_weighted is None:
                return self.encoder.tokenize(empties)
            num_chunks = batch[WEIGHTS].shape[1] // self.encoder.max_tokens
            return self.encoder.tokenize_weighted(empties, num_chunks)

        def unseen():
            shape = len(empties), *self.sample_shape(batch)
            return {**self.text(frozen, negatives), "picture": jnp.zeros(shape)}

        known = {
            guidance_kinds.COND: lambda: self.text(frozen, batch),
            guidance_kinds.NEGATIVE: lambda: self.text(frozen, negatives),
            guidance_kinds.EMPTY: lambda: {"text": attended(self.p, self.encoder, frozen, empty())},
        }
        return known | ({guidance_kinds.UNSEEN: unseen} if self.p.sees == PIX2PIX else {})

    def training_inputs(self, frozen, batch, x0, keys):
        """Return the picture with a random mask if the UNet inpaints."""
        if not self.p.sees:
            return {}
        mask = masks.random_masks(keys, *batch[IMAGE].shape[1:3])
        return {"picture": editing.seen(self.p, frozen["vae"], batch[IMAGE], mask)}

    def sampling_inputs(self, frozen, batch, keys, x0):
        """Return the picture and the mask of the batch if the UNet sees them."""
        if x0 is not None:
            return keys, self.training_inputs(frozen, batch, x0, keys)
        if not self.p.sees:
            return keys, {}
        shape = len(next(iter(batch.values()))), *self.p.output_shape
        pictures = jnp.asarray(batch.get(IMAGE, np.zeros((*shape, 3), np.uint8)))
        mask = jnp.asarray(batch.get(MASK, np.ones(pictures.shape[:3], bool)))
        return keys, {"picture": editing.seen(self.p, frozen["vae"], pictures, mask)}

    def sample_shape(self, batch):
        """Return the shape of the latents of the batch's pictures, or of the sampler's size."""
        height, width = batch[IMAGE].shape[1:3] if IMAGE in batch else self.p.output_shape
        return height // self.factor, width // self.factor, self.p.vae.latent_channels

    def decode(self, frozen, batch, x0):
        """Decode latents. With a mask, pixels that are not redrawn keep their colours."""
        z = self.p.latents.to_vae(x0)
        at_once = max(1, _PIXELS // (z.shape[1] * z.shape[2] * self.factor**2))
        to_pixels = lambda z: self.p.vae.apply(frozen["vae"], z, method="decode")
        images = vae_module.decode_in_slices(to_pixels, z, at_once)
        if MASK not in batch:
            return images
        return jnp.where(batch[MASK][..., None], images, to_range(batch[IMAGE]))

    def editor(self, frozen, batch, keys):
        return editing.editor(self.p, frozen["vae"], batch, keys)

    def wrap_denoiser(self, frozen, denoise):
        """Show the denoised latents to `preview`, if there is one."""
        if not self.preview:
            return denoise
        matrix, grey = colours(self.p, frozen["vae"])
        return programs.watched(denoise, self.preview, lambda x0: x0 @ matrix + grey)


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
    """Return `weighted_prompts` if sampler.prompt_weights is set, otherwise `prompts`."""
    return weighted_prompts if sampler.prompt_weights else prompts


def attended(p: Pipeline, encoder: TextEncoder, frozen: Any, batch: Mapping[str, Any]) -> Float[Array, "B L D"]:
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
