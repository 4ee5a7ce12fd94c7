"""The judge of the coloured digits: reads digit, ink and paper back from a picture.

It is a support vector machine on real 8x8 glyphs, for the digit, and nearest colours, for the
rest. No network and no download, and on real pictures it errs about once in a hundred.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from diffusion_jax.examples.digits import pictures as digits


class Judge:
    """Reads pictures of coloured digits; made by fit_judge."""

    # Its fields of a card.
    name, preprocessing, official = "digits", "8x8 glyphs", False

    def __init__(self, svc: Any, weights: str):
        """`svc` tells the digits of 8x8 glyphs, of which 16 is all ink; `weights` is its hash."""
        self._svc, self.weights = svc, weights

    def __call__(self, images: UInt8[np.ndarray, "B H W 3"]) -> list[digits.Prompt]:
        """The prompt that each picture shows."""
        papers, inks, mix = _read_colours(images)
        numbers = self._svc.predict(_glyphs(mix))
        return [digits.Prompt(int(n), i, p) for n, i, p in zip(numbers, inks, papers, strict=True)]

    def features(self, images: UInt8[np.ndarray, "B H W 3"]) -> Float[np.ndarray, "B 16"]:
        """The classifier's margin for each digit, then the mean colours of ink and paper."""
        _, _, mix = _read_colours(images)
        scores = self._svc.decision_function(_glyphs(mix))  # [B, 10]
        pixels, mix = images.astype(np.float32) / 255, mix[..., None]
        mean = lambda weight: (weight * pixels).sum((1, 2)) / (weight.sum((1, 2)) + 1e-3)
        return np.concatenate([scores, mean(mix), mean(1 - mix)], axis=1)


def fit_judge() -> Judge:
    """A classifier of the training glyphs, which the generator sees too."""
    from sklearn.svm import SVC  # Slow to import, and only the judge needs it.

    glyphs = digits.load("train")
    svc = SVC(gamma=0.001)  # pyright: ignore[reportArgumentType]
    seen = 16 * glyphs.images.reshape(-1, 64)
    # The hash is of what it was fitted to: the fit's last digits are the processor's.
    return Judge(svc.fit(seen, glyphs.digits), hashlib.sha256(seen.tobytes()).hexdigest())


def compare(read: Sequence[digits.Prompt], prompts: Sequence[str]) -> Float[np.ndarray, "N 3"]:
    """1 for each of digit, ink and paper that was read as its caption asks for, else 0."""
    true = [digits.parse(prompt) for prompt in prompts]
    pairs = zip(read, true, strict=True)
    return np.array([[a == b for a, b in zip(*pair, strict=True)] for pair in pairs], np.float64)


def compare_on_real(judge: Judge, size: int) -> Float[np.ndarray, "N 3"]:
    """`compare` of the judge itself: every held-out glyph, going round the colours it may have."""
    glyphs = digits.load("test")
    prompts = [digits.parse(text) for text in digits.seen_prompts() + digits.heldout_prompts()]
    of_digit = [[p for p in prompts if p.digit == digit] for digit in range(10)]
    shown = [of_digit[n][i % len(of_digit[n])] for i, n in enumerate(glyphs.digits)]
    images = np.stack([digits.render(glyph, p.ink, p.paper, size)
                       for glyph, p in zip(glyphs.images, shown, strict=True)])  # fmt: skip
    return compare(judge(images), [digits.caption(p) for p in shown])


def real_pictures(size: int, prompts: Sequence[str]) -> UInt8[np.ndarray, "N size size 3"]:
    """Held-out glyphs in the colours of the prompts, chosen with a fixed seed."""
    glyphs = digits.load("test")
    draw = np.random.RandomState(0)
    pictures = []
    for prompt in map(digits.parse, prompts):
        glyph = glyphs.images[draw.choice(np.flatnonzero(glyphs.digits == prompt.digit))]
        pictures.append(digits.render(glyph, prompt.ink, prompt.paper, size))
    return np.stack(pictures)


def _read_colours(images: UInt8[np.ndarray, "B H W 3"]):
    """Names of papers and inks, and how much ink each pixel has."""
    pixels = images.astype(np.float32)
    papers = _read_papers(pixels)
    return papers, *_read_inks(pixels, papers)


def _glyphs(mix: Float[np.ndarray, "B H W"]) -> Float[np.ndarray, "B 64"]:
    return 16 * _shrink(mix).reshape(-1, 64)


def _read_papers(pixels: Float[np.ndarray, "B H W 3"]) -> list[str]:
    """The paper nearest to the median of the left and right edges, which ink seldom reaches."""
    margin = pixels.shape[2] // 8  # One column of the 8x8 glyph.
    edges = np.concatenate([pixels[:, :, :margin], pixels[:, :, -margin:]], axis=2)
    median = np.median(edges, axis=(1, 2))  # [B, 3]
    colours = np.array(list(digits.PAPERS.values()), np.float32)
    nearest = np.square(median[:, None] - colours).sum(-1).argmin(1)
    return [list(digits.PAPERS)[i] for i in nearest]


def _read_inks(
    pixels: Float[np.ndarray, "B H W 3"], papers: Sequence[str]
) -> tuple[list[str], Float[np.ndarray, "B H W"]]:
    """The ink whose straight line to the paper passes nearest to all pixels, and where on it."""
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


def _shrink(mix: Float[np.ndarray, "B H W"]) -> Float[np.ndarray, "B 8 8"]:
    """Means over blocks, to 8x8."""
    b, h, w = mix.shape
    return mix.reshape(b, 8, h // 8, 8, w // 8).mean(axis=(2, 4))
