"""Trains a Stable Diffusion model.

    python -m sd_jax.train --config=configs/sd1_512_v1_5.py --workdir=runs/sd1 \\
        --config.unet.weights=runs/sd1_2 --config.vae.weights=weights/sd-v1-5 \\
        --config.text.weights=weights/clip-vit-large-patch14 --config.data.path=shards

The VAE and the text encoder are frozen: they run in the step, spread over the mesh, and are in no
checkpoint. Faster on --config.data.source=moments, made once by python -m sd_jax.precache, and with
--config.text.store, made by python -m diffusion_jax.precache.

Change any value of the config on the command line: --config.optimizer.lr=2e-4. A sharded run is
--config.mesh.fsdp=8 --config.mesh.replica=4.

The workdir gets metrics.jsonl (and tensorboard/: `tensorboard --logdir=runs`), pictures of
config.prompts under samples/, checkpoints/, config.json and manifest.json; not_finite.json says
where the first loss or gradient that is not finite came from. The same command again continues
after the last checkpoint, exactly; SIGTERM saves and exits with 143.
"""

from typing import Any

import numpy as np

from diffusion_jax import finetune
from diffusion_jax.data import sources
from diffusion_jax.data.pipeline import Batches, training_batches
from diffusion_jax.data.sources import moments
from diffusion_jax.machine import sharding
from diffusion_jax.precache import lookup
from diffusion_jax.text import TextEncoder
from diffusion_jax.train import loop
from diffusion_jax.train.command import command
from diffusion_jax.weights import pretrained
from sd_jax import sampling, task
from sd_jax import vae as vae_module
from sd_jax.settings import Settings, read_settings, uses_moments
from sd_jax.weights.initial import read_unet, read_vae


def prepare(s: Settings, mesh: sharding.Mesh) -> loop.Inputs:
    """Opens encoder, VAE, data and evaluation; ValueError or OSError if they cannot be."""
    encoder = lookup.open_encoder(s.text)
    vae_params = read_vae(s.vae_weights, s.vae) if s.vae_weights else None
    batches = open_batches(s, encoder, vae_params, mesh)
    tokenize = lambda texts: sampling.prompts(encoder, texts, s.sampler.negative_prompt)
    # Also where nothing is drawn: a store of embeddings must hold what training needs.
    examples = loop.Examples(tokenize(list(s.run.prompts)), s.run.prompts, s.sampler.guidance)

    def open_prompts(prompts):
        lookup.open_prompts(s.text, encoder, False, prompts)  # They are in a store of embeddings.
        return tokenize

    read = lambda: read_unet(s.unet_weights, s.unet, s.text.width)
    sd = task.make_task(s, encoder, vae_params)
    sd, start, base = finetune.begin(sd, s.lora, s.unet_weights, read)
    return loop.Inputs(sd, batches, examples, start=start, base=base, open_prompts=open_prompts)


def open_batches(
    s: Settings, encoder: TextEncoder, vae_params: Any, mesh: sharding.Mesh
) -> Batches:
    """The training data of a config, this process's rows of it.

    ValueError for moments of another size, or, where they have a manifest, of another VAE.
    """
    latent = uses_moments(s.data)
    side = s.latents.image_size // vae_module.factor(s.vae)
    shape = (side, side, 2 * s.vae.latent_channels) if latent else None
    if latent:
        paths = [part[2] for part in s.data.mixture] or [s.data.path]
        for path in paths:
            moments.check_manifest(path, made_by(s, vae_params))
    pictures = sources.open_pictures(s.data, s.latents.image_size, moments=shape)
    if latent:
        pictures.read(np.arange(1))  # Of another shape they are an error here, not after compiling.
    name = "moments" if latent else "image"
    return training_batches(pictures, encoder.tokenize, s.run, s.data, mesh, name)


def made_by(s: Settings, vae_params: Any) -> dict[str, Any]:
    """The settings and the digest of the VAE that moments depend on, for their manifest."""
    identity = {"image_size": s.latents.image_size, "scale": s.latents.scale,
                "pixels": s.latents.pixels}  # fmt: skip
    return identity | ({"vae": pretrained.digest(vae_params)} if vae_params else {})


if __name__ == "__main__":
    command(read_settings, prepare)
