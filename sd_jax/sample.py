"""Draws images with a Stable Diffusion model, trained here or elsewhere.

    python -m sd_jax.sample --workdir=runs/sd_quickstart --prompt="a red seven on gray paper" \\
        --num_images=8 --out=pictures

    python -m sd_jax.sample --model=weights/sd-v1-5 --prompts=captions.txt --out=pictures \\
        --negative_prompt="blurred" --guidance=7.5 --sampler=dpmpp_2m --steps=25

--workdir is a run of sd_jax.train. --model is a diffusers directory, or a file of CompVis,
Stability, MLPerf or NeMo (.ckpt, .safetensors, .nemo, .npz), which needs CLIP's vocabulary beside
it (--tokenizer=FOLDER) and, of 2.x, what it predicts (--prediction=v). What is left out is the
run's, or else 50 steps at guidance 7.5 and the size that the model was trained at, by a directory's
own scheduler or PLMS. Each setting of the sampler is a flag (--eta, --churn, --grid ...).

A LoRA trained here is a run, --workdir, and --lora_scale its strength. LoRA files of diffusers and
kohya join a --model, as they are or FILE:STRENGTH: --lora=style.safetensors:0.7 --lora=cat.pt.

Image-to-image: --image=photo.png --strength=0.6, one picture for all prompts or one for each; the
last 0.6 of the steps draw over it. Pictures are resized to --height and --width where these are
given. Inpainting: --mask=mask.png, of the picture's size, is white where it is drawn anew; what is
black stays as it is, to the last pixel. At --strength=1 all of the new starts from noise.

--out gets a PNG for each image, sheet.png with all of them and their prompts, and metadata.jsonl
with what is needed to draw an image again. Image n of the command has seed --seed + n, and depends
on its seed, prompts and picture alone: --seed=5 --num_images=1 draws the sixth of --seed=0 again.
"""

import itertools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import flags
from jaxtyping import ArrayLike

from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.draw import choice_flags, pictures
from diffusion_jax.draw.command import Session, command, warn_of_cuts
from diffusion_jax.machine import programs, sheets
from sd_jax import drawing, file_flags
from sd_jax.drawing import Choice

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a training run.")
_MODEL = flags.DEFINE_string("model", None, "A diffusers directory or a checkpoint's file.")
_CHOICE = choice_flags.define(Choice)
_FILE = file_flags.define()
_GIVEN = pictures.define()
_STRENGTH = flags.DEFINE_float("strength", 0.8, "Share of the steps that draw over --image.")
_BATCH = flags.DEFINE_integer("batch_size", None, "Images drawn at once.", lower_bound=1)
_PREVIEW = flags.DEFINE_integer(
    "preview_every", 0, "Steps after which preview.png shows what is being drawn; 0: never.",
    lower_bound=0,
)  # fmt: skip


def open_session(prompts: list[str], out: pathlib.Path) -> Session:
    """The model that the flags name, and what it draws from."""
    if bool(_WORKDIR.value) == bool(_MODEL.value):
        raise ValueError("give --workdir=FOLDER of a training run, or --model=PATH: one of them")
    file = _FILE()
    file_flags.check_unused(bool(_MODEL.value), file)
    if not prompts:
        raise ValueError("there is nothing to draw: give --prompt=TEXT or --prompts=FILE")
    given = _given(len(prompts))
    choice = _choice(given, _preview(out) if _PREVIEW.value else None)
    model = drawing.load(str(_WORKDIR.value or _MODEL.value), choice, file)
    warn_of_cuts(model.encoder, [*prompts, model.settings.sampler.negative_prompt])

    def draw(rows, seeds):
        texts = [prompts[i] for i in rows]
        own = {name: array[rows] for name, array in given.items()}
        batches = drawing.draw_batches(model, texts, seeds, given=own, batch_size=_BATCH.value)
        return ([images] for images in batches)

    files = {"image": flags.FLAGS.image, "mask": flags.FLAGS.mask}
    loras = {"lora": file.lora} if file.lora else {}
    return Session(prompts, draw, drawing.card(model) | loras, files)


def _choice(given: Mapping[str, np.ndarray], preview: Preview | None) -> Choice:
    values: dict[str, Any] = choice_flags.values(_CHOICE) | {"preview": preview}
    if given:
        height, width = given[pictures.IMAGE].shape[1:3]
        values |= {"height": height, "width": width, "strength": _STRENGTH.value}
    return Choice(**values)


def _preview(out: pathlib.Path) -> Preview:
    """Writes a sheet of the sketches that it gets, those of every so many steps."""
    steps = itertools.count(1)

    def show(sketches: ArrayLike, sigma: ArrayLike) -> None:
        if programs.rehearsing() or next(steps) % _PREVIEW.value == 0:
            images = sheets.to_uint8(np.asarray(sketches))
            captions = [f"noise {float(np.asarray(sigma)):.2f}"] * len(images)
            sheets.write_png(out / "preview.png", sheets.contact_sheet(images, captions))

    return show


def _given(num_texts: int) -> Mapping[str, np.ndarray]:
    """The pictures to draw over, and their masks, one for each text; {} without any."""
    opened = _GIVEN(num_texts)
    if opened is None:
        return {}
    width, height = (_CHOICE[side].value for side in ("width", "height"))
    first = opened.images[0]
    if not (width and height) and len({image.size for image in opened.images}) > 1:
        raise ValueError("the pictures differ in size: give --height and --width for all")
    return opened.at((width or first.width, height or first.height), num_texts)


if __name__ == "__main__":
    command(open_session)
