"""Text encoders: T5, CLIP, hashed words (which need no download), and precomputed embeddings."""

from diffusion_jax.text.encoder import TextEncoder, embed

__all__ = ["TextEncoder", "embed"]
