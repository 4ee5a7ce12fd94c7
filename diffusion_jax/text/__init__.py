"""Text encoders: T5, CLIP, and hashed words, which need no download; and their stored output."""

from diffusion_jax.text.encoder import TextEncoder, embed

__all__ = ["TextEncoder", "embed"]
