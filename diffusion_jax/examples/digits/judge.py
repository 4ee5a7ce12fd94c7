"""The judge of the coloured digits, which recognises digit, ink and paper in a picture.

A support vector machine, trained on real 8x8 glyphs, recognises the digit. Ink and paper are the
named colours that fit the pixels best. Nothing is downloaded. The judge misreads about one real
picture in a hundred.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from diffusion_jax.examples.digits import rendering as digits


class DigitJudge:
    """A classifier that reads digit, ink and paper from pictures. `fit_judge` makes one."""

    # Fields of the card of scores (metrics/cards.py).
    name, preprocessing, official = "digits", "8x8 glyphs", False

    def __init__(self, svc: Any, weights: str):
        """Store a support vector machine and a hash that identifies it.

        `svc` classifies 8x8 glyphs with values in [0, 16]. `weights` is the hash of the glyphs to
        which it was fitted.
        """
        self._svc, self.weights = svc, weights

    def __call__(self, images: UInt8[np.ndarray, "B H W 3"]) -> list[digits.Prompt]:
        """Recognise the digit, ink and paper of each picture."""
        papers, inks, mix = _read_colours(images)
        numbers = self._svc.predict(_glyphs(mix))
        return [digits.Prompt(int(n), i, p) for n, i, p in zip(numbers, inks, papers, strict=True)]

    def features(self, images: UInt8[np.ndarray, "B H W 3"]) -> Float[np.ndarray, "B 16"]:
        """Return 16 features of each picture: ten scores, and the mean ink and paper colours.

        The scores are those of the digit classifier, one per digit. The colours are RGB in [0, 1].
        """
        _, _, mix = _read_colours(images)
        scores = self._svc.decision_function(_glyphs(mix))  # [B, 10]
        pixels, mix = images.astype(np.float32) / 255, mix[..., None]
        mean = lambda weight: (weight * pixels).sum((1, 2)) / (weight.sum((1, 2)) + 1e-3)
        return np.concatenate([scores, mean(mix), mean(1 - mix)], axis=1)


def fit_judge() -> DigitJudge:
    """Return a judge fitted to the training glyphs, on which the generator is trained too."""
    from sklearn.svm import SVC  # Slow to import.

    glyphs = digits.load("train")
    svc = SVC(gamma=0.001)  # pyright: ignore[reportArgumentType]
    pixels = 16 * glyphs.images.reshape(-1, 64)
    # Hash the data instead of the fit, whose last digits depend on the processor.
    return DigitJudge(svc.fit(pixels, glyphs.digits), hashlib.sha256(pixels.tobytes()).hexdigest())


def compare(read: Sequence[digits.Prompt], prompts: Sequence[str]) -> Float[np.ndarray, "N 3"]:
    """Compare a judge's readings `read` of N pictures with the captions `prompts` of the pictures.

    The columns of the result are digit, ink and paper; 1 is a match, and 0 is a difference.
    """
    true = [digits.parse(prompt) for prompt in prompts]
    pairs = zip(read, true, strict=True)
    return np.array([[a == b for a, b in zip(*pair, strict=True)] for pair in pairs], np.float64)


def compare_on_real(judge: DigitJudge, size: int) -> Float[np.ndarray, "N 3"]:
    """Test the judge on every test glyph. Return a row of matches per glyph, as `compare` does.

    Each glyph is drawn at `size` x `size` pixels in the colours of a prompt with the same digit.
    Glyph i takes prompt i, modulo the number of prompts with this digit.
    """
    glyphs = digits.load("test")
    prompts = [digits.parse(text) for text in digits.seen_prompts() + digits.heldout_prompts()]
    of_digit = [[p for p in prompts if p.digit == digit] for digit in range(10)]
    shown = [of_digit[n][i % len(of_digit[n])] for i, n in enumerate(glyphs.digits)]
    images = np.stack(
        [digits.render(glyph, p.ink, p.paper, size) for glyph, p in zip(glyphs.images, shown, strict=True)]
    )
    return compare(judge(images), [digits.caption(p) for p in shown])


def real_pictures(size: int, prompts: Sequence[str]) -> UInt8[np.ndarray, "N size size 3"]:
    """Draw a picture for each prompt, with a random test glyph of its digit and a fixed seed."""
    glyphs = digits.load("test")
    draw = np.random.RandomState(0)
    pictures = []
    for prompt in map(digits.parse, prompts):
        glyph = glyphs.images[draw.choice(np.flatnonzero(glyphs.digits == prompt.digit))]
        pictures.append(digits.render(glyph, prompt.ink, prompt.paper, size))
    return np.stack(pictures)


def _read_colours(images: UInt8[np.ndarray, "B H W 3"]):
    """Return the names of each picture's paper and ink colours, and each pixel's share of ink.

    The share is an array [B, H, W].
    """
    pixels = images.astype(np.float32)
    # A paper is the colour nearest to the median of the left and right edges, which ink rarely
    # reaches.
    margin = pixels.shape[2] // 8  # One column of the 8x8 glyph.
    edges = np.concatenate([pixels[:, :, :margin], pixels[:, :, -margin:]], axis=2)
    median = np.median(edges, axis=(1, 2))  # [B, 3]
    colours = np.array(list(digits.PAPERS.values()), np.float32)
    nearest = np.square(median[:, None] - colours).sum(-1).argmin(1)
    papers = [list(digits.PAPERS)[i] for i in nearest]
    return papers, *_read_inks(pixels, papers)


def _glyphs(mix: Float[np.ndarray, "B H W"]) -> Float[np.ndarray, "B 64"]:
    """Shrink images to 8x8 by averaging blocks of pixels. H and W must be multiples of 8."""
    b, h, w = mix.shape
    return 16 * mix.reshape(b, 8, h // 8, 8, w // 8).mean(axis=(2, 4)).reshape(-1, 64)


def _read_inks(
    pixels: Float[np.ndarray, "B H W 3"], papers: Sequence[str]
) -> tuple[list[str], Float[np.ndarray, "B H W"]]:
    """Return the name of each picture's ink, and the share of ink in each pixel.

    Each ink and the paper define a line in RGB. The chosen ink is the one whose line fits all
    pixels best. The share of ink is the position of a pixel on this line: 0 at the paper colour, 1
    at the ink colour.
    """
    paper = np.array([digits.PAPERS[p] for p in papers], np.float32)[:, None, None]
    mixes, errors = [], []
    for name, ink in digits.INKS.items():
        axis = np.array(ink, np.float32) - paper  # [B, 1, 1, 3]
        mix = np.clip(((pixels - paper) * axis).sum(-1) / np.square(axis).sum(-1), 0, 1)
        error = np.square(pixels - paper - mix[..., None] * axis).sum((1, 2, 3))
        mixes.append(mix)
        errors.append(np.where(np.array(papers) == name, np.inf, error))
    best = np.argmin(errors, axis=0)
    return [list(digits.INKS)[i] for i in best], np.stack(mixes)[best, np.arange(len(best))]
