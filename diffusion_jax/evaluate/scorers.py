"""What a sweep scores pictures with: prompts, features of pictures, scores of features."""

import functools
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from absl import logging
from jaxtyping import Float, UInt8

from diffusion_jax.data import digits
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.draw.program import Images
from diffusion_jax.machine import sharding, sheets
from diffusion_jax.metrics import (
    bootstrap,
    cards,
    clip_score,
    extractors,
    frechet,
    stats_files,
    weights,
)
from diffusion_jax.metrics import digits as judges

Features = dict[str, Float[np.ndarray, "N D"]]
Scores = dict[str, dict[str, float]]
_SHOWN = 42  # Pictures on a sheet.
_REAL = 4_000  # Real pictures of digits that generated ones are compared with.


@runtime_checkable
class Scorer(Protocol):
    """Prompts, and how the pictures drawn from them are scored."""

    prompts: list[str]
    shown: list[int]
    """Which prompts' pictures people see."""
    cards: dict[str, cards.Card]
    """By extractor: what its scores depend on besides the model that drew."""

    def caption(self, i: int) -> str:
        """What stands under the picture of prompt i."""
        ...

    def features(self, images: UInt8[np.ndarray, "B H W 3"], prompts: Sequence[str]) -> Features:
        """What is kept of the pictures of these prompts, a row each."""
        ...

    def score(self, features: Features) -> Scores:
        """By extractor: columns of the table from the features of all pictures."""
        ...


def make(
    source: str, size: int, prompts: Sequence[str], reference: str, inception: str, clip: str
) -> Scorer:
    """FID and CLIP score of these prompts; without any, the judge of the digits.

    ValueError for a data `source` that has no prompts of its own.
    """
    if prompts:
        return FidClip(size, prompts, reference, inception, clip)
    if source != "digits":
        raise ValueError(
            f"the run's data.source is {source!r}: only 'digits' has prompts and a judge of its "
            "own, so give a file of prompts, and a reference with Inception's weights or CLIP's"
        )
    return Digits(size)


def score_now(
    scorer: Scorer,
    draw: Callable[[Sequence[str], Sequence[int], float], Images],
    guidance: Sequence[float],
    batch_size: int,
) -> dict[str, float]:
    """{"evaluation/guidance_2/fid": ...}: all prompts, `batch_size` at once, nothing kept on disk.

    Of a scale at which images are not finite it is {"evaluation/guidance_2/images_not_finite": 3}.
    """
    scores = {}
    for scale in guidance:
        features, bad = _features_at(scorer, draw, scale, batch_size)
        row = {"images_not_finite": float(bad)} if bad else columns(scorer.score(features))
        if bad:
            logging.warning("%d images at guidance %g are not finite: no score of it", bad, scale)
        scores |= {f"evaluation/guidance_{scale:g}/{name}": value for name, value in row.items()}
    return scores


