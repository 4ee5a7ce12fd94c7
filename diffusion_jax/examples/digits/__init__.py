"""Coloured digits, the data of the quick start: their source, prompts and scorer.

Configs name this module: data.source="diffusion_jax.examples.digits" (see data.sources).
"""

from collections.abc import Sequence
from typing import Any

from diffusion_jax.examples.digits import pictures
from diffusion_jax.examples.digits.pictures import open_source

__all__ = ["open_scorer", "open_source", "prompts"]


def prompts() -> list[str]:
    """Return the 290 prompts: first those that training shows, then those held out."""
    return pictures.seen_prompts() + pictures.heldout_prompts()


def open_scorer(
    size: int, num_seen: int = 1, num_heldout: int = 8, metrics: Sequence[str] = ()
) -> Any:
    """Return the evaluate.scorers.Scorer of the digits: see scorer.open_scorer."""
    from diffusion_jax.examples.digits import scorer  # Loads metrics that training does without.

    return scorer.open_scorer(size, num_seen, num_heldout, metrics)
