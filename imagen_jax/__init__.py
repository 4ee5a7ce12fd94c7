"""Imagen: text-to-image diffusion in pixels. `imagen_jax.load` opens a run to draw from."""

import importlib


def __getattr__(name: str) -> object:  # `load` alone: `import imagen_jax` is light.
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("imagen_jax.notebook").load
