"""Errors within their tolerances and sizes, for the comparisons of all systems."""

from collections.abc import Mapping
from typing import Any

import jax

Errors = Mapping[str, float | int | None]
"""By name; None for what a case does not have."""


def within(errors: Errors, tolerance: Mapping[str, float]) -> bool:
    """Whether every error that a case has is at most its tolerance; NaN is not."""
    bounded = {name: e for name in tolerance if (e := errors.get(name)) is not None}
    return all(error <= tolerance[name] for name, error in bounded.items())


def count(params: Any) -> int:
    """Numbers in a pytree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
