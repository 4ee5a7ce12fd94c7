"""Comparison of errors with tolerances, and a count of parameters, for all systems."""

from collections.abc import Mapping
from typing import Any

import jax

Errors = Mapping[str, float | int | None]
"""Errors by name. An error is None if the case lacks the output to compare with."""


def within(errors: Errors, tolerance: Mapping[str, float]) -> bool:
    """Return whether all errors that have a tolerance are at most as large as it.

    Errors that are None are skipped. NaN exceeds every tolerance.
    """
    bounded = {name: e for name in tolerance if (e := errors.get(name)) is not None}
    return all(error <= tolerance[name] for name, error in bounded.items())


def count(params: Any) -> int:
    """Return the total number of elements of all arrays in a pytree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
