"""Train a Stable Diffusion model.

    python -m sd_jax.train --config=configs/sd1_512_v1_5.py --workdir=runs/sd1 \\
        --config.unet.weights=runs/sd1_2 --config.vae.weights=weights/sd-v1-5 \\
        --config.text.weights=weights/clip-vit-large-patch14 --config.data.path=shards

The VAE and the text encoder are frozen. They run inside the training step, sharded over the mesh,
and are not saved in checkpoints. Training is faster with precomputed VAE moments of the images
(--config.data.source=moments, written by python -m sd_jax.precache) and precomputed text embeddings
(--config.text.store, written by python -m diffusion_jax.precache).

Any value of the config can be changed on the command line: --config.optimizer.lr=2e-4. To shard the
model, set for example --config.mesh.fsdp=8 --config.mesh.replica=4.

The workdir receives metrics.jsonl (and tensorboard/: `tensorboard --logdir=runs`), images of
config.prompts under samples/, checkpoints/, config.json and manifest.json. If a loss or gradient is
not finite, not_finite.json reports where the first such number came from. Running the same command
again continues exactly from the last checkpoint. To change settings such as the batch size midway,
choose a new --workdir and --continue_from=RUN. On SIGTERM, SIGHUP or Ctrl-C, training saves a
checkpoint and exits with code 143, 129 or 130. A second Ctrl-C ends it at once.
"""

from typing import Any

import jax

from diffusion_jax.data import columns, sources
from diffusion_jax.data.pipeline import Batches, training_batches
from diffusion_jax.data.sources import moments
from diffusion_jax.devices import sharding
from diffusion_jax.draw.program import default_batch_size
from diffusion_jax.precache import lookup
from diffusion_jax.precache.moments import check_originals
from diffusion_jax.text import TextEncoder
from diffusion_jax.train import loop
from diffusion_jax.train.train_command import command
from diffusion_jax.weights import finetune, pretrained
from sd_jax import sampling, textual_inversion
from sd_jax import vae as vae_module
from sd_jax.settings import Settings, read_settings, uses_moments
from sd_jax.task import make_task
from sd_jax.weights.opened import read_unet, read_vae


def prepare(s: Settings, mesh: sharding.Mesh) -> loop.RunInputs:
    """Open everything that training needs: the text encoder, the VAE, the data and the model.

    Raises:
        ValueError, OSError: An input is missing or does not fit the settings.
    """
    # The text encoder, the VAE's weights and the data. Each process reads only its own rows.
    encoder = lookup.open_encoder(s.text)
    vae_params = read_vae(s.vae_weights, s.vae) if s.vae_weights else None
    batches = open_batches(s, encoder, vae_params, mesh)

    # The examples to draw during training. The prompts are tokenized even if nothing is drawn,
    # because a store of embeddings must hold the empty and the negative prompt.
    prompts, read_prompts = s.run.prompts, sampling.tokenizer(s.sampler)
    tokenize = lambda texts: read_prompts(encoder, texts, s.sampler.negative_prompt)
    most = default_batch_size(*s.pipeline.output_shape)
    examples = loop.Examples(tokenize(list(prompts)), prompts, s.sampler.guidance, most)

    def open_prompts(prompts):
        lookup.open_prompts(s.text, encoder, False, prompts)  # Raises if the store lacks a prompt.
        return tokenize

    # The model with random or given weights. Training changes all weights, only LoRA factors, or
    # only the vectors of a new word.
    read = lambda: read_unet(s.unet_weights, s.unet, s.text.width)
    task = make_task(s, encoder, vae_params)
    adapt = textual_inversion.adapt if s.text.learned_tokens else None
    task, start, base = finetune.start(task, s.lora, s.unet_weights, read, s.data.fields, adapt)
    return loop.RunInputs(task, batches, examples, start=start, base=base, open_prompts=open_prompts)


def open_batches(s: Settings, encoder: TextEncoder, vae_params: Any, mesh: sharding.Mesh) -> Batches:
    """Open the training data of a config. Each process reads only its own rows of a batch.

    Raises:
        ValueError: Moments have another size than the config requires, or were computed with
            another VAE.
    """
    shape, image = None, "image"
    if uses_moments(s.data):
        for path in [part[2] for part in s.data.mixture] or [s.data.path]:
            if identity := moments.find_identity(path):
                columns.check_identity(path, identity, encoder_identity(s, vae_params), moments.KIND)
                if jax.process_index() == 0:
                    check_originals(path)
        side = s.latents.image_size // vae_module.factor(s.vae)
        shape, image = (side, side, 2 * s.vae.latent_channels), "moments"
    pictures = sources.open_pictures(s.data, s.latents.image_size, moments=shape)
    lookup.check_captions(s.text, encoder, pictures)
    batches = training_batches(pictures, encoder.tokenize, s.run, s.data, mesh, image)
    if shape:
        batches.example()  # If the moments have another shape, raises an error before compiling.
    return batches


def encoder_identity(s: Settings, vae_params: Any) -> dict[str, Any]:
    """Return the identity of VAE moments: the settings and the VAE on which the moments depend.

    Its keys are "image_size", "scale", "pixels", "buckets" and "vae", a digest of the VAE's
    weights. Without `vae_params`, there is no "vae".
    """
    latents = s.latents
    identity = {"image_size": latents.image_size, "scale": latents.scale, "pixels": latents.pixels}
    identity["buckets"] = [list(shape) for shape in s.data.aspect_buckets] or None
    return identity | ({"vae": pretrained.digest(vae_params)} if vae_params else {})


if __name__ == "__main__":
    command(read_settings, prepare)
