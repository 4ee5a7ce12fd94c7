"""Draw images with a trained Imagen model, or with a cascade of several models.

    python -m imagen_jax.sample --workdir=runs/quickstart --prompt="a red seven on gray paper" \\
        --num_images=8 --out=pictures

For a cascade, give --workdir once per model, in the order in which the models draw. Each sampler
setting is a flag (--eta, --churn, --rho, --sigma_max, --guidance_low ...). A flag takes one value
for all models, or one value per model. By default, each model uses the values in its config:

    python -m imagen_jax.sample --workdir=runs/base64 --workdir=runs/sr256 --guidance=7.5,8 \\
        --steps=30,20 --prompts=captions.txt --out=pictures

Repeat --prompt for several prompts, or give a file with one prompt per line as --prompts. Each
model uses the text encoder that it was trained with. Models trained on stored embeddings need the
weights of this encoder (--text_weights=FOLDER), or embeddings that this encoder has already
computed (--embeddings=FILE, one .npy, .npz or .safetensors file per text). If the first model is a
super-resolution model, it enlarges the pictures of --low_res, one per text.

Image-to-image: --image=photo.png --strength=0.6 draws over a picture, which must have the aspect
ratio of the drawn images (by default, a square). Give one picture for all texts, or one per text.
Each stage resizes the picture to its own image size. The first stage draws over the picture in the
last 60 % of its steps, and the later stages enlarge the result. With --strength=0.6,0.3, the second
stage also draws over the picture, in the last 30 % of its steps.

Inpainting: --mask=mask.png has the size of the picture. Its white part is redrawn; its black part
keeps exactly the pixels of the picture, at every stage. With --strength=1, the redrawn part starts
from pure noise.

The folder --out receives one PNG per image, sheet.png with all images and their captions, and
metadata.jsonl with all settings that are needed to draw an image again. Image n uses the seed
--seed + n, and depends only on its seed, prompt and pictures. So --seed=5 --num_images=1 draws the
sixth image of --seed=0. An earlier drawing in the folder moves to FOLDER_1, FOLDER_2, and so on.
"""

import pathlib

import numpy as np
from absl import flags

from diffusion_jax import files
from diffusion_jax.data import embeddings
from diffusion_jax.draw import input_pictures
from diffusion_jax.draw.sample_command import Inputs, command
from diffusion_jax.logs.progress import counted
from diffusion_jax.metrics import images as pictures_of
from imagen_jax.cascade import KIND

_EMBEDDINGS = flags.DEFINE_multi_string("embeddings", [], "A file with the embedding of one text; may be repeated.")
_LOW_RES = flags.DEFINE_multi_string(
    "low_res", [], "A picture to enlarge, one per text, or a folder with the pictures of all texts."
)
_ALL_SIZES = flags.DEFINE_bool("all_sizes", False, "Also write the images of the earlier stages.")


def read(prompts: list[str], out: pathlib.Path) -> Inputs:
    """Open the input files that the flags name.

    `prompts` holds the texts of --prompt and --prompts. It must be empty if --embeddings is given.
    The output folder `out` is not used.

    Raises ValueError if a flag is invalid, and OSError if a file is missing.
    """
    del out
    if bool(prompts) == bool(_EMBEDDINGS.value):
        raise ValueError(
            "give either prompts (--prompt=TEXT or --prompts=FILE) or "
            "--embeddings=FILE, computed with the models' text encoder"
        )
    captions, texts = (prompts, prompts) if prompts else _embeddings()
    small = [path for name in _LOW_RES.value for path in pictures_of.paths_in(name)]
    images = [input_pictures.open_picture(path, "RGB", "--low_res") for path in small]
    if images and len(images) != len(captions):
        raise ValueError(
            f"--low_res has {counted(len(images), 'picture')} for {counted(len(captions), 'text')}: give one per text"
        )
    return Inputs(
        captions,
        texts,
        low_res=[np.asarray(image) for image in images],
        paths={"embeddings": _EMBEDDINGS.value, "low_res": small},
        all_sizes=_ALL_SIZES.value,
        opening={"embedded": not prompts},
    )


def _embeddings() -> tuple[list[str], list[np.ndarray]]:
    """Return the names of the files of --embeddings, and the arrays that they hold."""
    paths = [files.path(path) for path in _EMBEDDINGS.value]
    arrays = [embeddings.read(path.read_bytes(), str(path)) for path in paths]
    return [path.stem for path in paths], arrays


if __name__ == "__main__":
    command(KIND, read)
