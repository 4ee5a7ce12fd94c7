"""Compares networks here with outputs that were saved from the reference implementations.

    python -m tests.parity CASE.npz ...

prints one line of JSON for each case, whichever system it is of: the errors of its outputs and
gradients, null where a case has none or ours is not finite, the number of parameters, and the case
as "file"; {"error": ..., "file": ...} where a case cannot be read. imagen.py, sd.py and text.py
beside this file tell the formats and the tolerances. The exit code is 0 if every case is within
its tolerance, 1 if one is beyond, 2 if one cannot be read.
"""

import json
import math
import sys
from collections.abc import Mapping
from types import ModuleType

import jax
import numpy as np

from diffusion_jax.weights import torch_weights
from tests.parity import compare, imagen, sd, text

_TEXT = ("DenseReluDense", "self_attn.", "resblocks.")  # In names of T5's and CLIP's weights.


def main(paths: list[str]) -> int:
    """Prints a line for each case; returns the exit code."""
    if not paths or any(path.startswith("-") for path in paths):
        print(__doc__, file=sys.stderr)
        return 2
    return max(report(path) for path in paths)


def report(path: str) -> int:
    """Prints the line of one case; returns 0 within the tolerance, 1 beyond, 2 if unreadable."""
    try:
        case = torch_weights.read(path)
        system = system_of(case)
        errors = system.verify(case)
    except (ValueError, TypeError, KeyError, IndexError, OSError) as error:
        print(f"error: cannot verify {path}: {error}", file=sys.stderr)
        print(json.dumps({"error": str(error), "file": path}), flush=True)
        return 2
    infinite = [name for name, e in errors.items() if e is not None and not math.isfinite(e)]
    if infinite:
        print(f"{path}: not finite: {', '.join(infinite)}", file=sys.stderr)
    line = {name: None if name in infinite else e for name, e in errors.items()}
    print(json.dumps({**line, "file": path}), flush=True)
    return 0 if compare.within(errors, system.TOLERANCE) else 1


def system_of(case: Mapping[str, np.ndarray]) -> ModuleType:
    """imagen, sd or text: the module that can verify this case."""
    if "in/text_embed" in case or "in/time" in case:
        return imagen
    return text if any(part in name for name in case for part in _TEXT) else sd


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main(sys.argv[1:]))
