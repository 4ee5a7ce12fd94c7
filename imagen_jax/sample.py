"""Draws images with a trained Imagen model, or with several in a row.

    python -m imagen_jax.sample --workdir=runs/quickstart --prompt="a red seven on gray paper" \\
        --num_images=8 --out=pictures

A cascade names its models in the order in which they draw, each with its own settings or all with
one; what is left out is the config's. Each setting of the sampler is a flag (--eta, --churn, --rho,
--sigma_max, --guidance_low ...):

    python -m imagen_jax.sample --workdir=runs/base64 --workdir=runs/sr256 --guidance=7.5,8 \\
        --steps=30,20 --prompts=captions.txt --out=pictures

Give --prompt several times, or a file with one prompt a line as --prompts. They are read by the
text encoder that the models were trained with, whose weights --text_weights=FOLDER names where the
config does not, as after training on stored embeddings. Without it, --embeddings=FILE takes what
the encoder made elsewhere (.npy, .npz or .safetensors, one text each). A super-resolution model
named first enlarges the pictures of --low_res, one for each text.

Image-to-image: --image=photo.png --strength=0.6, one square picture for all texts or one for each,
resized to each stage; the last 0.6 of the first stage's steps draw over it, and the later stages
enlarge what it drew (--strength=0.6,0.3: these draw over the picture too). Inpainting: --mask=
mask.png, of the picture's size, is white where it is drawn anew; what is black stays as it is, to
the last pixel, at every stage. At --strength=1 all of the new starts from noise.

--out gets a PNG for each image, sheet.png with all of them and their captions, and metadata.jsonl
with what is needed to draw an image again. Image n of the command has seed --seed + n, and depends
on its seed and prompt alone: --seed=5 --num_images=1 draws the sixth image of --seed=0 again.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
from absl import flags

from diffusion_jax.data import embeddings
from diffusion_jax.draw import choice_flags, pictures
from diffusion_jax.draw.command import Session, command, warn_of_cuts
from diffusion_jax.machine import files, untrusted
from diffusion_jax.task import Texts
from imagen_jax import cascade
from imagen_jax.cascade import Choice, Model

_WORKDIR = flags.DEFINE_multi_string(
    "workdir", None, "The folder of a training run; repeated for a cascade.", required=True
)
_EMBEDDINGS = flags.DEFINE_multi_string("embeddings", [], "A file with one embedded text.")
_LOW_RES = flags.DEFINE_multi_string("low_res", [], "A picture to enlarge; one for each text.")
_GIVEN = pictures.define()
_STRENGTH = flags.DEFINE_list(
    "strength", ["0.8"], "Share of the steps that draw over --image: the first stage's, or each's."
)
_ALL_SIZES = flags.DEFINE_bool("all_sizes", False, "Also write what the earlier stages drew.")
_CHOICES = choice_flags.define_lists(Choice)
_BATCH = flags.DEFINE_list("batch_size", [], "Images drawn at once, likewise.")


def open_session(prompts: list[str], out: pathlib.Path) -> Session:
    """The cascade that the flags name, and what it draws from."""
    del out
    workdirs = _WORKDIR.value
    batch_sizes = choice_flags.each("batch_size", _BATCH.value, int, len(workdirs))
    if bool(prompts) == bool(_EMBEDDINGS.value):
        raise ValueError(
            "there must be texts to draw: give --prompt=TEXT or --prompts=FILE, or in their place "
            "--embeddings=FILE, which the models' text encoder made"
        )
    choices = choice_flags.choices(Choice, _CHOICES, len(workdirs))
    given = _GIVEN(len(prompts or _EMBEDDINGS.value))
    strengths = _strengths(len(workdirs))
    if given:
        pairs = zip(choices, strengths, strict=True)
        choices = [dataclasses.replace(choice, strength=each) for choice, each in pairs]
    stages = cascade.load(workdirs, choices, embedded=not prompts)
    captions, texts = _texts(stages, prompts)
    if prompts:
        warn_of_cuts(stages[0].encoder, prompts)
    low_res = _low_res(stages[0], len(captions))
    texts = cascade.over(stages, texts, given, len(captions))

    def draw(rows, seeds):
        defaults = cascade.batch_sizes(stages, len(rows))
        sizes = [
            min(size or default, len(rows))
            for size, default in zip(batch_sizes, defaults, strict=True)
        ]
        row_texts = [{name: array[rows] for name, array in stage.items()} for stage in texts]
        small = None if low_res is None else low_res[rows]
        return cascade.draw_batches(stages, row_texts, seeds, sizes, small)

    card = cascade.card(stages)
    if given:
        card["strength"] = strengths
    inputs = {"embeddings": _EMBEDDINGS.value, "low_res": _LOW_RES.value}
    inputs |= {"image": flags.FLAGS.image, "mask": flags.FLAGS.mask}
    return Session(captions, draw, card, inputs, _ALL_SIZES.value)


def _strengths(num_stages: int) -> list[float]:
    """--strength of each stage; of the later ones 1 where the first's is given alone."""
    strengths = choice_flags.each("strength", _STRENGTH.value, float, num_stages)
    return strengths if len(_STRENGTH.value) > 1 else [*strengths[:1], *[1.0] * (num_stages - 1)]


def _texts(stages: Sequence[Model], prompts: list[str]) -> tuple[list[str], list[Texts]]:
    """Captions, and what each stage reads of them: tokens or embeddings."""
    if not _EMBEDDINGS.value:
        return prompts, [stage.encoder.tokenize(prompts) for stage in stages]
    paths = [files.path(path) for path in _EMBEDDINGS.value]
    arrays = [embeddings.read(path.read_bytes(), str(path)) for path in paths]
    return [path.stem for path in paths], [stage.encoder.tokenize(arrays) for stage in stages]


def _low_res(first: Model, num_texts: int) -> np.ndarray | None:
    """The pictures to start from, one for each text, in [-1, 1]."""
    opened = [untrusted.open_image(files.local(path)) for path in _LOW_RES.value]
    pictures = [np.asarray(image.convert("RGB")) for image in opened]
    if not pictures:
        cascade.check_low_res(first, None)
        return None
    for picture in pictures:
        cascade.check_low_res(first, picture.shape[:2])
    if len(pictures) != num_texts:
        raise ValueError(f"{len(pictures)} pictures and {num_texts} texts: give one for each text")
    return np.stack(pictures).astype(np.float32) / 127.5 - 1


if __name__ == "__main__":
    command(open_session)
