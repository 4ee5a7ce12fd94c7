"""Scores of pictures, and the networks whose features they compare.

The names in `__all__` are stable (docs/library.md). They need neither the trainer nor TensorFlow.
"""

from diffusion_jax.metrics.clip_towers import load as load_clip
from diffusion_jax.metrics.clip_towers import pair_cosines
from diffusion_jax.metrics.dinov2 import load as load_dinov2
from diffusion_jax.metrics.extractors import load_inception, on_host
from diffusion_jax.metrics.fid import frechet
from diffusion_jax.metrics.mmd import kid
from diffusion_jax.metrics.stats_files import read as read_stats

__all__ = ["frechet", "kid", "load_clip", "load_dinov2", "load_inception", "on_host", "pair_cosines", "read_stats"]
