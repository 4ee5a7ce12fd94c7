"""A Stable Diffusion model as a Task: diffusion in the latents of a frozen VAE."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from diffusion_jax.diffusion import noise, samplers
from diffusion_jax.machine.sharding import RULES
from diffusion_jax.task import (
    Batch,
    Measure,
    Task,
    Texts,
    kept_texts,
    loss_by_noise_level,
    normal_like,
    to_range,
    with_span,
)
from diffusion_jax.text import TextEncoder
from sd_jax import vae as vae_module
from sd_jax.sampling import attended, make_sample
from sd_jax.settings import Settings, uses_moments
from sd_jax.vae import Latents, Moments


def make_task(s: Settings, encoder: TextEncoder, vae_params: Any) -> Task:
    """Return a Task: the initialisation, loss and sampling of a Stable Diffusion model.

    A training batch holds the text encoder's tokens, and the images either as "image", uint8
    [B, H, W, 3], or as VAE moments, "moments", float [B, h, w, 2 Z]. The batches for sampling are
    those of `sampling.prompts`.

    Args:
        s: The settings of a training config.
        encoder: The text encoder, whose weights are frozen.
        vae_params: The weights of the VAE, which are also frozen. They may be None for training on
            moments without sampling.
    """
    unet, vae = s.unet, s.vae
    objective = s.diffusion.objective
    empty = encoder.tokenize([""])

    # `params` holds the network's weights and, for learned loss weights, a collection of their
    # parameters. unet.apply accepts this additional Flax collection and ignores it.
    def init(key):
        size = s.latents.image_size // vae_module.factor(vae)
        x = jnp.zeros((1, size, size, unet.in_channels))
        return objective.with_learned(
            unet.init(key, x, jnp.zeros(1), jnp.zeros((1, 1, s.text.width)))
        )

    def loss(params, frozen, batch, key):
        key_sigma, key_eps, key_drop, key_posterior, key_offset = jax.random.split(key, 5)
        x0 = posterior_sample(key_posterior, moments_of(frozen, batch)) * s.latents.scale
        keep = kept_texts(key_drop, len(x0), s.text.drop_prob)
        sigma = objective.noise.draw(key_sigma, len(x0))
        eps = objective.shifted(key_offset, normal_like(key_eps, x0))
        if objective.mean_flow:
            sigmas = sigma, objective.noise.draw(jax.random.fold_in(key_sigma, 1), len(x0))
            networks = velocity_networks(params, frozen, batch)
            minimised, losses = objective.mean_flow_loss(
                *networks, x0, eps, sigmas, keep, batch.get("counts")
            )
            return minimised, loss_by_noise_level(losses, jnp.maximum(*sigmas))

        to_empty = s.conditioning.drop_to == "empty"
        tokens = drop_to_empty(batch, empty, keep) if to_empty else batch
        text = attended(s.pipeline, encoder, frozen, tokens)
        text = text if to_empty else jnp.where(keep[:, None, None], text, 0)

        def network(x, time) -> Any:
            return unet.apply(params, x, time, text)

        minimised, losses = objective.loss(params, network, x0, eps, sigma, batch.get("counts"))
        return minimised, loss_by_noise_level(losses, sigma)

    def velocity_networks(params, frozen, batch):
        """Return MeanFlow's network, and the same network with stop_gradient on its weights."""
        text, without = attended(s.pipeline, encoder, frozen, batch), jnp.zeros(())
        if s.conditioning.drop_to == "empty":
            tokens = {name: jnp.asarray(row) for name, row in empty.items()}
            without = attended(s.pipeline, encoder, frozen, tokens)  # [1, L, D]

        def network(params, x, time, h, kept, rows) -> Any:
            context = jnp.where(kept[:, None, None], text[rows], without)
            return unet.apply(params, x, time, with_span(context, None, h)[0])

        return (
            functools.partial(network, params),
            functools.partial(network, jax.lax.stop_gradient(params)),
        )

    def errors(params, frozen, batch, keys, sigma):
        moments = moments_of(frozen, batch)
        shape = (*moments.shape[1:3], moments.shape[3] // 2)
        of_posterior = samplers.gaussian_noise(keys, shape)(jnp.zeros((), jnp.int32))
        x0 = vae_module.sample(moments, of_posterior) * s.latents.scale
        text = attended(s.pipeline, encoder, frozen, batch)

        def network(x, time) -> Any:
            h = jnp.zeros_like(time) if objective.mean_flow else None
            return unet.apply(params, x, time, with_span(text, None, h)[0])

        return objective.errors(network, x0, samplers.initial_noise(keys, shape, 1), sigma)

    def moments_of(frozen, batch) -> Any:
        if "moments" in batch:
            return batch["moments"]
        images = to_range(batch["image"], s.latents.pixels)
        return vae.apply(frozen["vae"], images, method="encode")

    frozen = {"text": encoder.frozen, "vae": vae_params}
    measure = Measure(functools.partial(noise.quantiles, objective.noise), errors)
    return Task(init, loss, make_sample(s.pipeline, encoder), frozen, RULES, measure)


def example(s: Settings, encoder: TextEncoder) -> tuple[Task, dict[str, np.ndarray]]:
    """Return a Task and a batch of one black image (or zero moments), to trace a training step.

    The Task holds the shapes of the VAE's weights instead of the weights, or None for training on
    moments. The batch holds no text; add what `encoder.tokenize` returns.
    """
    vae, side = s.vae, s.latents.image_size
    small = side // vae_module.factor(vae)
    if uses_moments(s.data):
        moments = np.zeros((1, small, small, 2 * vae.latent_channels), np.float32)
        return make_task(s, encoder, None), {"moments": moments}
    image = np.zeros((1, side, side, 3), np.uint8)
    latents = jnp.zeros((1, small, small, vae.latent_channels))
    make_vae = lambda: vae.init(jax.random.key(0), jnp.zeros(image.shape), latents)
    return make_task(s, encoder, jax.eval_shape(make_vae)), {"image": image}


def posterior_sample(key: jax.Array, moments: Moments) -> Latents:
    """Draw the latents of each image from the posterior with the given moments.

    The result is not multiplied by latents.scale.
    """
    return vae_module.sample(moments, normal_like(key, moments[..., : moments.shape[-1] // 2]))


def drop_to_empty(batch: Batch, empty: Texts, keep: Array) -> Batch:
    """Return the tokens of a batch, with the empty prompt in place of dropped texts.

    Args:
        batch: A batch that holds the tokens of texts.
        empty: The tokens of one empty prompt.
        keep: bool [B], False for each text to drop.
    """
    condition = lambda name: keep.reshape(-1, *(1,) * (batch[name].ndim - 1))
    return {name: jnp.where(condition(name), batch[name], row) for name, row in empty.items()}
