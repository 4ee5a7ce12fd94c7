"""Stable Diffusion: text-to-image diffusion in the latents of an autoencoder.

`sd_jax.load` opens a trained model to draw with.
"""

import importlib
from typing import Any

import diffusion_jax  # noqa: F401  # Makes Ctrl-C end a command during its imports.


def __getattr__(name: str) -> Any:  # Imports `load` at its first use, to keep `import sd_jax` fast.
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("sd_jax.drawing").load
