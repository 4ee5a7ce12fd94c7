"""Trains an Imagen model.

    python -m imagen_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

Change any value of the config on the command line: --config.optimizer.lr=2e-4
--config.data.path=photos. A sharded run is --config.mesh.fsdp=8 --config.mesh.replica=4.

The workdir gets metrics.jsonl (and tensorboard/: `tensorboard --logdir=runs`), pictures of
config.prompts under samples/, checkpoints/, config.json and manifest.json; not_finite.json says
where the first loss or gradient that is not finite came from. The same command again continues
after the last checkpoint, exactly; SIGTERM saves and exits with 143.
"""

import functools

import numpy as np

from diffusion_jax import finetune, heldout
from diffusion_jax.data import sources
from diffusion_jax.data.pipeline import Batches, training_batches
from diffusion_jax.evaluate import on_the_way
from diffusion_jax.machine import sharding
from diffusion_jax.precache import lookup
from diffusion_jax.task import to_range
from diffusion_jax.text import TextEncoder
from diffusion_jax.train import loop
from diffusion_jax.train.command import command
from imagen_jax import super_resolution, task
from imagen_jax.settings import Settings, read_settings
from imagen_jax.weights.initial import read_unet


def prepare(s: Settings, mesh: sharding.Mesh) -> loop.Inputs:
    """Opens text encoder, data and evaluation; ValueError or OSError if they cannot be."""
    encoder = lookup.open_encoder(s.text, s.data.embedded)
    batches = open_batches(s, encoder, mesh)
    examples = _examples(s, encoder, batches)
    evaluation = on_the_way.open_evaluation(
        s.evaluation, s.data.source, s.output_size, _open_prompts(s, encoder)
    )
    imagen, read = task.make_task(s, encoder), lambda: read_unet(s.unet_weights, s)
    imagen, start, base = finetune.begin(imagen, s.lora, s.unet_weights, read)
    records = heldout.open_records(s.heldout, batches, imagen.measure)
    return loop.Inputs(imagen, batches, examples, evaluation, start, records, base)


def open_batches(s: Settings, encoder: TextEncoder, mesh: sharding.Mesh) -> Batches:
    """The training data of a config, this process's rows of it."""
    shape = (s.text.max_tokens, s.text.width) if s.data.embedded else None
    pictures = sources.open_pictures(s.data, s.unet.image_size, embeddings=shape)
    return training_batches(pictures, encoder.tokenize, s.run, s.data, mesh)


def _examples(s: Settings, encoder: TextEncoder, batches: Batches) -> loop.Examples:
    """The config's prompts; the texts of the first pictures, where those are needed to draw.

    They are as well where only embeddings are at hand, and no encoder for the prompts.
    """
    readable = not s.data.embedded or (s.run.prompts and s.text.weights)
    if readable and s.super_resolution.factor == 1:
        texts = _open_prompts(s, encoder)(s.run.prompts)(s.run.prompts)
        return loop.Examples(texts, s.run.prompts, s.sampler.guidance)
    first = np.arange(min(8, len(batches.pictures)))
    images, texts = batches.pictures.read(first)
    batch = encoder.tokenize(texts)
    if s.super_resolution.factor > 1:
        large = to_range(images)
        batch["low_res"] = np.asarray(super_resolution.shrink(large, s.super_resolution.factor))
    captions = [t if isinstance(t, str) else f"text of picture {i}" for i, t in enumerate(texts)]
    return loop.Examples(batch, tuple(captions), s.sampler.guidance)


def _open_prompts(s: Settings, encoder: TextEncoder) -> on_the_way.OpenPrompts:
    return functools.partial(lookup.open_prompts, s.text, encoder, s.data.embedded)


if __name__ == "__main__":
    command(read_settings, prepare)
