"""Imagen: text-to-image diffusion in pixels. `imagen_jax.load` opens a trained model."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:  # Import `load` when it is used: `import imagen_jax` stays fast.
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("imagen_jax.notebook").load
