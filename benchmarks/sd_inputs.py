"""Random weights and batches, with which the train step of Stable Diffusion is timed.

No weights are needed: the VAE and CLIP's text tower have random numbers in the published shapes.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax.task import Task
from diffusion_jax.text import TextEncoder, hashed
from diffusion_jax.text.clip import TextTower, abstract_params
from sd_jax import task
from sd_jax import vae as vae_module
from sd_jax.settings import Settings, read_settings
from sd_jax.weights import names

INPUTS = ("cached", "moments", "images")
"""Moments and text states from storage; moments, with CLIP in the step; both encoders in it."""
_LAYERS = {"clip": 12, "clip_penultimate": 23}


def open_system(
    config: Mapping[str, Any], size: int, inputs: str
) -> tuple[Settings, Task, dict[str, np.ndarray]]:
    """Settings, task and a batch of `size` rows of a config, whatever its data are."""
    s = read_settings(config)
    encoder = _cached(s) if inputs == "cached" else _encoder(s)
    vae_params = _random(names.abstract_vae(s.vae), np.float32) if inputs == "images" else None
    rng, side = np.random.default_rng(0), s.latents.image_size
    batch = encoder.tokenize(["a picture"] * size)
    if inputs == "images":
        batch["image"] = rng.integers(0, 256, (size, side, side, 3), np.uint8)
    else:
        side //= vae_module.factor(s.vae)
        shape = (size, side, side, 2 * s.vae.latent_channels)
        batch["moments"] = rng.standard_normal(shape, np.float32)
    return s, task.make_task(s, encoder, vae_params), batch


def _encoder(s: Settings) -> TextEncoder:
    """CLIP's tower of the config's width, or hashed words, which compute next to nothing."""
    if s.text.encoder not in _LAYERS:
        return hashed.encoder(s.text.width, s.text.max_tokens)
    tower = TextTower(
        vocab_size=49408, max_tokens=s.text.max_tokens, width=s.text.width,
        mlp_width=4 * s.text.width, num_heads=s.text.width // 64,
        num_layers=_LAYERS[s.text.encoder], projection=None,
        activation="quick_gelu" if s.text.encoder == "clip" else "gelu", end_id=None,
        dtype=jnp.dtype(s.text.dtype),
    )  # fmt: skip

    def encode(frozen, batch):
        outputs: Any = tower.apply(frozen, jnp.asarray(batch["text_ids"]))
        return outputs.last, jnp.ones(batch["text_ids"].shape, bool)

    ids = lambda texts: {"text_ids": np.full((len(texts), s.text.max_tokens), 320, np.int32)}
    frozen = _random(abstract_params(tower), jnp.dtype(s.text.dtype))
    return TextEncoder("random", s.text.width, s.text.max_tokens, ids, frozen, encode)


def _cached(s: Settings) -> TextEncoder:
    """States of the last layer as they come out of storage, bfloat16."""
    states = lambda texts: {
        "text": np.zeros((len(texts), s.text.max_tokens, s.text.width), jnp.bfloat16)
    }

    def encode(frozen, batch):
        text = jnp.asarray(batch["text"], jnp.float32)
        return text, jnp.ones(text.shape[:2], bool)

    return TextEncoder("cached", s.text.width, s.text.max_tokens, states, (), encode)


def _random(abstract: Any, dtype: Any) -> Any:
    """Small normal numbers, repeated, in these shapes: what they are costs nothing to draw."""
    draws = (0.02 * np.random.default_rng(0).standard_normal(2**20, np.float32)).astype(dtype)
    return jax.tree.map(lambda leaf: np.resize(draws, leaf.shape), abstract)
