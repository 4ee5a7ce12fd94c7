"""Look up text embeddings in a column, where each distinct text is stored once (data/columns.py).

A row is the embedding of a token, without padding: `values` [T, D] and, for int8, `scales` bfloat16
[T, G] (see quantize.py). The key of a text is a hash of the text and of everything that determines
its embeddings: encoder, weights, tokenizer, maximum length, dtype and number format.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from diffusion_jax.data import columns
from diffusion_jax.data.columns import Identity
from diffusion_jax.files.sorted_tables import KEY, KEY_SIZE
from diffusion_jax.precache import quantize
from diffusion_jax.text.encoder import TextArrays, TextEncoder
from diffusion_jax.weights import pretrained

FORMATS = {"int8": np.int8, "bfloat16": jnp.bfloat16, "float32": np.float32}
KIND = columns.Kind(
    "python -m diffusion_jax.precache --config=CONFIG --config.text.store={path}",
    "the text group of the config and --format",
)
_PROBES = (
    "",
    "A photo of a corgi riding a bike in Times Square.",
    "naïve café — 東京 ½ 🙂 &amp; İ\tß",
    "don't; 3.14159 (x) [y] {z} <extra_id_0> </s> #@!?%$^*~`|\\/",
    "word " * 700,
)


def bytes_per_caption(tokens: int | float, width: int, format: str) -> float:
    """Return the number of bytes that an average caption takes in a store, including the index.

    Args:
        tokens: The mean number of tokens of a caption.
        width: The width of the embeddings.
        format: A key of FORMATS.
    """
    row = np.dtype(FORMATS[format]).itemsize * width
    if format == "int8":
        row += 2 * quantize.num_groups(width)
    return float(tokens * row + columns.BYTES_PER_ITEM)


def fingerprint(encoder: TextEncoder) -> dict[str, str]:
    """Return {"weights": HASH, "tokenizer": HASH}, which identifies a text encoder.

    The tokenizer's hash is computed from the token ids of a few fixed texts.
    """
    tokens = hashlib.blake2b(digest_size=16)
    for name, array in sorted(encoder.tokenize(_PROBES).items()):
        tokens.update(f"{name} {array.shape}".encode() + array.tobytes())
    weights = pretrained.digest(encoder.frozen)
    return {"weights": weights, "tokenizer": tokens.hexdigest()}


def keys_of(texts: Sequence[Any], identity: Identity) -> Shaped[np.ndarray, "N"]:
    """Return a 16-byte key for each text: a hash of the text and of the store's identity.

    Raises:
        ValueError: An item is not a string.
    """
    salt = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=32).digest()
    digests = bytearray()
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(
                f"a store of embeddings needs captions, but the data have {type(text).__name__} "
                f"of shape {np.shape(text)}: set data.text=txt, or leave text.store empty"
            )
        data = text.encode("utf-8", "surrogatepass")
        digests += hashlib.blake2b(data, key=salt, digest_size=KEY_SIZE).digest()
    return np.frombuffer(bytes(digests), KEY)


class Store(columns.Column):
    """A finished store of text embeddings. Several threads may use it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a store; see Column."""
        super().__init__(path, KIND)

    def read(self, texts: Sequence[Any]) -> dict[str, np.ndarray]:
        """Look up the embeddings of B texts, padded with 0 to L = max_tokens.

        Returns:
            "text_values" [B, L, D] in the stored format, "text_mask" bool [B, L], which is False
            for padding, and for int8 "text_scales" [B, L, G].

        Raises:
            ValueError: A text is not in the store, or its rows are damaged.
        """
        places = self.find(keys_of(texts, self.identity)).tolist()
        if missing := [text for text, at in zip(texts, places, strict=True) if at < 0]:
            raise ValueError(
                f"{len(missing)} of {len(texts)} captions are not in the store {self.path}, such "
                f"as {missing[0]!r}: encode the missing ones with{KIND.make(self.path)}"
            )
        format, length, width = (self.identity[k] for k in ("format", "max_tokens", "width"))
        zeros = lambda width, dtype: np.zeros((len(texts), length, width), dtype)
        batch = {"text_values": zeros(width, FORMATS[format])}
        if format == "int8":
            batch["text_scales"] = zeros(quantize.num_groups(width), jnp.bfloat16)
        mask = np.zeros((len(texts), length), bool)
        for row, (at, text) in enumerate(zip(places, texts, strict=True)):
            for name, array in self.rows(at, repr(text)).items():
                batch[f"text_{name}"][row, : len(array)] = array
                mask[row, : len(array)] = True
        return {**batch, "text_mask": mask}

    def encoder(self) -> TextEncoder:
        """Return a TextEncoder that looks up embeddings and converts them to float32."""

        def encode(frozen: tuple[()], batch: TextArrays):
            del frozen  # The weights that made the embeddings are not needed.
            values, mask = jnp.asarray(batch["text_values"]), jnp.asarray(batch["text_mask"])
            if "text_scales" in batch:
                return quantize.dequantize(values, jnp.asarray(batch["text_scales"])), mask
            return values.astype(jnp.float32), mask

        name, width, length = (self.identity[k] for k in ("encoder", "width", "max_tokens"))
        return TextEncoder(name, width, length, self.read, (), encode)
