"""Coloured digits: 1,797 real handwritten digits, drawn in a named ink on a named paper.

The glyphs come with scikit-learn (Alpaydin & Kaynak 1998), so nothing is downloaded. A prompt names
a digit, an ink and a paper. Every 17th prompt is held out of training.
"""

import argparse
import functools
import io
import itertools
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image

from diffusion_jax import files
from diffusion_jax.config.settings import Data
from diffusion_jax.data import tars
from diffusion_jax.data.pictures import Pictures, TaskShapes

INKS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 200, 40),
    "white": (245, 245, 245),
    "purple": (150, 60, 180),
}
PAPERS = {
    "black": (15, 15, 15),
    "white": (250, 250, 250),
    "gray": (130, 130, 130),
    "orange": (240, 140, 40),
    "cyan": (90, 210, 220),
}
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELD_OUT_EVERY = 17


class Prompt(NamedTuple):
    """The digit of a picture, and the names of its ink and paper colours."""

    digit: int
    ink: str
    paper: str


class Glyphs(NamedTuple):
    """Grey images of handwritten digits, 0 for paper and 1 for ink, with their labels."""

    images: Float[np.ndarray, "N 8 8"]
    digits: Int[np.ndarray, "N"]


def caption(prompt: Prompt) -> str:
    """Return the caption of a prompt, such as "a red seven on gray paper"."""
    return f"a {prompt.ink} {DIGITS[prompt.digit]} on {prompt.paper} paper"


def parse(text: str) -> Prompt:
    """Convert a caption to a Prompt. Raises ValueError if it is not one of the 290 captions."""
    if text not in _prompt_of_caption():
        raise ValueError(
            f"{text!r} is not a caption of the coloured digits: write 'a INK DIGIT on PAPER paper' "
            f"with INK from {', '.join(INKS)}, DIGIT from {', '.join(DIGITS)}, "
            f"PAPER from {', '.join(PAPERS)}, and different names for ink and paper"
        )
    return _prompt_of_caption()[text]


def seen_prompts() -> list[str]:
    """Return the 272 captions of the training pictures."""
    return [caption(p) for i, p in enumerate(_all_prompts()) if i % HELD_OUT_EVERY]


def heldout_prompts() -> list[str]:
    """Return the 18 captions held out of training. Every word of these occurs in training."""
    return [caption(p) for p in _all_prompts()[::HELD_OUT_EVERY]]


@functools.cache
def load(split: str) -> Glyphs:
    """Return the glyphs of the split "train" or "test".

    The training split is a fixed random 70 % of the glyphs of each digit. The test split is the
    rest.
    """
    try:
        from sklearn.datasets import load_digits  # Slow to import.
    except ImportError as error:
        raise ValueError(f"the digits come with scikit-learn ({error}): pip install scikit-learn") from error

    pixels, digits = map(np.asarray, load_digits(return_X_y=True))
    random = np.random.RandomState(0)  # RandomState gives the same numbers in all versions.
    chosen = np.zeros(len(digits), bool)
    for digit in range(10):
        where = random.permutation(np.flatnonzero(digits == digit))
        chosen[where[: round(0.7 * len(where))]] = True
    rows = {"train": chosen, "test": ~chosen}[split]
    images = pixels.reshape(-1, 8, 8)[rows] / 16
    return Glyphs(images.astype(np.float32), digits[rows].astype(np.int32))


def enlarge(glyphs: Float[np.ndarray, "N 8 8"], size: int) -> Float[np.ndarray, "N H W"]:
    """Enlarge glyphs to size x size with a bicubic filter, and clip them to [0, 1].

    The values are the share of ink in each pixel.
    """
    resized = [Image.fromarray(g).resize((size, size), Image.Resampling.BICUBIC) for g in glyphs]
    return np.clip(np.stack([np.asarray(r) for r in resized]), 0, 1)


def colour(
    mix: Float[np.ndarray, "*B H W"], ink: Float[np.ndarray, "*B 3"], paper: Float[np.ndarray, "*B 3"]
) -> UInt8[np.ndarray, "*B H W 3"]:
    """Interpolate between the colour of the paper (mix 0) and the colour of the ink (mix 1)."""
    ink, paper = ink[..., None, None, :], paper[..., None, None, :]
    # astype truncates, so adding 0.5 rounds these positive values.
    return (mix[..., None] * (ink - paper) + (paper + np.float32(0.5))).astype(np.uint8)


def render(glyph: Float[np.ndarray, "8 8"], ink: str, paper: str, size: int) -> UInt8[np.ndarray, "H W 3"]:
    """Draw a glyph in the named colours, at size x size pixels."""
    return colour(enlarge(glyph[None], size)[0], _rgb(INKS, ink), _rgb(PAPERS, paper))


