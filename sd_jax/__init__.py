"""Stable Diffusion: text-to-image in latents. `sd_jax.load` opens a run to draw from."""

import importlib


def __getattr__(name: str) -> object:  # `load` alone: `import sd_jax` is light.
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("sd_jax.notebook").load
