"""Embeddings that an encoder made before training: batches hold what data/embeddings.py reads."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from diffusion_jax.text.encoder import Batch, TextEncoder


def encoder(width: int, max_tokens: int, name: str = "embeddings") -> TextEncoder:
    """A stand-in for the encoder `name`, whose texts are arrays that it made.

    Batches hold "text" and "text_mask", which `encode` hands on.
    """

    def encode(frozen: tuple[()], batch: Batch):
        del frozen
        return jnp.asarray(batch["text"]), jnp.asarray(batch["text_mask"])

    tokenize = functools.partial(pad, width=width, max_tokens=max_tokens)
    return TextEncoder(name, width, max_tokens, tokenize, (), encode)


def pad(texts: Sequence[Any], *, width: int, max_tokens: int) -> dict[str, np.ndarray]:
    """Arrays [tokens, D] to "text" float32 [B, L, D], cut or filled with 0, and "text_mask" [B, L].

    The mask is True for every stored token: NeMo's reader does the same. ValueError for a caption
    in place of an array, or another width.
    """
    text = np.zeros((len(texts), max_tokens, width), np.float32)
    mask = np.zeros((len(texts), max_tokens), bool)
    for row, array in enumerate(texts):
        _check(array, width)
        kept = array[:max_tokens]
        text[row, : len(kept)] = kept
        mask[row, : len(kept)] = True
    return {"text": text, "text_mask": mask}


def _check(array: Any, width: int) -> None:
    if isinstance(array, str):
        raise ValueError(
            f"training on stored embeddings got the caption {array!r}: it needs embeddings. Say "
            "where they are with data.text (for example npy), in each part of a mixture"
        )
    if not isinstance(array, np.ndarray) or array.shape[1:] != (width,):
        raise ValueError(
            f"embeddings of shape {np.shape(array)}: the text encoder expects [tokens, {width}]"
        )
