"""Stable Diffusion: text-to-image in latents. `sd_jax.load` opens a run to draw from."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:  # Import `load` when it is used: `import sd_jax` stays fast.
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("sd_jax.notebook").load
