"""The caption of a sample: one of several captions of a picture, with its tags shuffled or dropped.

A picture has several captions if data.text names several places ("txt,json:long*0.5"), or if they
are lists or the lines of a file. The choice, and the order of the tags, are functions of the seed
and the sample's number.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from diffusion_jax.data.decoding import Unusable


class Captions(NamedTuple):
    """The texts of a picture that has several."""

    texts: tuple[Any, ...]
    weights: tuple[float, ...]
    """The probability that a sample gets each text. The sum is 1."""

    def at(self, share: float) -> Any:
        """Return the text into whose part of the cumulated weights `share`, in [0, 1), falls."""
        index = int(np.searchsorted(np.cumsum(self.weights), share, side="right"))
        return self.texts[min(index, len(self.texts) - 1)]


class Tags(NamedTuple):
    """What happens to the tags of a caption, the texts between its commas, in training."""

    shuffle: bool = False
    """Whether to shuffle them."""
    keep: int = 0
    """Number of tags at the beginning that keep their place."""
    drop_prob: float = 0.0
    """The probability with which each other tag is left out."""

    def split(self, text: str) -> tuple[list[str], list[str]]:
        """Return the tags of a caption that keep their place, and the others."""
        tags = [tag for part in text.split(",") if (tag := part.strip())]
        return tags[: self.keep], tags[self.keep :]

    def change(self, texts: Iterable[Any]) -> bool:
        """Return whether training can reorder the tags of any of these texts, or leave one out."""
        others = (self.split(one)[1] for text in texts for one in every(text) if type(one) is str)
        return any(len(tags) > (not self.drop_prob) for tags in others)

    def of(self, text: Any, rng: np.random.Generator) -> Any:
        """Return a caption with shuffled and dropped tags. Embeddings are returned unchanged."""
        if not isinstance(text, str):
            return text
        kept, others = self.split(text)
        order = rng.permutation(len(others)) if self.shuffle else range(len(others))
        dropped = rng.random(len(others)) < self.drop_prob
        return ", ".join([*kept, *(others[i] for i in order if not dropped[i])])


ALL_TAGS = Tags()
"""Captions stay as they are."""


def alternatives(text: str) -> list[tuple[str, float]]:
    """Split data.text into places of texts and their weights: "txt,json:long*0.5".

    Raises:
        ValueError: a place is empty, or a weight is not a number above 0.
    """
    parts = []
    for part in text.split(","):
        name, star, number = part.strip().partition("*")
        try:
            weight = float(number) if star else 1.0
        except ValueError:
            weight = math.nan
        if not name or not 0 < weight < math.inf:
            raise ValueError(
                f"data.text is {text!r}: write the places of the texts with commas between them, "
                "each with * and a weight above 0 if they differ, such as txt,json:long*0.5"
            )
        parts.append((name, weight))
    return parts


def join(parts: Iterable[tuple[Any, float]]) -> Any:
    """Join (text, weight) pairs: return Captions, or the text itself if there is only one.

    A text may be Captions, which share the weight, or an Unusable error. Missing texts, errors with
    the reason "no_caption", are left out if others exist. Any other error is returned.
    """
    pairs, missing = [], None
    for text, weight in parts:
        if isinstance(text, Captions):
            pairs += [(t, weight * w) for t, w in zip(*text, strict=True)]
        elif not isinstance(text, Unusable):
            pairs.append((text, weight))
        elif text.reason == "no_caption":
            missing = text
        else:
            return text
    if not pairs:
        return missing or Unusable("no_caption", "it holds no text")
    if len(pairs) < 2:
        return pairs[0][0]
    texts, weights = zip(*pairs, strict=True)
    return Captions(texts, tuple(weight / sum(weights) for weight in weights))


def with_origins(parts: Iterable[tuple[Any, float, str | Sequence[str]]]) -> tuple[Any, list[str]]:
    """Join (text, weight, origin) triples; return the text, and the origin of each caption in it.

    If the captions of one text have several origins, they are a list. The origin of an Unusable
    error is that of the text which cannot be read.
    """
    match parts := list(parts):
        case [(str() as text, _, str() as origin)]:  # The most frequent case.
            return text, [origin]
    text = join((of, weight) for of, weight, _ in parts)
    failed = isinstance(text, Unusable)
    used = [(of, origin) for of, _, origin in parts if (of is text if failed else not isinstance(of, Unusable))]
    each = lambda of, origin: [origin] * len(every(of)) if isinstance(origin, str) else origin
    return text, [origin for of, origins in used for origin in each(of, origins)]


def long_enough(text: Any, min_chars: int) -> Any:
    """Return the text of a record without captions of fewer than `min_chars` characters.

    Raises Unusable with the reason "short_caption" if no caption is left.
    """
    pairs = zip(*text, strict=True) if isinstance(text, Captions) else [(text, 1.0)]
    kept = [pair for pair in pairs if not isinstance(pair[0], str) or len(pair[0]) >= min_chars]
    if not kept:
        longest = max(every(text), key=len)
        raise Unusable("short_caption", f"{longest!r} has {len(longest)} characters, data.min_chars is {min_chars}")
    return join(kept)


def every(text: Any) -> tuple[Any, ...]:
    """Return all texts of a record: those of Captions, or the one text."""
    return text.texts if isinstance(text, Captions) else (text,)


def first(text: Any) -> Any:
    """Return the first text of a record."""
    return every(text)[0]


def chosen(texts: Iterable[Any], seed: int, samples: Iterable[int], tags: Tags = ALL_TAGS) -> list[Any]:
    """For each sample, pick one of its captions and shuffle its tags, by (seed, sample number)."""
    rng, samples = lambda number, use: np.random.default_rng((seed, number, use)), list(samples)
    choices = [
        text.at(rng(number, 2).random()) if isinstance(text, Captions) else text
        for text, number in zip(texts, samples, strict=True)
    ]
    if not (tags.shuffle or tags.drop_prob):
        return choices
    return [tags.of(text, rng(number, 3)) for text, number in zip(choices, samples, strict=True)]
