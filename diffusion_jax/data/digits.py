"""Coloured digits: 1,797 real handwritten digits, drawn in one named colour on another.

The glyphs come with scikit-learn (Alpaydin & Kaynak 1998), so nothing is downloaded. A prompt is a
digit, an ink and a paper; every 17th prompt is never shown in training.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image

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
    """What a picture shows; `caption` puts it into words."""

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

    data = load_digits()
    random = np.random.RandomState(0)  # RandomState's stream never changes between versions.
    chosen = np.zeros(len(data.target), bool)
    for digit in range(10):
        where = random.permutation(np.flatnonzero(data.target == digit))
        chosen[where[: round(0.7 * len(where))]] = True
    rows = {"train": chosen, "test": ~chosen}[split]
    return Glyphs((data.images[rows] / 16).astype(np.float32), data.target[rows].astype(np.int32))


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


class Digits:
    """Every training glyph in every pair of colours that is seen with its digit.

    A finite list with random access: `images(i)` and `captions(i)` depend on nothing but i.
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
        """How many different pictures there are, about 34,000."""
        return len(self._glyph_of)

    def images(self, indices: Int[np.ndarray, "B"]) -> UInt8[np.ndarray, "B H W 3"]:
        """The pictures of these indices."""
        prompts = self._prompt_of[indices]
        return colour(
            self._mix[self._glyph_of[indices]], self._inks[prompts], self._papers[prompts]
        )

    def captions(self, indices: Int[np.ndarray, "B"]) -> list[str]:
        """The captions of these indices."""
        return [self._captions[p] for p in self._prompt_of[indices]]


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
