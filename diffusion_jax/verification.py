"""What the commands that verify saved cases share: reading one, comparing, and a line of JSON."""

import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from diffusion_jax import torch_weights

Errors = Mapping[str, float | int | None]
"""By name; None for what a case does not have."""


def command(
    path: str,
    verify: Callable[[Mapping[str, np.ndarray]], Errors],
    tolerance: Mapping[str, float],
) -> None:
    """Prints the errors of the case at `path`, null where ours is not finite, and ends the process.

    The exit code is 0 within the tolerance, 1 beyond, and 2 if the case cannot be read: the line
    is then {"error": ...}.
    """
    try:
        errors = verify(torch_weights.read(path))
    except (ValueError, TypeError, KeyError, IndexError, OSError) as error:
        print(f"error: cannot verify {path}: {error}", file=sys.stderr)
        print(json.dumps({"error": str(error)}))
        sys.exit(2)
    infinite = [name for name, e in errors.items() if e is not None and not math.isfinite(e)]
    if infinite:
        print(f"not finite: {', '.join(infinite)}", file=sys.stderr)
    print(json.dumps({name: None if name in infinite else e for name, e in errors.items()}))
    sys.exit(0 if within(errors, tolerance) else 1)


def within(errors: Errors, tolerance: Mapping[str, float]) -> bool:
    """Whether every error that a case has is at most its tolerance; NaN is not."""
    found = {name: error for name in tolerance if (error := errors.get(name)) is not None}
    return all(error <= tolerance[name] for name, error in found.items())


def count(params: Any) -> int:
    """Numbers in a pytree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
