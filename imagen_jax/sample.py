"""Draws images with a trained Imagen model, or with several in a row.

    python -m imagen_jax.sample --workdir=runs/quickstart --prompt="a red seven on gray paper" \\
        --num_images=8 --out=pictures

A cascade names its models in the order in which they draw, each with its own settings or all with
one; what is left out is the config's:

    python -m imagen_jax.sample --workdir=runs/base64 --workdir=runs/sr256 --guidance=7.5,8 \\
        --steps=30,20 --prompts=captions.txt --out=pictures

Give --prompt several times, or a file with one prompt a line as --prompts. A model that was trained
on precomputed embeddings takes --embeddings=FILE (.npy, .npz or .safetensors, one text each). A
super-resolution model named first enlarges the pictures of --low_res, one for each text.

--out gets a PNG for each image, sheet.png with all of them and their captions, and metadata.jsonl
with what is needed to draw an image again. Image n of the command has seed --seed + n, and depends
on its seed and prompt alone: --seed=5 --num_images=1 draws the sixth image of --seed=0 again.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags
from PIL import Image

from diffusion_jax import cli
from diffusion_jax.data import embeddings
from diffusion_jax.draw import gallery
from diffusion_jax.machine import progress, sheets
from diffusion_jax.task import Texts
from imagen_jax import cascade
from imagen_jax.trained import Choice, Model

_WORKDIR = flags.DEFINE_multi_string(
    "workdir", None, "The folder of a training run; repeated for a cascade.", required=True
)
_OUT = flags.DEFINE_string("out", None, "The folder to write to; made if need be.", required=True)
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A text to draw; may be repeated.")
_PROMPTS = flags.DEFINE_string("prompts", None, "A file with one text a line.")
_EMBEDDINGS = flags.DEFINE_multi_string("embeddings", [], "A file with one embedded text.")
_LOW_RES = flags.DEFINE_multi_string("low_res", [], "A picture to enlarge; one for each text.")
_NUM_IMAGES = flags.DEFINE_integer("num_images", 1, "Images for each text.", lower_bound=1)
_SEED = flags.DEFINE_integer(
    "seed", 0, "The seed of the first image.", lower_bound=0, upper_bound=2**31 - 1
)
_ALL_SIZES = flags.DEFINE_bool("all_sizes", False, "Also write what the earlier stages drew.")
_GUIDANCE = flags.DEFINE_list("guidance", [], "Guidance scale, of all stages or of each.")
_STEPS = flags.DEFINE_list("steps", [], "Sampling steps, of all stages or of each.")
_SAMPLER = flags.DEFINE_list("sampler", [], "heun, ddim, ddpm or dpmpp_2m, likewise.")
_THRESHOLD = flags.DEFINE_list("threshold", [], "dynamic, static or none, likewise.")
_AUG_SIGMA = flags.DEFINE_list("aug_sigma", [], "Noise put on the small images, likewise.")
_TEXT_WEIGHTS = flags.DEFINE_list(
    "text_weights", [], "Folder of the text encoder's weights, likewise; default: the config's."
)
_EMA = flags.DEFINE_list(
    "ema", ["ema"], 'A decay such as 0.9999, "ema" for the largest, or "raw", likewise.'
)
_STEP = flags.DEFINE_list("checkpoint", [], "A step that was saved, likewise; default: the last.")
_BATCH = flags.DEFINE_list("batch_size", [], "Images drawn at once, likewise.")


def main(argv: list[str]) -> None:
    """Reads the texts, loads the models, draws."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: write --prompt={argv[1]!r}", 2)
    cli.start()
    with cli.bad_input():
        sizes = _per_stage("batch_size", _BATCH.value, int)
        stages = cascade.load(_WORKDIR.value, _choices())
        captions, texts = _texts(stages)
        low_res = _low_res(stages[0], len(captions))
        out = pathlib.Path(_OUT.value)
        out.mkdir(parents=True, exist_ok=True)
    rows = [i for i in range(len(captions)) for _ in range(_NUM_IMAGES.value)]
    seeds = [_SEED.value + n for n in range(len(rows))]
    texts = [{name: array[rows] for name, array in stage.items()} for stage in texts]
    low_res = None if low_res is None else low_res[rows]
    default = cascade.batch_sizes(stages, len(rows))
    sizes = [min(given or n, len(rows)) for given, n in zip(sizes, default, strict=True)]
    origins = [_origin(i, captions) for i in rows]
    _draw(out, stages, texts, seeds, sizes, low_res, origins)


def _per_stage(name: str, values: Sequence[str], kind: Callable[[str], Any]) -> list[Any]:
    """One value a stage of a flag that was given once, for each, or not at all (None)."""
    stages = len(_WORKDIR.value)
    if len(values) not in (0, 1, stages):
        raise ValueError(
            f"--{name}={','.join(values)} has {len(values)} values for {stages} stages: "
            "give one for all, or one for each"
        )
    try:
        read = [kind(value) for value in values] or [None]
    except ValueError as error:
        raise ValueError(f"--{name}={','.join(values)} is no list of numbers") from error
    if kind is int and any(value is not None and value < 1 for value in read):
        raise ValueError(f"--{name}={','.join(values)}: give numbers from 1 on")
    return read * stages if len(read) == 1 else read


