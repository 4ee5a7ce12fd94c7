"""Embeddings that were computed before training and stored beside the images.

A file holds one text as an array [tokens, width] without padding, of any float type: .npy, .npz or
.safetensors. Pickles can run any code when they are opened, so they are never read.
"""

import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from diffusion_jax.text.encoder import Batch, TextEncoder

SUFFIXES = ("npy", "npz", "safetensors")


def encoder(width: int, max_tokens: int) -> TextEncoder:
    """A TextEncoder whose batches hold "text" and "text_mask", and whose `encode` hands them on."""

    def encode(frozen: tuple[()], batch: Batch):
        del frozen
        return jnp.asarray(batch["text"]), jnp.asarray(batch["text_mask"])

    tokenize = functools.partial(pad, width=width, max_tokens=max_tokens)
    return TextEncoder("precomputed", width, max_tokens, tokenize, (), encode)


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


def read(contents: bytes, name: str) -> Float[np.ndarray, "L D"]:
    """The array [tokens, width] of one file; `name` tells its format and stands in the errors.

    Of several arrays it is the one called "encodings", also at the end of a path such as NeMo's
    "embeddings_t5_xxl/encodings". ValueError if there is none, or it is no matrix of floats.
    """
    suffix = name.rsplit(".")[-1].lower()
    check_suffix(suffix)
    try:
        array = _READERS[suffix](contents)
    except Exception as error:  # Damaged files fail in ways of their own.
        raise ValueError(f"cannot read the embeddings {name}: {error}") from error
    if array.ndim != 2 or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"the embeddings {name} are {array.dtype}{list(array.shape)}: "
            "they must be floats [tokens, width]"
        )
    return array.astype(np.float32)


def check_suffix(text: str) -> None:
    """ValueError unless texts of this suffix are captions or embeddings that can be read."""
    last = text.rsplit(".")[-1]
    if last in ("pickle", "pkl", "pt", "pth"):
        raise ValueError(
            f"texts of suffix {text!r} are pickles, which can run any code when opened: convert "
            "them once to .npy with numpy.save(file, data['embeddings_t5_xxl']['encodings']), "
            "as docs/data.md shows"
        )
    if last != "txt" and last not in SUFFIXES:
        raise ValueError(
            f"texts of suffix {text!r}: it must end in txt (captions) or {', '.join(SUFFIXES)} "
            "(precomputed embeddings)"
        )


def _check(array: Any, width: int) -> None:
    if isinstance(array, str):
        raise ValueError(
            f"the text encoder 'precomputed' got the caption {array!r}: it needs embeddings. "
            "Say where they are with data.text (for example npy), or take the encoder 'hashed'"
        )
    if not isinstance(array, np.ndarray) or array.shape[1:] != (width,):
        raise ValueError(
            f"embeddings of shape {np.shape(array)}: the text encoder expects [tokens, {width}]"
        )


def _read_npz(contents: bytes) -> np.ndarray:
    with np.load(io.BytesIO(contents), allow_pickle=False) as arrays:
        return _choose(arrays)


def _read_safetensors(contents: bytes) -> np.ndarray:
    import safetensors.numpy  # Few data sets need it.

    return _choose(safetensors.numpy.load(contents))


def _choose(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    names = [name for name in arrays if name.rsplit("/")[-1] == "encodings"] or list(arrays)
    if len(names) != 1:
        raise ValueError(f"it holds the arrays {list(arrays)}: call the right one 'encodings'")
    return arrays[names[0]]


_READERS = {
    "npy": lambda contents: np.load(io.BytesIO(contents), allow_pickle=False),
    "npz": _read_npz,
    "safetensors": _read_safetensors,
}
