"""Text encoders: T5, CLIP, precomputed embeddings, and hashed words, which need no download."""

from diffusion_jax.text.encoder import TextEncoder, embed

__all__ = ["TextEncoder", "embed"]
