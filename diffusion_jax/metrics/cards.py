"""Cards record how scores were computed, and thus which scores are comparable."""

import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from diffusion_jax.machine import files

Card = dict[str, Any]
ALIKE = ("extractor", "weights", "preprocessing", "image_size", "fit", "n", "reference", "prompts")
"""Fields that must be equal for scores to be comparable."""
FREE = ("seed", "sampler", "steps", "guidance", "checkpoint", "ema", "precision", "model",
        "resized")  # fmt: skip
"""Fields of the scored model, which may differ in a table; `model` is a hash of its weights."""


@runtime_checkable
class Extractor(Protocol):
    """The fields of an extractor or judge that a card records."""

    @property
    def name(self) -> str: ...
    @property
    def weights(self) -> str: ...
    @property
    def preprocessing(self) -> str: ...
    @property
    def official(self) -> bool: ...


class Scored(NamedTuple):
    """Scores by name, and the card that they share."""

    scores: dict[str, float]
    card: Card


def make_card(extractor: Extractor, *, image_size: Sequence[int], n: int, **fields: Any) -> Card:
    """Return a card, in which fields that do not apply are None.

    Args:
        extractor: the extractor or judge.
        image_size: height and width in pixels.
        n: number of images.
        **fields: other fields in ALIKE and FREE.

    Raises:
        ValueError: a field is unknown.
    """
    unknown = set(fields) - {*ALIKE, *FREE}
    if unknown:
        names = ", ".join((*ALIKE, *FREE))
        raise ValueError(f"a card has no field {sorted(unknown)[0]!r}: the fields are {names}")
    height, width = image_size
    card = dict.fromkeys((*ALIKE, *FREE))
    card |= {
        "extractor": extractor.name,
        "weights": extractor.weights,
        "preprocessing": extractor.preprocessing,
        "image_size": f"{width}x{height}",
        "n": n,
        **fields,
    }
    return card | {"official": extractor.official, "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of the software that features depend on."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "pillow": metadata.version("pillow"),
    }


def reference_name(path: str, n: int | None) -> str:
    """Return a card's name for real images: their file or folder, and their number."""
    return f"{pathlib.Path(path).name}, n {'unknown' if n is None else n}"


def read_scored(path: str | os.PathLike[str]) -> Scored:
    """Read scores and their card from a JSON file. Raises ValueError if it has none."""
    try:
        content = json.loads(files.path(path).read_text())
        return Scored(dict(content["scores"]), dict(content["card"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no scores with a card: {error!r}") from error


def differing(cards: Sequence[Card], fields: Sequence[str]) -> dict[str, list[Any]]:
    """Return the fields in which cards differ, with each card's value."""
    values = {field: [card.get(field) for card in cards] for field in fields}
    return {field: each for field, each in values.items() if any(v != each[0] for v in each)}


def table(scored: Mapping[str, Scored], *, allow: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a row per set of scores: its name, the fields that differ, and the shared scores.

    Args:
        scored: scores by name.
        allow: fields of ALIKE that may differ.

    Raises:
        ValueError: another field of ALIKE differs, or no score is common to all.
    """
    cards = [item.card for item in scored.values()]
    strict = [field for field in ALIKE if field not in allow]
    for field, values in differing(cards, strict).items():
        pairs = ", ".join(f"{name}: {v}" for name, v in zip(scored, values, strict=True))
        raise ValueError(
            f"the scores are not comparable: their {field} differs ({pairs}). To show them "
            f"regardless, set --allow={field}"
        )
    common = set.intersection(*(set(item.scores) for item in scored.values()))
    if not common:
        raise ValueError(f"{', '.join(scored)} have no score in common")
    shown = [*differing(cards, allow), *differing(cards, FREE)]
    return [
        {"name": name}
        | {field: item.card.get(field) for field in shown}
        | {score: value for score, value in item.scores.items() if score in common}
        for name, item in scored.items()
    ]