def _features_at(
    scorer: Scorer,
    draw: Callable[[Sequence[str], Sequence[int], float], Images],
    scale: float,
    batch_size: int,
) -> tuple[Features, int]:
    """What is kept of the pictures of all prompts, and how many of them are not finite."""
    total, bad, parts = len(scorer.prompts), 0, []
    for first in range(0, total, batch_size):
        rows = np.arange(first, first + batch_size) % total  # One program for all batches.
        texts = [scorer.prompts[i] for i in rows]
        images = draw(texts, rows.tolist(), scale)
        bad += int((~np.isfinite(images[: total - first])).any(axis=(1, 2, 3)).sum())
        features = scorer.features(sheets.to_uint8(np.nan_to_num(images)), texts)
        parts.append({name: made[: total - first] for name, made in features.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, bad


def columns(scores: Scores) -> dict[str, float]:
    """The scores of all extractors in one row."""
    return {name: value for of_one in scores.values() for name, value in of_one.items()}


class FidClip:
    """FID against real images, and the CLIP score of each picture with its prompt.

    Without the public weights a distance is named after its extractor, never FID (see cards).
    """

    def __init__(
        self, size: int, prompts: Sequence[str], reference: str, inception: str, clip: str
    ):
        """`size` is the pictures' side, `reference` a file of statistics.

        ValueError or FileNotFoundError if these cannot be.
        """
        if bool(reference) != bool(inception) or not (inception or clip):
            raise ValueError(
                "FID needs both the reference's statistics and Inception's weights, and the CLIP "
                "score a CLIP: give the two, or the third, or all"
            )
        self.prompts = list(prompts)
        self.shown = list(range(min(_SHOWN, len(self.prompts))))
        self.cards: dict[str, cards.Card] = {}
        self._size = size
        self._extract: dict[str, Callable[..., np.ndarray]] = {}
        self._scores: dict[str, Callable[[np.ndarray], dict[str, float]]] = {}
        if inception:
            self._add_inception(inception, reference)
        if clip:
            self._add_clip(clip_score.load(clip))

    def caption(self, i: int) -> str:
        """The prompt."""
        return self.prompts[i]

    def features(self, images: UInt8[np.ndarray, "B H W 3"], prompts: Sequence[str]) -> Features:
        """Inception's features, and the cosine of each picture with its prompt."""
        return {name: extract(images, prompts) for name, extract in self._extract.items()}

    def score(self, features: Features) -> Scores:
        """The Fréchet distance and the mean CLIP score, each with its interval."""
        return {name: score(features[name]) for name, score in self._scores.items()}

    def _add_inception(self, path: str, reference: str) -> None:
        stats = stats_files.read(reference)
        mode = (stats.card or {}).get("preprocessing", "pytorch")  # The reference's own.
        extractor = extractors.inception_extractor(weights.load(path), mode)
        stats_files.check(reference, stats, extractor)
        if len(self.prompts) < 2:
            raise ValueError("1 prompt: a Fréchet distance needs 2 images or more")
        real = frechet.reference(stats.gaussian if stats.features is None else stats.features)
        card = self._card(extractor, cards.reference_name(reference, stats.gaussian.n))
        name, run = cards.frechet_name(card), _runner(extractor)
        self._extract["inception"] = lambda images, prompts: run(images)
        self._scores["inception"] = lambda rows: _distance(name, rows, real)
        self.cards["inception"] = card

    def _add_clip(self, clip: clip_score.Clip) -> None:
        image, text = _runner(clip.image), _runner(clip.text)

        def extract(images, prompts):
            rows = clip_score.cosines(image(images), text(clip.tokenize(list(prompts))))
            return rows[:, None]

        self._extract["clip"], self._scores["clip"] = (
            extract,
            functools.partial(_mean, "clip_score"),
        )
        self.cards["clip"] = self._card(clip.image)

    def _card(self, extractor: extractors.Extractor, reference: str | None = None) -> cards.Card:
        prompts, size = prompt_files.fingerprint(self.prompts), (self._size, self._size)
        return cards.make_card(
            extractor, image_size=size, n=len(self.prompts), prompts=prompts, reference=reference
        )


class Digits:
    """The coloured digits: a judge of prompts seen and never shown, and its features' distance."""

    def __init__(self, size: int, num_seen: int = 1, num_heldout: int = 8):
        """`size` is the pictures' side; the others, how many pictures a prompt gets."""
        self._judge = judges.fit_judge()
        seen = digits.seen_prompts() * num_seen
        self._num_seen = len(seen)
        self.prompts = seen + digits.heldout_prompts() * num_heldout
        every = max(1, len(seen) // 24)
        self.shown = [*range(0, len(seen), every), *range(len(seen), len(seen) + 18)]
        real = judges.accuracy_on_real(self._judge, size)
        pictures = judges.real_pictures(size, _REAL)
        self._real = frechet.reference(self._judge.features(pictures))
        card = cards.make_card(
            self._judge,
            image_size=(size, size),
            n=len(self.prompts),
            prompts=prompt_files.fingerprint(self.prompts),
            reference=f"held-out digits, n {_REAL}",
        )
        self.cards = {
            "digits": card
            | {
                "images_seen": len(seen),
                "images_heldout": len(self.prompts) - len(seen),
                "judge_accuracy_on_real": round(real["prompt_accuracy"], 4),
            }
        }

    def caption(self, i: int) -> str:
        """The prompt, and whether it was held out."""
        return self.prompts[i] + (" (held out)" if i >= self._num_seen else "")

    def features(self, images: UInt8[np.ndarray, "B H W 3"], prompts: Sequence[str]) -> Features:
        """The classifier's features, and for each of digit, ink and paper whether it is right."""
        read = self._judge(images)
        asked = [digits.parse(prompt) for prompt in prompts]
        right = [[a == b for a, b in zip(*pair, strict=True)]
                 for pair in zip(read, asked, strict=True)]  # fmt: skip
        return {"digits": self._judge.features(images), "right": np.array(right, np.float64)}

    def score(self, features: Features) -> Scores:
        """Shares all right and the Fréchet distance to real pictures, of prompts seen."""
        right, n = features["right"], self._num_seen
        row = _accuracies("seen", right[:n]) | _accuracies("heldout", right[n:])
        seen = features["digits"][:n]
        return {"digits": row | _distance("fd_digits", seen, self._real)}


def _accuracies(group: str, right: Float[np.ndarray, "N 3"]) -> dict[str, float]:
    names = ("digit_accuracy", "ink_accuracy", "paper_accuracy")
    shares = _mean("prompt_accuracy", right.min(axis=1, keepdims=True))
    shares |= dict(zip(names, right.mean(0).tolist(), strict=True))
    return {f"{group}_{name}": round(share, 4) for name, share in shares.items()}


def _distance(
    name: str, features: Float[np.ndarray, "N D"], real: frechet.Reference
) -> dict[str, float]:
    """The Fréchet distance with its interval."""
    value = frechet.distance(features, real)
    low, high = bootstrap.interval(frechet.influence(features, real), value)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _mean(name: str, values: Float[np.ndarray, "N 1"]) -> dict[str, float]:
    """The mean with its interval."""
    mean = float(values.mean())
    low, high = bootstrap.interval(values[:, 0], mean)
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _runner(extractor: extractors.Extractor) -> Callable[[np.ndarray], np.ndarray]:
    """run(rows [B, ...]) -> features [B, D]: one program for each B, on all devices."""
    mesh = sharding.make_mesh()
    everywhere, where = sharding.replicated(mesh), sharding.batch_sharding(mesh)
    ways = mesh.shape["replica"] * mesh.shape["fsdp"]
    params = jax.tree.map(lambda leaf: sharding.place(leaf, everywhere), extractor.params)
    apply = lambda params, rows: extractor.apply(params, extractor.prepare(rows))
    apply = jax.jit(apply, out_shardings=everywhere)

    def run(rows: np.ndarray) -> np.ndarray:
        filled = rows[np.arange(-(-len(rows) // ways) * ways) % len(rows)]
        return np.asarray(apply(params, sharding.place(filled, where)))[: len(rows)]

    return run
