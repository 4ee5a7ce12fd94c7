"""Coloured digits, the data of the quick start: their source, prompts and scorer.

Configs name this module: data.source="diffusion_jax.examples.digits" (see data.sources).
"""

from collections.abc import Sequence
from typing import Any

from diffusion_jax.examples.digits import pictures
from diffusion_jax.examples.digits.pictures import open_source

__all__ = ["open_scorer", "open_source", "prompts"]


def prompts() -> list[str]:
    """Return the 290 prompts: first the 272 that training shows, then the 18 held-out ones."""
    return pictures.seen_prompts() + pictures.heldout_prompts()


def open_scorer(
    size: int, num_seen: int = 1, num_heldout: int = 8, metrics: Sequence[str] = ()
) -> Any:
    """Return the scorer of the digits, an evaluate.scorers.Scorer; see scorer.open_scorer."""
    from diffusion_jax.examples.digits import scorer  # Loads metrics that training does not need.

    return scorer.open_scorer(size, num_seen, num_heldout, metrics)
