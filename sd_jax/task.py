"""A Stable Diffusion model as a Task: diffusion in the latents of a frozen VAE."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from diffusion_jax.diffusion import precond
from diffusion_jax.diffusion.precond import Sigma
from diffusion_jax.machine.sharding import RULES
from diffusion_jax.task import (
    Batch,
    Task,
    Texts,
    kept_texts,
    loss_by_noise_level,
    normal_like,
    to_range,
)
from diffusion_jax.text import TextEncoder
from sd_jax import vae as vae_module
from sd_jax.sampling import attended, make_sample, noise_of
from sd_jax.settings import Diffusion, Settings, uses_moments
from sd_jax.vae import Latents, Moments


def make_task(s: Settings, encoder: TextEncoder, vae_params: Any) -> Task:
    """Init, loss and sampler of a model; the weights of text encoder and VAE are its frozen ones.

    A batch for training has what `encoder` tokenizes and "image", uint8, or "moments", float
    [B, h, w, 2 Z]; one for sampling is sampling.prompts. `vae_params` may be None for a task that
    is trained on moments and draws nothing.
    """
    unet, vae, levels = s.unet, s.vae, noise_of(s.diffusion)
    scalings = precond.PRECONDS[s.diffusion.predicts](s.diffusion, levels.time)
    empty = encoder.tokenize([""])

    def init(key):
        size = s.latents.image_size // vae_module.factor(vae)
        x = jnp.zeros((1, size, size, unet.in_channels))
        return unet.init(key, x, jnp.zeros(1), jnp.zeros((1, 1, s.text.width)))

    def loss(params, frozen, batch, key):
        key_sigma, key_eps, key_drop, key_posterior, key_offset = jax.random.split(key, 5)
        x0 = posterior_sample(key_posterior, moments_of(frozen, batch)) * s.latents.scale
        keep = kept_texts(key_drop, len(x0), s.text.drop_prob)
        to_empty = s.conditioning.drop_to == "empty"
        tokens = drop_to_empty(batch, empty, keep) if to_empty else batch
        text = attended(s.pipeline, encoder, frozen, tokens)
        text = text if to_empty else jnp.where(keep[:, None, None], text, 0)
        sigma = levels.draw(key_sigma, len(x0))
        eps = with_offset(key_offset, normal_like(key_eps, x0), s.diffusion.offset_noise)

        def network(x, time) -> Any:
            return unet.apply(params, x, time, text)

        per_image = precond.loss(network, scalings, x0, eps, sigma)
        mean = (per_image * loss_weight(s.diffusion, sigma)).mean()
        return mean, loss_by_noise_level(per_image, sigma)

    def moments_of(frozen, batch) -> Any:
        if "moments" in batch:
            return batch["moments"]
        images = to_range(batch["image"], s.latents.pixels)
        return vae.apply(frozen["vae"], images, method="encode")

    frozen = {"text": encoder.frozen, "vae": vae_params}
    return Task(init, loss, make_sample(s.pipeline, encoder), frozen, RULES)


def example(s: Settings, encoder: TextEncoder) -> tuple[Task, dict[str, np.ndarray]]:
    """The task, with shapes in place of the VAE's weights, and a batch of one without its text."""
    vae, side = s.vae, s.latents.image_size
    small = side // vae_module.factor(vae)
    if uses_moments(s.data):
        moments = np.zeros((1, small, small, 2 * vae.latent_channels), np.float32)
        return make_task(s, encoder, None), {"moments": moments}
    image = np.zeros((1, side, side, vae.image_channels), np.uint8)
    latents = jnp.zeros((1, small, small, vae.latent_channels))
    make_vae = lambda: vae.init(jax.random.key(0), jnp.zeros(image.shape), latents)
    return make_task(s, encoder, jax.eval_shape(make_vae)), {"image": image}


def posterior_sample(key: jax.Array, moments: Moments) -> Latents:
    """A draw from the posterior of each image, not scaled."""
    return vae_module.sample(moments, normal_like(key, moments[..., : moments.shape[-1] // 2]))


def drop_to_empty(batch: Batch, empty: Texts, keep: Array) -> Batch:
    """The tokens of the empty prompt in place of those of the rows that are not kept."""
    where = lambda name: keep.reshape(-1, *(1,) * (batch[name].ndim - 1))
    return {name: jnp.where(where(name), batch[name], row) for name, row in empty.items()}


def with_offset(
    key: jax.Array, eps: Float[Array, "B H W C"], offset: float
) -> Float[Array, "B H W C"]:
    """eps, each channel of each image shifted by `offset` times a standard normal number."""
    if not offset:
        return eps
    return eps + offset * jax.random.normal(key, (len(eps), 1, 1, eps.shape[-1]))


def loss_weight(diffusion: Diffusion, sigma: Sigma) -> Sigma:
    """Min-SNR weights (Hang et al. 2023): min(snr, gamma) / snr for eps, / (snr + 1) for v."""
    if not diffusion.min_snr:
        return jnp.ones_like(sigma)
    snr = 1 / sigma**2
    return jnp.minimum(snr, diffusion.min_snr) / (snr + (diffusion.predicts == "v"))
