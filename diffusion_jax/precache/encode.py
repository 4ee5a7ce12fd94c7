"""Encode many texts in batches of similar length, and return embeddings in a store's format."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int, Shaped

from diffusion_jax.devices import sharding
from diffusion_jax.devices.programs import announced
from diffusion_jax.precache import quantize
from diffusion_jax.precache.store import FORMATS
from diffusion_jax.text.encoder import TextArrays, TextEncoder

_STEP = 8  # The smallest difference between the padded lengths of batches, in tokens.


class EmbeddingRows(NamedTuple):
    """The embeddings of N texts, one after the other, in the format of a store.

    T is the number of tokens of all texts, D the width, and G the number of scales per token.
    """

    tokens: Int[np.ndarray, "N"]
    values: Shaped[np.ndarray, "T D"]
    scales: Shaped[np.ndarray, "T G"] | None
    errors: Float[np.ndarray, "T 2"]
    """Each token's relative error, and its cosine similarity to the text encoder's output."""


def make_encode(
    encoder: TextEncoder, frozen: Any, mesh: Mesh, format: str, batch_tokens: int
) -> Callable[[Sequence[str]], EmbeddingRows]:
    """Return a function encode(texts) that computes embeddings in a store's format.

    If the encoder allows it (TextEncoder.cut), texts of similar length are encoded together with
    little padding, because most captions are far shorter than max_tokens. This does not change the
    embeddings.

    Args:
        encoder: The text encoder.
        frozen: The encoder's weights, encoder.frozen, placed on the devices of `mesh`.
        mesh: The devices.
        format: A key of store.FORMATS.
        batch_tokens: Tokens per batch, including padding.
    """
    where = sharding.batch_sharding(mesh)
    program = jax.jit(functools.partial(_encode, encoder, format), out_shardings=where)
    program = announced(program, f"the encoder {encoder.name}")

    def encode(texts):
        tokens = encoder.tokenize(texts)
        rows: list[Any] = [None] * len(texts)
        running: list[Any] = []
        for part, length in _batches(_lengths(encoder, tokens), batch_tokens, mesh.size):
            batch = {name: sharding.place(array[part, :length], where) for name, array in tokens.items()}
            running.append((part, program(frozen, batch)))
            if len(running) > 1:  # The devices already work on the next batch.
                _take(rows, *running.pop(0))
        for last in running:
            _take(rows, *last)
        return _join(rows)

    return encode


def on_own_devices(encoder: TextEncoder, format: str, batch_tokens: int) -> Callable[[Sequence[str]], EmbeddingRows]:
    """Return a function encode(texts) as `make_encode` does, but for this process's devices only.

    No process waits for another, because each has its own copy of the weights. `batch_tokens` is
    the number of tokens per device and batch, and `format` is a key of store.FORMATS.
    """
    mesh = sharding.make_mesh(1, -1, 1, jax.local_devices())
    frozen = sharding.place_all(encoder.frozen, mesh, [("", sharding.FSDP)])
    return make_encode(encoder, frozen, mesh, format, batch_tokens * mesh.size)


def lengths_of(encoder: TextEncoder, texts: Sequence[str]) -> Int[np.ndarray, "N"]:
    """Return how many tokens the encoder encodes for each text.

    The number is at most encoder.max_tokens. If encoder.cut is False, padding is counted too.
    """
    lengths = _lengths(encoder, encoder.tokenize(texts))
    return np.minimum(lengths, encoder.max_tokens)


def _encode(encoder: TextEncoder, format: str, frozen: Any, batch: TextArrays) -> dict[str, jax.Array]:
    """Encode a batch [B, L] of texts.

    Returns:
        "values" [B, L, D] in the store's format; "errors" [B, L, 2], each token's relative error
        and cosine similarity after quantisation; "tokens" [B], the number of tokens of each text;
        and for int8 "scales" [B, L, G].
    """
    text, mask = encoder.encode(frozen, batch)
    text = text.astype(jnp.float32)
    if format == "int8":
        values, scales = quantize.quantize(text)
        restored, more = quantize.dequantize(values, scales), {"scales": scales}
    else:
        values = text.astype(FORMATS[format])
        restored, more = values.astype(jnp.float32), {}
    errors = jnp.stack(quantize.errors(text, restored), axis=-1)
    return {"values": values, "errors": errors, "tokens": mask.sum(1), **more}


def _lengths(encoder: TextEncoder, tokens: TextArrays) -> Int[np.ndarray, "N"]:
    if not encoder.cut:
        ids = next(iter(tokens.values()))
        return np.full(len(ids), ids.shape[1])
    return tokens["text_mask"].sum(1)


def _batches(lengths: Int[np.ndarray, "N"], batch_tokens: int, ways: int) -> Iterator[tuple[Int[np.ndarray, "B"], int]]:
    """Yield batches of texts as (indices of texts, padded length in tokens).

    A batch has at most about `batch_tokens` tokens, and its size is a multiple of `ways`, the
    number of devices. The last batch of a length is filled with copies of its first text. The
    encoder is compiled once per length. To keep lengths few, they are multiples of 8 up to 64, of
    16 up to 128, of 32 up to 256 and so on.
    """
    order = np.argsort(lengths, kind="stable")
    octave = 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    step = np.maximum(_STEP, octave // 8)
    padded = -(-np.maximum(lengths, 1) // step) * step
    for length in np.unique(padded).tolist():
        rows = max(1, batch_tokens // length // ways) * ways
        part = order[padded[order] == length]
        for start in range(0, len(part), rows):
            batch = part[start : start + rows]
            yield np.concatenate([batch, np.full(rows - len(batch), batch[0])]), length


def _take(rows: list[Any], part: Int[np.ndarray, "B"], encoded: dict[str, jax.Array]) -> None:
    """Store each text of an encoded batch in `rows`, as (number of tokens, unpadded arrays).

    `part` holds the positions of the texts in `rows`.
    """
    encoded = jax.device_get(encoded)
    for i, text in enumerate(part.tolist()):
        tokens = int(encoded["tokens"][i])
        arrays = {n: a[i, :tokens].copy() for n, a in encoded.items() if n != "tokens"}
        rows[text] = tokens, arrays


def _join(rows: Sequence[Any]) -> EmbeddingRows:
    tokens = np.array([count for count, _ in rows], np.int64)
    column = lambda name: np.concatenate([arrays[name] for _, arrays in rows])
    scales = column("scales") if "scales" in rows[0][1] else None
    return EmbeddingRows(tokens, column("values"), scales, column("errors"))
