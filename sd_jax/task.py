"""A Stable Diffusion model as a Task: diffusion in the latents of a frozen VAE."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax import model
from diffusion_jax.task import Task
from diffusion_jax.text import TextEncoder
from sd_jax import textual_inversion
from sd_jax import vae as vae_module
from sd_jax.sampling import StableDiffusion
from sd_jax.settings import Settings, uses_moments


def make_task(s: Settings, encoder: TextEncoder, vae_params: Any) -> Task:
    """Return a Task: the initialisation, loss and sampling of a Stable Diffusion model.

    A training batch holds the text encoder's tokens, and the images either as "image", uint8
    [B, H, W, 3], or as VAE moments, "moments", float [B, h, w, 2 Z]. `sampling.prompts` makes
    the batches for sampling.

    Args:
        s: The settings of a training config.
        encoder: The text encoder, whose weights are frozen.
        vae_params: The weights of the VAE, which are also frozen. They may be None for training on
            moments without sampling.
    """
    system = StableDiffusion(s.pipeline, encoder, field_drop_prob=s.data.fields_drop_prob)
    frozen = {"text": encoder.frozen, "vae": vae_params}
    task = model.make_task(system, s.diffusion, s.sampler, s.text.drop_prob, frozen)

    def shown(frozen, batch):  # The images that the VAE decodes from the means of the moments.
        mean, _ = vae_module.mean_and_std(batch["moments"])
        images: Any = s.vae.apply(frozen["vae"], mean, method="decode")
        return images if s.latents.pixels == "symmetric" else 2 * images - 1

    return task if vae_params is None else task._replace(shown=shown)


def example(s: Settings, encoder: TextEncoder) -> tuple[Task, dict[str, np.ndarray]]:
    """Return a Task and a batch of one black image (or zero moments), to trace a training step.

    The Task holds the shapes of the VAE's weights instead of the weights, or None for training on
    moments. The batch holds no text; add what `encoder.tokenize` returns.
    """
    vae, side = s.vae, s.latents.image_size
    small = side // vae_module.factor(vae)

    def traced(vae_params):
        task = make_task(s, encoder, vae_params)
        if not s.text.learned_tokens:
            return task
        return textual_inversion.adapt(task, jax.eval_shape(task.init, jax.random.key(0)))

    if uses_moments(s.data):
        moments = np.zeros((1, small, small, 2 * vae.latent_channels), np.float32)
        return traced(None), {"moments": moments}
    image = np.zeros((1, side, side, 3), np.uint8)
    latents = jnp.zeros((1, small, small, vae.latent_channels))
    make_vae = lambda: vae.init(jax.random.key(0), jnp.zeros(image.shape), latents)
    return traced(jax.eval_shape(make_vae)), {"image": image}
