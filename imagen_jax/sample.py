"""Draws images with a trained Imagen model.

    python -m imagen_jax.sample --workdir=runs/quickstart --prompt="a red seven on gray paper" \\
        --num_images=8 --out=pictures

Give --prompt several times, or a file with one prompt a line as --prompts. A model that was trained
on precomputed embeddings takes --embeddings=FILE (.npy, .npz or .safetensors, one text each).

--out gets a PNG for each image, sheet.png with all of them and their captions, and metadata.jsonl
with what is needed to draw an image again. Image n of the command has seed --seed + n, and depends
on its seed and prompt alone: --seed=5 --num_images=1 draws the sixth image of --seed=0 again.
"""

import json
import pathlib
import time
from collections.abc import Sequence

import numpy as np
from absl import app, flags, logging

from diffusion_jax import cli, drawing, files, sheets
from diffusion_jax.log import clock
from diffusion_jax.text import precomputed
from imagen_jax.trained import Model, load_model

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a training run.", required=True)
_OUT = flags.DEFINE_string("out", None, "The folder to write to; made if need be.", required=True)
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A text to draw; may be repeated.")
_PROMPTS = flags.DEFINE_string("prompts", None, "A file with one text a line.")
_EMBEDDINGS = flags.DEFINE_multi_string("embeddings", [], "A file with one embedded text.")
_NUM_IMAGES = flags.DEFINE_integer("num_images", 1, "Images for each text.", lower_bound=1)
_GUIDANCE = flags.DEFINE_float("guidance", None, "Guidance scale; default: the config's.")
_STEPS = flags.DEFINE_integer(
    "steps", None, "Sampling steps; default: the config's.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "The seed of the first image.", lower_bound=0)
_EMA = flags.DEFINE_string("ema", "ema", 'A decay such as 0.9999, "ema" for the largest, or "raw".')
_STEP = flags.DEFINE_integer("checkpoint", None, "A step that was saved; default: the last.")
_BATCH = flags.DEFINE_integer("batch_size", 64, "Images drawn at once.", lower_bound=1)


def main(argv: list[str]) -> None:
    """Reads the texts, loads the model, draws."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: write --prompt={argv[1]!r}")
    cli.start()
    with cli.bad_input():
        model = load_model(_WORKDIR.value, _EMA.value, _STEP.value, _STEPS.value)
        captions, texts = _texts(model)
        out = pathlib.Path(_OUT.value)
        out.mkdir(parents=True, exist_ok=True)
    scale = model.settings.sampler.guidance if _GUIDANCE.value is None else _GUIDANCE.value
    rows = [i for i in range(len(captions)) for _ in range(_NUM_IMAGES.value)]
    seeds = [_SEED.value + n for n in range(len(rows))]
    batch = {name: array[rows] for name, array in texts.items()}
    guidance = None if scale == 1 else np.full(len(rows), scale, np.float32)
    size = min(_BATCH.value, len(rows))
    start, images = time.time(), []
    for part in drawing.in_batches(model.draw, model.params, batch, seeds, guidance, size):
        images.extend(part)
        rate = len(images) / (time.time() - start)
        left = clock((len(rows) - len(images)) / rate)
        logging.info("%d/%d images | %.1f images/s | %s left", len(images), len(rows), rate, left)
    _write(out, images, [captions[i] for i in rows], seeds, scale, model)


def _texts(model: Model) -> tuple[list[str], dict[str, np.ndarray]]:
    """Captions and their tokens or embeddings."""
    prompts = list(_PROMPT.value)
    if _PROMPTS.value:
        prompts += [p for p in pathlib.Path(_PROMPTS.value).read_text().splitlines() if p.strip()]
    needs_embeddings = model.encoder.name == "precomputed"
    given = _EMBEDDINGS.value if needs_embeddings else prompts
    if not given or (prompts and needs_embeddings):
        flag = "--embeddings=FILE" if needs_embeddings else "--prompt=TEXT or --prompts=FILE"
        raise ValueError(f"the text encoder {model.encoder.name!r} needs {flag}")
    if not needs_embeddings:
        return prompts, model.encoder.tokenize(prompts)
    arrays = [precomputed.read(pathlib.Path(f).read_bytes(), f) for f in given]
    return [pathlib.Path(f).stem for f in given], model.encoder.tokenize(arrays)


def _write(
    out: pathlib.Path,
    images: Sequence[np.ndarray],
    captions: Sequence[str],
    seeds: Sequence[int],
    guidance: float,
    model: Model,
) -> None:
    lines = []
    for image, caption, seed in zip(images, captions, seeds, strict=True):
        name = f"seed_{seed:06}.png"
        sheets.write_png(out / name, image)
        line = {"file_name": name, "text": caption, "seed": seed, "guidance": guidance}
        line |= {"steps": model.settings.sampler.steps, "sampler": model.settings.sampler.name}
        line |= {"checkpoint": model.step, "ema": _EMA.value, "workdir": _WORKDIR.value}
        lines.append(json.dumps(line) + "\n")
    files.write_whole(out / "metadata.jsonl", "".join(lines))
    sheets.write_png(out / "sheet.png", sheets.contact_sheet(np.stack(images), captions))
    logging.info("wrote %d images, sheet.png and metadata.jsonl to %s", len(images), out)


if __name__ == "__main__":
    cli.run(main)
