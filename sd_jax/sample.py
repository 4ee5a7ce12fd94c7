"""Draw images with a Stable Diffusion model, trained with this library or elsewhere.

    python -m sd_jax.sample --workdir=runs/sd_quickstart --prompt="a red seven on gray paper" \\
        --num_images=8 --out=pictures

    python -m sd_jax.sample --model=weights/sd-v1-5 --prompts=captions.txt --out=pictures \\
        --negative_prompt="blurred" --guidance=7.5 --sampler=dpmpp_2m --steps=25

--workdir is a run of sd_jax.train. --model is a diffusers directory, or a checkpoint file of
CompVis, Stability, MLPerf or NeMo (.ckpt, .safetensors, .nemo, .npz). A file needs a folder with
CLIP's tokenizer, --tokenizer=FOLDER. A file of Stable Diffusion 2.x also needs --prediction=eps or
--prediction=v, the quantity that the UNet predicts. By default, a run draws with the settings of
its config. Other models draw images of the size that they were trained on, with 50 steps and
guidance scale 7.5, using the scheduler of the directory, or PLMS if there is no scheduler. Each
sampler setting is a flag (--eta, --churn, --grid ...).

A LoRA trained with this library is a run: give it as --workdir, and its strength as --lora_scale.
LoRA files of diffusers and kohya are merged into a --model. Give each as FILE or FILE:STRENGTH:
--lora=style.safetensors:0.7 --lora=cat.pt.

Image-to-image: --image=photo.png --strength=0.6 draws over the picture in the last 60 % of the
steps. Give one picture for all prompts, or one per prompt. Pictures are resized to --height and
--width if these are given. Inpainting: --mask=mask.png has the size of the picture. White pixels
are redrawn, and black pixels stay exactly as they are. With --strength=1, the redrawn part starts
from pure noise. Models that were trained to inpaint see the mask. InstructPix2Pix edits the picture
as the prompt says, with a second guidance scale: --guiding="pix2pix(image_scale=1.5)".

The folder --out receives one PNG per image, sheet.png with all images and their prompts, and
metadata.jsonl with all settings that are needed to draw an image again. Image n uses the seed
--seed + n, and depends only on its seed, prompts and picture. So --seed=5 --num_images=1 draws the
sixth image of --seed=0. An earlier drawing in the folder moves to FOLDER_1, FOLDER_2, and so on.
"""

import itertools
import pathlib

import numpy as np
from absl import flags
from jaxtyping import ArrayLike

from diffusion_jax.devices import programs
from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.draw.sample_command import Inputs, command
from diffusion_jax.files import sheets
from sd_jax.drawing import KIND

_PREVIEW = flags.DEFINE_integer(
    "preview_every",
    0,
    "Steps between updates of preview.png, which shows the unfinished images; 0: never.",
    lower_bound=0,
)


def read(prompts: list[str], out: pathlib.Path) -> Inputs:
    """Return the prompts, at least one, and a function that draws the preview of --preview_every.

    The preview is written to the output folder `out`. Raises ValueError if there is no prompt.
    """
    if not prompts:
        raise ValueError("there is nothing to draw: give --prompt=TEXT or --prompts=FILE")
    return Inputs(prompts, prompts, preview=_preview(out) if _PREVIEW.value else None)


def _preview(out: pathlib.Path) -> Preview:
    """Return a function that updates preview.png in `out` after every --preview_every steps."""
    steps = itertools.count(1)

    def show(sketches: ArrayLike, sigma: ArrayLike) -> None:
        if programs.rehearsing() or next(steps) % _PREVIEW.value == 0:
            images = sheets.to_uint8(np.asarray(sketches))
            captions = [f"noise {float(np.asarray(sigma)):.2f}"] * len(images)
            sheets.write_png(out / "preview.png", sheets.contact_sheet(images, captions))

    return show


if __name__ == "__main__":
    command(KIND, read)
