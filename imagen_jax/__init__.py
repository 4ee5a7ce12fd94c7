"""Imagen: text-to-image diffusion in pixels. `imagen_jax.load` opens a run to draw from."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`load`, and what it needs, is imported when it is used: `import imagen_jax` is light."""
    if name == "load":
        from imagen_jax.notebook import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
