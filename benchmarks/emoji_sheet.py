"""Draw the README's sheet of emoji for prompts held out of training.

Below each row of drawn pictures is a row of the real pictures with the same captions.

    python -m benchmarks.emoji_sheet --model=models/emoji32 --data=data/emoji/never_shown \\
        --out=docs/images/emoji.png
"""

import numpy as np
from absl import flags

import imagen_jax
from diffusion_jax import cli
from diffusion_jax.data import sources
from diffusion_jax.machine import sheets

_MODEL = flags.DEFINE_multi_string(
    "model", ["models/emoji32"], "Workdir of each model of the cascade, in drawing order."
)
_DATA = flags.DEFINE_string(
    "data", "data/emoji/never_shown", "Folder never_shown, which `prepare emoji` writes."
)
_OUT = flags.DEFINE_string("out", None, "PNG file to write.", required=True)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Seed for the choice of prompts; the pictures have the seeds 0, 1, 2, ..."
)
_COLUMNS, _ROWS = 8, 2


def main(argv: list[str]) -> None:
    """Draw the pictures and write the sheet."""
    del argv
    cli.start(alone=True)
    with cli.bad_input():
        model = imagen_jax.load(*_MODEL.value)
        size = model.stages[-1].settings.unet.image_size
        pictures = sources.open_pictures(sources.named(f"webdataset:{_DATA.value}"), size)
    texts = np.array([str(text) for text in pictures.texts(np.arange(len(pictures)))])
    prompts = np.random.RandomState(_SEED.value).permutation(np.unique(texts))[: _COLUMNS * _ROWS]
    real, _ = pictures.read(np.array([np.flatnonzero(texts == text)[0] for text in prompts]))
    drawn = model.draw(prompts.tolist()).images
    images, captions = [], []
    for row in np.split(np.arange(len(prompts)), _ROWS):
        images += [*drawn[row], *real[row]]
        # Shortened, because the sheet shows at most three lines per caption.
        captions += [
            text.replace(" style, on a", ",").removesuffix(" background") for text in prompts[row]
        ]
        captions += ["(real)"] * len(row)
    sheets.write_png(_OUT.value, sheets.contact_sheet(np.stack(images), captions, _COLUMNS))


if __name__ == "__main__":
    cli.run(main)
