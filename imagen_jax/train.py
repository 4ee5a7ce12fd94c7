"""Trains an Imagen model.

    python -m imagen_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

Change any value of the config on the command line: --config.optimizer.lr=2e-4
--config.data.path=photos. A sharded run is --config.mesh.fsdp=8 --config.mesh.replica=4.

The workdir gets metrics.jsonl (and TensorBoard events where TensorFlow is installed), pictures of
config.prompts under samples/, checkpoints/, config.json and manifest.json. The same command again
continues after the last checkpoint, exactly; SIGTERM saves and exits with 143.
"""

import pathlib
import sys

import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags

from diffusion_jax import cli, distributed, drawing, loop, settings, sharding, sheets
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.data.pictures import Filters, open_pictures
from diffusion_jax.data.pipeline import Batches, local_rows, make_batches
from diffusion_jax.metrics import scorers
from diffusion_jax.text import TextEncoder
from imagen_jax import super_resolution, task
from imagen_jax.task import Settings

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file in configs/.", lock_config=True)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "The folder of this run; made if need be.", required=True
)


def main(argv: list[str]) -> None:
    """Checks everything, then trains."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
    cli.start()
    workdir = pathlib.Path(_WORKDIR.value)
    with cli.bad_input():
        s = task.read_settings(_CONFIG.value.to_dict())
        mesh = sharding.make_mesh(*s.mesh)
        sharding.check_batch(s.run.batch_size, s.optimizer.accumulate, mesh)
        encoder = task.text_encoder(s.text)
        batches = open_batches(s, encoder, mesh)
        examples = _examples(s, encoder, batches)
        evaluation = _evaluation(s, encoder)
        settings.claim(workdir, _CONFIG.value)
    imagen = task.make_task(s, encoder)
    config = _CONFIG.value.to_dict()
    with batches:
        state = loop.train(
            imagen, s.run, s.optimizer, mesh, batches, examples, workdir, config, evaluation
        )
    if int(state.step) < s.run.steps:
        logging.info("stopped by SIGTERM at step %d; the same command continues", int(state.step))
        sys.exit(distributed.PREEMPTED)
    logging.info("done: %s", workdir)


def open_batches(s: Settings, encoder: TextEncoder, mesh: sharding.Mesh) -> Batches:
    """The training data of a config, this process's rows of it."""
    filters = Filters(s.data.min_size, s.data.max_aspect, s.data.min_chars, s.data.max_broken)
    pictures = open_pictures(
        s.data.source,
        size=s.unet.image_size,
        path=s.data.path,
        text=s.data.text,
        uncaptioned=s.data.uncaptioned,
        resize=s.data.resize,
        filters=filters,
        mixture=s.data.mixture,
        embeddings=(s.text.max_tokens, s.text.width) if s.text.encoder == "precomputed" else None,
    )
    process, processes = local_rows(sharding.batch_sharding(mesh), s.run.batch_size)
    return make_batches(
        pictures,
        encoder.tokenize,
        batch_size=s.run.batch_size,
        seed=s.run.seed,
        process_index=process,
        process_count=processes,
        num_threads=s.data.threads,
        crop=s.data.crop,
        flip=s.data.flip,
    )


def _examples(s: Settings, encoder: TextEncoder, batches: Batches) -> loop.Examples:
    """The config's prompts; of the first pictures, where those are needed to draw."""
    if s.text.encoder != "precomputed" and s.super_resolution.factor == 1:
        texts, captions = encoder.tokenize(s.run.prompts), s.run.prompts
        return loop.Examples(texts, captions, s.sampler.guidance)
    first = np.arange(min(8, len(batches.pictures)))
    images, texts = batches.pictures.read(first)
    batch = encoder.tokenize(texts)
    if s.super_resolution.factor > 1:
        large = task.to_unit_range(images)
        batch["low_res"] = np.asarray(super_resolution.shrink(large, s.super_resolution.factor))
    captions = [t if isinstance(t, str) else f"text of picture {i}" for i, t in enumerate(texts)]
    return loop.Examples(batch, tuple(captions), s.sampler.guidance)


def _evaluation(s: Settings, encoder: TextEncoder) -> loop.Evaluation | None:
    """What config.evaluation asks for: what imagen_jax.evaluate scores, on the way."""
    asked = s.evaluation
    if not asked.every:
        return None
    prompts = prompt_files.read(asked.prompts, asked.num_prompts) if asked.prompts else []
    scorer = scorers.make(
        s.data.source, s.output_size, prompts, asked.reference, asked.inception, asked.clip
    )

    def score(draw, params):
        def images(prompts, seeds, scale):
            scales = np.full(len(seeds), scale, np.float32)
            batch = encoder.tokenize(list(prompts))
            parts = drawing.in_batches(draw, params, batch, list(seeds), scales, 64)
            return sheets.to_uint8(np.concatenate(list(parts)))

        return scorers.score_now(scorer, images, asked.guidance)

    return loop.Evaluation(asked.every, score)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.run(main)
