"""Compare this project's networks with saved outputs of the reference implementations.

    python -m tests.parity CASE.npz ...

A case is a file with a network's config, its weights, inputs and the reference's outputs. The
command prints one line of JSON per case:
- the largest errors of outputs and gradients. An error is null if the case lacks the output to
  compare with, or if the error is not finite.
- "parameters": the number of parameters.
- "file": the path of the case.
If a case cannot be read, the line has only "error" and "file". The docstrings of imagen.py, sd.py
and text.py in this folder describe the formats of cases; TOLERANCE in these files gives the allowed
errors. The exit code is 0 if all cases are within their tolerance, 1 if a case is not, and 2 if a
case cannot be read.
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

_TEXT = ("DenseReluDense", "self_attn.", "resblocks.")  # Parts of weight names in T5 and CLIP.


def main(paths: list[str]) -> int:
    """Print a line for each case, and return the exit code."""
    if not paths or any(path.startswith("-") for path in paths):
        print(__doc__, file=sys.stderr)
        return 2
    return max(report(path) for path in paths)


def report(path: str) -> int:
    """Print the line of one case, and return its exit code.

    The code is 0 if all errors are within the tolerance, 1 if not, and 2 if the case is unreadable.
    """
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
        print(f"{path}: these errors are not finite: {', '.join(infinite)}", file=sys.stderr)
    line = {name: None if name in infinite else e for name, e in errors.items()}
    print(json.dumps({**line, "file": path}), flush=True)
    return 0 if compare.within(errors, system.TOLERANCE) else 1


def system_of(case: Mapping[str, np.ndarray]) -> ModuleType:
    """Return the module that can verify this case: imagen, sd or text."""
    if "in/text_embed" in case or "in/time" in case:
        return imagen
    return text if any(part in name for name in case for part in _TEXT) else sd


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main(sys.argv[1:]))
