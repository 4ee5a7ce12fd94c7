"""Cards: what a score is worth only together with, and which scores may stand in one table."""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np

from diffusion_jax.metrics.extractors import Extractor

Card = dict[str, Any]
ALIKE = ("extractor", "weights", "preprocessing", "image_size", "fit", "n", "reference", "prompts")
"""Fields in which scores of one table must agree."""
FREE = ("seed", "sampler", "steps", "guidance", "checkpoint", "ema", "precision")
"""Fields of what was scored, which a table may compare."""


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
    """Of the software that features depend on."""
    own = {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__}
    return own | {"jaxlib": metadata.version("jaxlib"), "pillow": metadata.version("pillow")}


def frechet_name(card: Card) -> str:
    """FID of the real weights alone, else "fd_" and the extractor: never a false FID."""
    return "fid" if card["official"] else f"fd_{card['extractor']}"


def score_name(kind: str, card: Card) -> str:
    """The names "kid" and other `kind`s, likewise: "kid" or "kid_" and the extractor."""
    return kind if card["official"] else f"{kind}_{card['extractor']}"


def text_hash(texts: Sequence[str]) -> str:
    """A sha256 of prompts, in their order."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def differing(cards: Sequence[Card], fields: Sequence[str]) -> dict[str, list[Any]]:
    """The fields in which the cards differ, with each card's value."""
    values = {field: [card.get(field) for card in cards] for field in fields}
    return {field: found for field, found in values.items() if any(v != found[0] for v in found)}


def table(scored: Mapping[str, Scored], *, allow: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A row for each: its name, the free fields that differ, its scores.

    ValueError that says which field of ALIKE differs, unless it is in `allow`, whose values the
    rows then show; also if the scores have no name in common.
    """
    cards = [one.card for one in scored.values()]
    strict = [field for field in ALIKE if field not in allow]
    for field, found in differing(cards, strict).items():
        pairs = ", ".join(f"{name}: {v}" for name, v in zip(scored, found, strict=True))
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
