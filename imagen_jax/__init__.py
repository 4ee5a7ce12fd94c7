"""Imagen: text-to-image diffusion in pixels. `imagen_jax.load` opens a trained model."""

import importlib
from typing import Any

import diffusion_jax  # noqa: F401  # Makes Ctrl-C end a command during its imports.


def __getattr__(name: str) -> Any:  # Imports `load` on use, so that `import imagen_jax` is fast.
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("imagen_jax.cascade").load
