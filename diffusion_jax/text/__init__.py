"""Text encoders: T5, CLIP, MiniLM, hashed words (without a download), precomputed embeddings.

The names in `__all__` are stable (docs/library.md). They need neither the trainer nor TensorFlow.
"""

from diffusion_jax.text.encoder import TextEncoder, embed, outputs
from diffusion_jax.text.registry import load

__all__ = ["TextEncoder", "embed", "load", "outputs"]
