"""Make a TextEncoder for batches that contain embeddings, which were computed before training."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from diffusion_jax.text.encoder import TextArrays, TextEncoder


def encoder(width: int, max_tokens: int, name: str = "embeddings") -> TextEncoder:
    """Return a TextEncoder whose inputs are embeddings instead of texts.

    `name` is the name of the encoder that computed the embeddings before training. Batches hold the
    embeddings as "text" and their mask as "text_mask", and `encode` returns both unchanged.
    """

    def encode(frozen: tuple[()], batch: TextArrays):
        del frozen
        return jnp.asarray(batch["text"]), jnp.asarray(batch["text_mask"])

    tokenize = functools.partial(pad, width=width, max_tokens=max_tokens)
    return TextEncoder(name, width, max_tokens, tokenize, (), encode)


def pad(texts: Sequence[Any], *, width: int, max_tokens: int) -> dict[str, np.ndarray]:
    """Stack the embeddings of texts to a batch, cut or padded with zeros to `max_tokens` tokens.

    Args:
        texts: the embeddings of each text, an array [tokens, D] from data/embeddings.py.
        width: the width D that the embeddings must have.
        max_tokens: the number of tokens per text in the batch, L.

    Returns:
        A dict with "text", float32 [B, L, D], and "text_mask", bool [B, L]. The mask is True at
        every stored token, as in NeMo's reader.

    Raises:
        ValueError: a text is a caption instead of an array, or an array has another width.
    """
    text = np.zeros((len(texts), max_tokens, width), np.float32)
    mask = np.zeros((len(texts), max_tokens), bool)
    for row, array in enumerate(texts):
        _check(array, width)
        tokens = array[:max_tokens]
        text[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = True
    return {"text": text, "text_mask": mask}


def _check(array: Any, width: int) -> None:
    if isinstance(array, str):
        raise ValueError(
            f"expected stored embeddings, but the data hold the caption {array!r}: set data.text "
            "(in a mixture, the text of each part) to the embeddings' field, such as npy"
        )
    if not isinstance(array, np.ndarray) or array.shape[1:] != (width,):
        raise ValueError(
            f"the stored embeddings have shape {np.shape(array)}, but text.width={width} expects "
            f"[tokens, {width}]: set text.width to the width of the embeddings"
        )
