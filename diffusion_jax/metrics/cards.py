"""Make and compare cards, which record how scores were computed.

Scores are comparable only if their cards agree in all fields in ALIKE.
"""

import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from diffusion_jax import files
from diffusion_jax.files import untrusted

Card = dict[str, Any]
ALIKE = ("extractor", "weights", "preprocessing", "image_size", "fit", "n", "reference", "prompts")
"""Fields that must be equal for scores to be comparable."""
_ALWAYS_ALIKE = ("prompts",)
"""Fields of ALIKE that no --allow lifts for HPSv2: its author demands equal prompts."""
FREE = ("seed", "sampler", "steps", "guidance", "checkpoint", "ema", "precision", "model", "resized")
"""Fields that describe the scored model and may differ between the rows of a table.

`model` is a hash of the model's weights."""


@runtime_checkable
class CardSubject(Protocol):
    """The attributes of a feature extractor or a trained judge that a card records."""

    @property
    def name(self) -> str: ...
    @property
    def weights(self) -> str: ...
    @property
    def preprocessing(self) -> str: ...
    @property
    def official(self) -> bool: ...


class Scored(NamedTuple):
    """Scores, keyed by name, and the card that records how all of them were computed."""

    scores: dict[str, float]
    card: Card


def make_card(extractor: CardSubject, *, image_size: Sequence[int], n: int, **fields: Any) -> Card:
    """Return the card for scores computed with an extractor. Fields without a value are None.

    Args:
        extractor: the extractor or judge.
        image_size: height and width of the images in pixels.
        n: number of images.
        **fields: values of other fields listed in ALIKE or FREE.

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
    """Return the versions of Python and of the packages that features depend on."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "pillow": metadata.version("pillow"),
    }


def reference_name(path: str, n: int | None) -> str:
    """Return a name for a set of real images, such as "coco.npz, n 30000".

    It consists of the last part of `path` and the number of images; "unknown" stands for None.
    """
    return f"{pathlib.Path(path).name}, n {'unknown' if n is None else n}"


def read_scored(path: str | os.PathLike[str]) -> Scored:
    """Read scores and their card from a JSON file. Raises ValueError if the file has no scores."""
    try:
        content = untrusted.parse_json(files.path(path).read_bytes())
        scored = Scored(dict(content["scores"]), dict(content["card"]))
        if not isinstance(scored.card["extractor"], str):
            raise TypeError("the extractor is not a name")
        return scored
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no scores with a card ({error!r}): name a JSON file of scores that "
            "`metrics` or `evaluate` wrote"
        ) from error


def differing(cards: Sequence[Card], fields: Sequence[str]) -> dict[str, list[Any]]:
    """Return {field: values} for the fields that differ between cards, with one value per card."""
    values = {field: [card.get(field) for card in cards] for field in fields}
    return {field: each for field, each in values.items() if any(v != each[0] for v in each)}


def table(scored: Mapping[str, Scored], *, allow: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return one table row per set of scores.

    A row holds the name of the set, the scores that all sets have, and the fields in FREE and
    `allow` that differ between the sets.

    Args:
        scored: sets of scores, keyed by name.
        allow: fields of ALIKE that may differ in this table.

    Raises:
        ValueError: another field of ALIKE differs, or the sets have no score in common.
    """
    cards = [item.card for item in scored.values()]
    common = set.intersection(*(set(item.scores) for item in scored.values()))
    if not common:
        raise ValueError(f"{', '.join(scored)} have no score in common: compare files of the same metric")
    needed = _ALWAYS_ALIKE if "hpsv2" in common else ()
    strict = [field for field in ALIKE if field not in allow or field in needed]
    for field, values in differing(cards, strict).items():
        pairs = ", ".join(f"{name}: {v}" for name, v in zip(scored, values, strict=True))
        way = f"To show them regardless, set --allow={field}"
        if field in needed:
            way = "HPSv2 ranks pictures of the same prompts only: score both for the same prompts"
        raise ValueError(f"the scores are not comparable: their {field} differs ({pairs}). {way}")
    shown = [*differing(cards, allow), *differing(cards, FREE)]
    return [
        {"name": name}
        | {field: item.card.get(field) for field in shown}
        | {score: value for score, value in item.scores.items() if score in common}
        for name, item in scored.items()
    ]