def open_source(data: Data, shapes: TaskShapes) -> Pictures:
    """Return the training pictures with sides of shapes.size pixels.

    Raises ValueError if the config needs text embeddings or latent moments, because the digits have
    only pictures and captions.
    """
    if shapes.embeddings or shapes.moments:
        raise ValueError(
            f"data.source is {data.source!r}, which has only pictures with captions, but the "
            f"config needs text embeddings (data.text={data.text}) or VAE moments: set "
            "data.text=txt, or choose another data.source"
        )
    return Digits(shapes.size)


class Digits(Pictures):
    """The training pictures: each training glyph, drawn once per training caption with its digit.

    Each index always gives the same picture.
    """

    def __init__(self, size: int = 16):
        """Prepare pictures of `size` x `size` pixels. `size` must be a multiple of 8."""
        if size < 8 or size % 8:
            raise ValueError(f"the size of digits is {size}: it must be a multiple of 8, for example 16")
        glyphs = load("train")
        self._mix = enlarge(glyphs.images, size)
        prompts = [parse(text) for text in seen_prompts()]
        self._captions = [caption(p) for p in prompts]
        self._inks = np.stack([_rgb(INKS, p.ink) for p in prompts])
        self._papers = np.stack([_rgb(PAPERS, p.paper) for p in prompts])
        same_digit = glyphs.digits[:, None] == np.array([p.digit for p in prompts])
        self._glyph_of, self._prompt_of = np.nonzero(same_digit)

    def __len__(self) -> int:
        """Return the number of distinct pictures, about 34,000."""
        return len(self._glyph_of)

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[UInt8[np.ndarray, "B H W 3"], list[str]]:
        """Return the pictures and captions of `indices`.

        `places` has no effect, because the pictures are not cropped.
        """
        prompts = self._prompt_of[indices]
        mix = self._mix[self._glyph_of[indices]]
        images = colour(mix, self._inks[prompts], self._papers[prompts])
        return images, [self._captions[p] for p in prompts]

    def texts(self, indices: Int[np.ndarray, "B"]) -> list[str]:
        """Return the captions of `indices` without drawing the pictures."""
        return [self._captions[p] for p in self._prompt_of[indices]]


def write_examples(out: str | os.PathLike[str], num: int, *, size: int = 64, format: str = "folder") -> pathlib.Path:
    """Write a small data set of `num` pictures with captions, and return its path.

    The format "folder" writes 00000.png, 00000.txt and so on into the folder `out`. The format
    "webdataset" writes these files into one tar: `out` itself if its name ends in .tar, otherwise
    out/00000.tar.
    """
    digits = Digits(size)
    # A prime stride makes even the first few pictures differ in glyph and colours.
    images, captions = digits.read(np.arange(num) * 617 % len(digits))
    records, out = [], pathlib.Path(out)
    for i, (image, text) in enumerate(zip(images, captions, strict=True)):
        png = io.BytesIO()
        Image.fromarray(image).save(png, "png")
        files = {"png": png.getvalue(), "txt": f"{text}\n".encode()}
        records.append({tars.KEY: f"{i:05}".encode(), **files})
    if format == "webdataset" and out.suffix != ".tar":
        out /= "00000.tar"
    (out if format == "folder" else out.parent).mkdir(parents=True, exist_ok=True)
    {"folder": _write_folder, "webdataset": tars.write}[format](out, records)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command `python -m diffusion_jax.data.digits`, by default with sys.argv."""
    parser = argparse.ArgumentParser(
        prog="python -m diffusion_jax.data.digits", description="Write a tiny data set of coloured digits."
    )
    parser.add_argument("--out", required=True, help="folder or .tar file to write; missing folders are created")
    parser.add_argument("--num", type=int, default=100, help="number of pictures")
    parser.add_argument("--size", type=int, default=64, help="side in pixels, a multiple of 8")
    parser.add_argument("--format", choices=("folder", "webdataset"), default="folder")
    args = parser.parse_args(arguments)
    if args.num < 1:
        parser.error(f"--num={args.num}: write at least 1 picture")
    if args.size < 8 or args.size % 8:
        parser.error(f"--size={args.size}: the side must be a multiple of 8")
    try:
        path = write_examples(args.out, args.num, size=args.size, format=args.format)
    except OSError as error:
        parser.error(f"--out={args.out}: {error.strerror}")
    print(f"wrote {args.num} pictures with captions to {path}")


def _write_folder(out: pathlib.Path, records: Iterable[dict[str, bytes]]) -> None:
    for record in records:
        stem = record.pop(tars.KEY).decode()
        for suffix, contents in record.items():
            files.write_whole(out / f"{stem}.{suffix}", contents)


@functools.cache
def _all_prompts() -> list[Prompt]:
    pairs = [(ink, paper) for ink in INKS for paper in PAPERS if ink != paper]
    return [Prompt(digit, *pair) for digit, pair in itertools.product(range(10), pairs)]


@functools.cache
def _prompt_of_caption() -> dict[str, Prompt]:
    return {caption(p): p for p in _all_prompts()}


def _rgb(colours: dict[str, tuple[int, int, int]], name: str) -> Float[np.ndarray, "3"]:
    return np.array(colours[name], np.float32)