def _choices() -> list[Choice]:
    """What the flags say of each stage."""
    columns = {
        "ema": _per_stage("ema", _EMA.value, str),
        "checkpoint": _per_stage("checkpoint", _STEP.value, int),
        "guidance": _per_stage("guidance", _GUIDANCE.value, float),
        "sampler": _per_stage("sampler", _SAMPLER.value, str),
        "steps": _per_stage("steps", _STEPS.value, int),
        "threshold": _per_stage("threshold", _THRESHOLD.value, str),
        "aug_sigma": _per_stage("aug_sigma", _AUG_SIGMA.value, float),
        "text_weights": _per_stage("text_weights", _TEXT_WEIGHTS.value, str),
    }
    rows = zip(*columns.values(), strict=True)
    return [Choice(**dict(zip(columns, row, strict=True))) for row in rows]


def _texts(stages: Sequence[Model]) -> tuple[list[str], list[Texts]]:
    """Captions, and what each stage reads of them: tokens or embeddings."""
    prompts = gallery.read_prompts(_PROMPT.value, _PROMPTS.value)
    names = {stage.encoder.name for stage in stages}
    needs_embeddings = "precomputed" in names
    if needs_embeddings and len(names) > 1:
        raise ValueError(f"the stages read texts in unlike ways: {', '.join(sorted(names))}")
    given = _EMBEDDINGS.value if needs_embeddings else prompts
    unread = prompts if needs_embeddings else _EMBEDDINGS.value
    if not given or unread:
        flag = "--embeddings=FILE" if needs_embeddings else "--prompt=TEXT or --prompts=FILE"
        raise ValueError(f"the text encoder {stages[0].encoder.name!r} needs {flag}")
    if not needs_embeddings:
        return prompts, [stage.encoder.tokenize(prompts) for stage in stages]
    arrays = [embeddings.read(pathlib.Path(f).read_bytes(), f) for f in given]
    return [pathlib.Path(f).stem for f in given], [s.encoder.tokenize(arrays) for s in stages]


def _low_res(first: Model, num_texts: int) -> np.ndarray | None:
    """The pictures to start from, one for each text, in [-1, 1]."""
    pictures = [np.asarray(Image.open(path).convert("RGB")) for path in _LOW_RES.value]
    if not pictures:
        cascade.check_low_res(first, None)
        return None
    for picture in pictures:
        cascade.check_low_res(first, picture.shape[:2])
    if len(pictures) != num_texts:
        raise ValueError(f"{len(pictures)} pictures and {num_texts} texts: give one for each text")
    return np.stack(pictures).astype(np.float32) / 127.5 - 1


def _origin(text: int, captions: Sequence[str]) -> dict[str, Any]:
    """What an image is drawn from: a text, and the files of its embeddings and its small image."""
    files_of = {"embeddings": _EMBEDDINGS.value, "low_res": _LOW_RES.value}
    return {"text": captions[text]} | {name: f[text] for name, f in files_of.items() if f}


def _draw(out, stages, texts, seeds, sizes, low_res, origins) -> None:
    """Draws, and writes each batch as soon as it is there; of several processes the first does."""
    lines, images = [], []
    batches = cascade.draw_batches(stages, texts, seeds, sizes, low_res)
    pixels = (
        list(zip(*(sheets.to_uint8(drawn) for drawn in by_stage), strict=True))
        for by_stage in batches
    )
    for batch in progress.reported(pixels, len(seeds), "images", size=len):
        if jax.process_index():
            continue
        for drawn in batch:
            n = len(lines)
            lines.append(_write_image(out, drawn, origins[n], seeds[n], stages))
            images.append(drawn[-1])
    if jax.process_index() == 0:
        gallery.write_index(out, lines, images, [origin["text"] for origin in origins])


def _write_image(out, drawn, origin, seed, stages) -> dict[str, Any]:
    """Writes the PNGs of one image; returns its line of the metadata."""
    name = f"seed_{seed:06}.png"
    sheets.write_png(out / name, drawn[-1])
    line = {"file_name": name, **origin, "seed": seed}
    if _ALL_SIZES.value:
        smaller = [f"seed_{seed:06}_{image.shape[0]}.png" for image in drawn[:-1]]
        for small, image in zip(smaller, drawn, strict=False):
            sheets.write_png(out / small, image)
        line["smaller"] = smaller
    line["guidance"] = stages[0].settings.sampler.guidance
    return line | {"stages": [_stage_card(stage) for stage in stages]}


def _stage_card(stage: Model) -> dict[str, Any]:
    """What a stage drew with; a bound that is infinite is left out, since JSON has none."""
    s = stage.settings
    card = {"workdir": stage.workdir, "checkpoint": stage.step, "ema": stage.ema}
    sampler = {k: v for k, v in s.sampler._asdict().items() if v != float("inf")}
    card |= {"size": s.output_size, "sampler": sampler.pop("name"), **sampler}
    if s.super_resolution.factor > 1:
        card |= {"low_res": s.input_size, "aug_sigma": s.super_resolution.aug_sigma}
    return card


if __name__ == "__main__":
    cli.run(main)
