"""Text encoders: T5, CLIP, MiniLM, hashed words (without a download), precomputed embeddings."""

from diffusion_jax.text.encoder import TextEncoder, embed

__all__ = ["TextEncoder", "embed"]
