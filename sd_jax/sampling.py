"""How a Stable Diffusion model draws: from texts, or from texts and a picture, to images."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, UInt8

from diffusion_jax.diffusion import guidance, noise, precond, samplers
from diffusion_jax.diffusion.precond import Denoiser, Images
from diffusion_jax.task import Texts
from diffusion_jax.text import TextEncoder
from sd_jax import vae as vae_module
from sd_jax.settings import PRECONDS, SAMPLERS, Pipeline, Sampler

Preview = Callable[[Float[ArrayLike, "B h w 3"], Float[ArrayLike, ""]], None]
NEGATIVE = "negative_"
IMAGE = "image"
_PIXELS = 2**20  # That a device decodes at once: of its feature maps, some 2 KiB a pixel.


def make_sample(
    p: Pipeline, encoder: TextEncoder, preview: Preview | None = None
) -> Callable[..., Images]:
    """A Task's `sample`: (params, frozen, batch, a key an image, guidance) to images.

    `frozen` holds the weights of "text" and "vae", `batch` what `prompts` returns, and, of
    image-to-image, "image" [B, H, W, 3] of uint8: noise is put on it that the last
    p.strength of the steps take off again. `preview` is called on the host at each evaluation of
    the denoiser with sketches of what it sees, as large as latents, and the noise level.
    """
    unet, vae, table = p.unet, p.vae, noise.scaled_linear()
    scalings = PRECONDS[p.diffusion.predicts](table)
    sigmas = sampling_sigmas(p.sampler)[p.sampler.steps - p.steps_taken :]
    sampler = SAMPLERS[p.sampler.name][0](p.sampler)

    def start(frozen, batch, keys):
        if IMAGE not in batch:
            height, width = (side // vae_module.factor(vae) for side in p.output_shape)
            shape = (height, width, unet.in_channels)
            # At its first time a latent of LDM is N(0, 1), whatever is left of an image there.
            return samplers.initial_noise(keys, shape, jnp.sqrt(1 + sigmas[0] ** 2))
        pixels = to_pixels(batch[IMAGE], p.latents.pixels)
        moments: Any = vae.apply(frozen["vae"], pixels, method="encode")
        z = p.latents.scale * vae_module.mean_and_std(moments)[0]
        return z + samplers.initial_noise(keys, _size(z), sigmas[0])

    def sample(params, frozen, batch, keys, scale):
        text = attended(p, encoder, frozen, batch)
        if scale is not None:  # Rows 2i with the prompt, 2i + 1 with the negative one.
            negatives = {k.removeprefix(NEGATIVE): v for k, v in batch.items()
                         if k.startswith(NEGATIVE)}  # fmt: skip
            text = jnp.stack([text, attended(p, encoder, frozen, negatives)], axis=1)
            text = text.reshape(-1, *text.shape[2:])

        def network(x, time) -> Any:
            return unet.apply(params, x, time, text)

        denoise = precond.denoiser(network, scalings)
        if scale is not None:
            denoise = guidance.classifier_free(denoise, scale)
        if preview is not None:
            denoise = sketched(denoise, preview, *colours(p, frozen["vae"]))
        x = start(frozen, batch, keys)
        x = sampler(denoise, x, sigmas, samplers.gaussian_noise(keys, _size(x)))
        z = samplers.in_own_coordinates(x, sigmas[-1]) / p.latents.scale
        at_once = max(1, _PIXELS // (z.shape[1] * z.shape[2] * vae_module.factor(vae) ** 2))
        decode = lambda z: vae.apply(frozen["vae"], z, method="decode")
        return vae_module.decode_in_slices(decode, z, at_once)

    return sample


def _size(images: Images) -> tuple[int, int, int]:
    _, height, width, channels = images.shape
    return height, width, channels


def prompts(encoder: TextEncoder, texts: Sequence[str], negative: str | Sequence[str]) -> Texts:
    """What a model draws from: the tokens of texts, and of the negative prompts of all or each."""
    negatives = [negative] * len(texts) if isinstance(negative, str) else negative
    tokens = encoder.tokenize(negatives)
    return {**encoder.tokenize(texts), **{NEGATIVE + k: v for k, v in tokens.items()}}


def attended(
    p: Pipeline, encoder: TextEncoder, frozen: Any, batch: Mapping[str, Any]
) -> Float[Array, "B L D"]:
    """What the UNet attends to: the encoded texts, and vectors of 0 up to conditioning.pad_to."""
    text = encoder.encode(frozen["text"], dict(batch))[0]
    more = max(0, p.conditioning.pad_to - text.shape[1])
    return jnp.pad(text, ((0, 0), (0, more), (0, 0)))


def sketched(
    denoise: Denoiser, preview: Preview, matrix: Float[Array, "Z 3"], grey: Float[Array, "3"]
) -> Denoiser:
    """The same denoiser, which shows what it finds in the colours of `matrix` and `grey`."""

    def shown(x, sigma):
        x0 = denoise(x, sigma)
        jax.debug.callback(preview, x0 @ matrix + grey, sigma[0])
        return x0

    return shown


def colours(p: Pipeline, vae_params: Any) -> tuple[Float[Array, "Z 3"], Float[Array, "3"]]:
    """What the VAE makes of each channel of flat latents, to first order, and of 0."""
    z = p.vae.latent_channels
    flat = jnp.concatenate([jnp.eye(z), -jnp.eye(z), jnp.zeros((1, z))]) / p.latents.scale
    latents = jnp.broadcast_to(flat[:, None, None], (len(flat), 4, 4, z))
    images: Any = p.vae.apply(vae_params, latents, method="decode")
    means = images.mean((1, 2))  # [2 Z + 1, 3]
    return (means[:z] - means[z:-1]) / 2, means[-1]


def to_pixels(images: UInt8[ArrayLike, "B H W C"], pixels: str) -> Float[Array, "B H W C"]:
    """0 ... 255 to [-1, 1], or to [0, 1] where `pixels` is "unit"."""
    unit = jnp.asarray(images, jnp.float32) / 255
    return unit if pixels == "unit" else 2 * unit - 1


def sampling_sigmas(sampler: Sampler) -> Float[Array, "{sampler.steps}+1"]:
    """The levels of a sampler's times, and at last that of time 0."""
    times = SAMPLERS[sampler.name][1](sampler.steps)
    return noise.sigma_at(noise.scaled_linear(), jnp.asarray(times))
