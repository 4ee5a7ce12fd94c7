"""Coloured digits: 1,797 real handwritten digits, drawn in one named colour on another.

The glyphs come with scikit-learn (Alpaydin & Kaynak 1998), so nothing is downloaded. A prompt is a
digit, an ink and a paper; every 17th prompt is never shown in training.
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

from diffusion_jax.config.settings import Data
from diffusion_jax.data import tars
from diffusion_jax.data.pictures import Pictures, Shapes

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
    """The digit and the colours of a picture; `caption` puts them into words."""

    digit: int
    ink: str
    paper: str


class Glyphs(NamedTuple):
    """Grey digits, 0 for paper and 1 for ink, with what they mean."""

    images: Float[np.ndarray, "N 8 8"]
    digits: Int[np.ndarray, "N"]


def caption(prompt: Prompt) -> str:
    """For example "a red seven on gray paper"."""
    return f"a {prompt.ink} {DIGITS[prompt.digit]} on {prompt.paper} paper"


def parse(text: str) -> Prompt:
    """The inverse of `caption`; ValueError for a text that is none of the 290."""
    if text not in _prompt_of_caption():
        raise ValueError(
            f"{text!r} is no caption of the coloured digits: write 'a INK DIGIT on PAPER paper' "
            f"with INK of {', '.join(INKS)}, DIGIT of {', '.join(DIGITS)}, "
            f"PAPER of {', '.join(PAPERS)}, and ink and paper of different names"
        )
    return _prompt_of_caption()[text]


def seen_prompts() -> list[str]:
    """The 272 captions that training shows."""
    return [caption(p) for i, p in enumerate(_all_prompts()) if i % HELD_OUT_EVERY]


def heldout_prompts() -> list[str]:
    """The 18 captions that training never shows; each of their words occurs in seen ones."""
    return [caption(p) for p in _all_prompts()[::HELD_OUT_EVERY]]


@functools.cache
def load(split: str) -> Glyphs:
    """The glyphs of "train" (70 % of each digit, drawn once with a fixed seed) or "test"."""
    from sklearn.datasets import load_digits  # Slow to import, and only the digits need it.

    pixels, digits = map(np.asarray, load_digits(return_X_y=True))
    random = np.random.RandomState(0)  # RandomState's stream never changes between versions.
    chosen = np.zeros(len(digits), bool)
    for digit in range(10):
        where = random.permutation(np.flatnonzero(digits == digit))
        chosen[where[: round(0.7 * len(where))]] = True
    rows = {"train": chosen, "test": ~chosen}[split]
    images = pixels.reshape(-1, 8, 8)[rows] / 16
    return Glyphs(images.astype(np.float32), digits[rows].astype(np.int32))


def enlarge(glyphs: Float[np.ndarray, "N 8 8"], size: int) -> Float[np.ndarray, "N H W"]:
    """Bicubic enlargement to size x size, clipped to [0, 1]: the share of ink in each pixel."""
    resized = [Image.fromarray(g).resize((size, size), Image.Resampling.BICUBIC) for g in glyphs]
    return np.clip(np.stack([np.asarray(r) for r in resized]), 0, 1)


def colour(
    mix: Float[np.ndarray, "*B H W"],
    ink: Float[np.ndarray, "*B 3"],
    paper: Float[np.ndarray, "*B 3"],
) -> UInt8[np.ndarray, "*B H W 3"]:
    """Paper where mix is 0, ink where it is 1, and the straight line of colours between."""
    ink, paper = ink[..., None, None, :], paper[..., None, None, :]
    # + 0.5 and the truncation of astype round, for all values are positive.
    return (mix[..., None] * (ink - paper) + (paper + np.float32(0.5))).astype(np.uint8)


def render(
    glyph: Float[np.ndarray, "8 8"], ink: str, paper: str, size: int
) -> UInt8[np.ndarray, "H W 3"]:
    """One glyph (0 to 1) in the named colours, size x size pixels."""
    return colour(enlarge(glyph[None], size)[0], _rgb(INKS, ink), _rgb(PAPERS, paper))


def open_source(data: Data, shapes: Shapes) -> Pictures:
    """Return the training pictures at the size that the task takes.

    Raises ValueError if the config wants embeddings or moments: the digits have captions.
    """
    if shapes.embeddings or shapes.moments:
        raise ValueError(
            f"data.source is {data.source!r}, which has images with captions only, and data.text "
            f"is {data.text!r}: set data.text=txt"
        )
    return Digits(shapes.size)


class Digits(Pictures):
    """Every training glyph in every pair of colours that is seen with its digit.

    Each picture is a function of its index alone.
    """

    def __init__(self, size: int = 16):
        """`size` is the side of the pictures in pixels, a multiple of 8."""
        if size < 8 or size % 8:
            raise ValueError(
                f"digits of size {size}: the size must be a multiple of 8, for example 16"
            )
        glyphs = load("train")
        self._mix = enlarge(glyphs.images, size)
        seen = [parse(text) for text in seen_prompts()]
        self._captions = [caption(p) for p in seen]
        self._inks = np.stack([_rgb(INKS, p.ink) for p in seen])
        self._papers = np.stack([_rgb(PAPERS, p.paper) for p in seen])
        shown = glyphs.digits[:, None] == np.array([p.digit for p in seen])
        self._glyph_of, self._prompt_of = np.nonzero(shown)

    def __len__(self) -> int:
        """The number of different pictures, about 34,000."""
        return len(self._glyph_of)

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[UInt8[np.ndarray, "B H W 3"], list[str]]:
        """The pictures of these indices and their captions; nothing is cut, wherever it were."""
        prompts = self._prompt_of[indices]
        mix = self._mix[self._glyph_of[indices]]
        images = colour(mix, self._inks[prompts], self._papers[prompts])
        return images, [self._captions[p] for p in prompts]

    def texts(self, indices: Int[np.ndarray, "B"]) -> list[str]:
        """The captions of these indices, without making the pictures."""
        return [self._captions[p] for p in self._prompt_of[indices]]


def write_examples(
    out: str | os.PathLike[str], num: int, *, size: int = 64, format: str = "folder"
) -> pathlib.Path:
    """Writes `num` pictures with captions as a tiny data set and returns its path.

    A "folder" holds 00000.png, 00000.txt and so on, a "webdataset" is one tar of these files:
    `out` itself if it ends in .tar, else out/00000.tar.
    """
    digits = Digits(size)
    # A prime step, so that glyphs and colours vary from the start.
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
    """The command line: python -m diffusion_jax.data.digits --out=DIR."""
    parser = argparse.ArgumentParser(description="Writes a tiny data set of coloured digits.")
    parser.add_argument("--out", required=True, help="folder (or .tar) to write; made if missing")
    parser.add_argument("--num", type=int, default=100, help="how many pictures")
    parser.add_argument("--size", type=int, default=64, help="their side, a multiple of 8")
    parser.add_argument("--format", choices=("folder", "webdataset"), default="folder")
    args = parser.parse_args(arguments)
    if args.num < 1:
        parser.error(f"--num={args.num}: write 1 picture or more")
    if args.size < 8 or args.size % 8:
        parser.error(f"--size={args.size}: the side is a multiple of 8")
    try:
        path = write_examples(args.out, args.num, size=args.size, format=args.format)
    except OSError as error:
        parser.error(f"--out={args.out}: {error.strerror}")
    print(f"wrote {args.num} pictures with captions to {path}")


def _write_folder(out: pathlib.Path, records: Iterable[dict[str, bytes]]) -> None:
    for record in records:
        stem = record.pop(tars.KEY).decode()
        for suffix, contents in record.items():
            (out / f"{stem}.{suffix}").write_bytes(contents)


@functools.cache
def _all_prompts() -> list[Prompt]:
    """The 290 prompts in the order that the held-out rule counts in."""
    pairs = [(ink, paper) for ink in INKS for paper in PAPERS if ink != paper]
    return [Prompt(digit, *pair) for digit, pair in itertools.product(range(10), pairs)]


@functools.cache
def _prompt_of_caption() -> dict[str, Prompt]:
    return {caption(p): p for p in _all_prompts()}


def _rgb(colours: dict[str, tuple[int, int, int]], name: str) -> Float[np.ndarray, "3"]:
    return np.array(colours[name], np.float32)


if __name__ == "__main__":
    main()
