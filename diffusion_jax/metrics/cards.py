"""Cards: how a score was taken, and which scores may therefore stand in one table."""

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
"""Fields in which scores of one table must agree."""
FREE = ("seed", "sampler", "steps", "guidance", "checkpoint", "ema", "precision", "model",
        "resized")  # fmt: skip
"""Fields of what was scored, which a table may compare; `model` is a hash of its weights."""


@runtime_checkable
class Extractor(Protocol):
    """An extractor's part of a card: extractors.Extractor's fields, or those of a digits.Judge."""

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
    """A card; a field that does not apply is None. ValueError for a field that there is not."""
    unknown = set(fields) - {*ALIKE, *FREE}
    if unknown:
        known = ", ".join((*ALIKE, *FREE))
        raise ValueError(f"a card has no field {sorted(unknown)[0]!r}: the fields are {known}")
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
    """The versions of the software that features depend on."""
    own = {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__}
    return own | {"jaxlib": metadata.version("jaxlib"), "pillow": metadata.version("pillow")}


def reference_name(path: str, n: int | None) -> str:
    """The name of real images in a card: the file or folder, and how many they are."""
    return f"{pathlib.Path(path).name}, n {'unknown' if n is None else n}"


def read_scored(path: str | os.PathLike[str]) -> Scored:
    """Scores with their card from a JSON file; ValueError if there are none."""
    try:
        content = json.loads(files.path(path).read_text())
        return Scored(dict(content["scores"]), dict(content["card"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no scores with their card: {error!r}") from error


def differing(cards: Sequence[Card], fields: Sequence[str]) -> dict[str, list[Any]]:
    """The fields in which the cards differ, with each card's value."""
    values = {field: [card.get(field) for card in cards] for field in fields}
    return {field: each for field, each in values.items() if any(v != each[0] for v in each)}


def table(scored: Mapping[str, Scored], *, allow: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A row for each: its name, the free fields that differ, its scores.

    ValueError that says which field of ALIKE differs, unless it is in `allow`, whose values the
    rows then show; also if the scores have no name in common.
    """
    cards = [one.card for one in scored.values()]
    strict = [field for field in ALIKE if field not in allow]
    for field, values in differing(cards, strict).items():
        pairs = ", ".join(f"{name}: {v}" for name, v in zip(scored, values, strict=True))
        raise ValueError(
            f"these scores cannot be compared: their {field} differs ({pairs}). To show them side "
            f"by side all the same: --allow={field}"
        )
    common = set.intersection(*(set(one.scores) for one in scored.values()))
    if not common:
        raise ValueError(f"{', '.join(scored)} have no score in common")
    shown = [*differing(cards, allow), *differing(cards, FREE)]
    return [
        {"name": name}
        | {field: one.card.get(field) for field in shown}
        | {score: value for score, value in one.scores.items() if score in common}
        for name, one in scored.items()
    ]
