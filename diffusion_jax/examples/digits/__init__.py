"""Coloured digits, the data set of the quick start, with its data source, prompts and scorer.

A config uses this data set with data.source="diffusion_jax.examples.digits".
"""

from collections.abc import Sequence
from typing import Any

from diffusion_jax.examples.digits import rendering
from diffusion_jax.examples.digits.rendering import open_source

__all__ = ["open_scorer", "open_source", "prompts"]


def prompts() -> list[str]:
    """Return the 290 prompts: first the 272 that training shows, then the 18 held-out ones."""
    return rendering.seen_prompts() + rendering.heldout_prompts()


def open_scorer(size: int, num_seen: int = 1, num_heldout: int = 8, metrics: Sequence[str] = ()) -> Any:
    """Return the evaluate.scorers.Scorer of the coloured digits.

    `size` is the side of the images in pixels. `num_seen` images are scored for each training
    prompt, and `num_heldout` images for each held-out prompt. `metrics` are keys of
    metrics.table.METRICS; () chooses all metrics that the judge supports.
    """
    from diffusion_jax.examples.digits import scorer  # Loads metrics that training does not need.

    return scorer.open_scorer(size, num_seen, num_heldout, metrics)
