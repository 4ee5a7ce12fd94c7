"""Train an Imagen model.

    python -m imagen_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

Any value of the config can be changed on the command line: --config.optimizer.lr=2e-4
--config.data.path=photos. To shard the model, set for example --config.mesh.fsdp=8
--config.mesh.replica=4.

The workdir receives metrics.jsonl (and tensorboard/: `tensorboard --logdir=runs`), pictures of
config.prompts under samples/, checkpoints/, config.json and manifest.json. If a loss or gradient is
not finite, not_finite.json reports where the first such number came from. Running the same command
again continues exactly from the last checkpoint. To change settings such as the batch size midway,
choose a new --workdir and --continue_from=RUN. On SIGTERM, SIGHUP or Ctrl-C, training saves a
checkpoint and exits with code 143, 129 or 130. A second Ctrl-C ends it at once.
"""

import functools
from typing import Any

import numpy as np

from diffusion_jax.data import captions, sources
from diffusion_jax.data.pipeline import Batches, training_batches
from diffusion_jax.devices import sharding
from diffusion_jax.draw.program import default_batch_size
from diffusion_jax.precache import lookup
from diffusion_jax.task import to_range
from diffusion_jax.text import TextEncoder
from diffusion_jax.train import loop
from diffusion_jax.train.train_command import command
from diffusion_jax.weights import finetune
from imagen_jax import super_resolution
from imagen_jax.settings import Settings, read_settings
from imagen_jax.task import make_task

_SHOWN = 8  # The number of training pictures whose texts are drawn if prompts cannot be drawn.


def prepare(s: Settings, mesh: sharding.Mesh) -> loop.RunInputs:
    """Open everything that training needs: the text encoder, the data and the model.

    Raises ValueError or OSError if one of them is missing or invalid.
    """
    # The text encoder. If the data hold its outputs (`embedded`), its weights are not read.
    encoder = lookup.open_encoder(s.text, s.data.embedded)

    # The data, and the examples to draw during training.
    batches = open_batches(s, encoder, mesh)
    examples = _examples(s, encoder, batches)

    # The model, with random or given weights; training changes all of them or only a LoRA.
    read = lambda: _read_weights(s)
    task = make_task(s, encoder)
    task, start, base = finetune.start(task, s.lora, s.unet_weights, read, s.data.fields)
    open_prompts = _open_prompts(s, encoder)
    return loop.RunInputs(task, batches, examples, start=start, base=base, open_prompts=open_prompts)


def open_batches(s: Settings, encoder: TextEncoder, mesh: sharding.Mesh) -> Batches:
    """Open the training data of a config. Each batch holds only the rows of this process."""
    shape = (s.text.max_tokens, s.text.width) if s.data.embedded else None
    pictures = sources.open_pictures(s.data, s.unet.image_size, embeddings=shape)
    lookup.check_captions(s.text, encoder, pictures)
    return training_batches(pictures, encoder.tokenize, s.run, s.data, mesh)


def _examples(s: Settings, encoder: TextEncoder, batches: Batches) -> loop.Examples:
    """Return the texts to draw during training: the config's prompts, or texts of the data.

    The texts of the first training pictures replace the prompts in two cases: for a
    super-resolution model, which also needs small images, made by shrinking these pictures; and for
    a run on stored embeddings that has no prompts or no text encoder for them.
    """
    factor, prompts = s.super_resolution.factor, s.run.prompts
    most = default_batch_size(*s.output_shape)
    if factor == 1 and (not s.data.embedded or (prompts and s.text.weights)):
        texts = _open_prompts(s, encoder)(prompts)(prompts)
        return loop.Examples(texts, prompts, s.sampler.guidance, most)
    images, texts = batches.pictures.read(np.arange(min(_SHOWN, len(batches.pictures))))
    texts = [captions.first(text) for text in texts]
    batch = encoder.tokenize(texts)
    if factor > 1:
        batch["low_res"] = np.asarray(super_resolution.shrink(to_range(images), factor))
    labels = [t if isinstance(t, str) else f"text of picture {i}" for i, t in enumerate(texts)]
    return loop.Examples(batch, tuple(labels), s.sampler.guidance, most)


def _open_prompts(s: Settings, encoder: TextEncoder) -> loop.OpenPrompts:
    return functools.partial(lookup.open_prompts, s.text, encoder, s.data.embedded)


def _read_weights(s: Settings) -> Any:
    # Imported here because runs with random initial weights need no readers of checkpoints.
    from imagen_jax.weights import initial

    if s.lora.rank:
        initial.check_prediction(s.unet_weights, s.diffusion.predicts)
    return initial.read_unet(s.unet_weights, s.unet, s.text.width)


if __name__ == "__main__":
    command(read_settings, prepare)
