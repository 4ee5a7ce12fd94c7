"""Captioned emoji, with their data source. `data.prepare emoji` writes the data set.

A config uses it with data.source="diffusion_jax.examples.emoji" and data.path=FOLDER.
"""

from diffusion_jax.examples.emoji.rendering import open_source

__all__ = ["open_source"]
