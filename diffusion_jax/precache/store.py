"""Read a store of text embeddings, which holds each distinct text once and finds it by a hash.

A store is a folder. Its shards are safetensors files. A shard with N texts, whose embeddings have T
rows (tokens) of width D without padding, has these arrays: `keys` uint8 [N, 16]; `first` int64
[N + 1], the first row of each text, then T; `check` int64 [N], a CRC-32 of a text's key and rows;
`values` [T, D], the rows; for int8, `scales` bfloat16 [T, G] (see quantize.py); and `errors`
float64 [3], a summary of the rows' errors. `index.safetensors` holds all keys, sorted, with the
position of each key's rows. `manifest.json` names the encoder, lists the shards and holds the
SHA-256 of the index. The manifest is completed last: if it lists no shards, the store is
unfinished.

The format is not ArrayRecord, which has no lookup by key. With this index, reading the rows of a
text is a single copy from the mapped file. The key is a hash of the text and of everything that
determines the rows: encoder, weights, tokenizer, maximum length and dtype.
"""

import functools
import hashlib
import json
import os
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Shaped

from diffusion_jax.files import settings_record
from diffusion_jax.files.safetensors_files import map_safetensors
from diffusion_jax.files.sorted_tables import KEY, KEY_SIZE
from diffusion_jax.precache import quantize
from diffusion_jax.text.encoder import TextArrays, TextEncoder
from diffusion_jax.weights import pretrained

MANIFEST = "manifest.json"
INDEX = "index.safetensors"
FORMATS = {"int8": np.int8, "bfloat16": jnp.bfloat16, "float32": np.float32}
Identity = Mapping[str, Any]
VERSION = 1
_OPEN_SHARDS = 4096  # Shards that are mapped at once; Linux allows 65,530 maps per process.
_SHARD_BYTES, _INDEX_BYTES = 32, 40  # Bytes per text in a shard, without rows, and in the index.
_PROBES = (
    "", "A photo of a corgi riding a bike in Times Square.", "naïve café — 東京 ½ 🙂 &amp; İ\tß",
    "don't; 3.14159 (x) [y] {z} <extra_id_0> </s> #@!?%$^*~`|\\/", "word " * 700,
)  # fmt: skip


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
    return float(tokens * row + _SHARD_BYTES + _INDEX_BYTES)


def command(path: str | os.PathLike[str], *more: str) -> str:
    """Return the shell command that creates or completes the store at `path`, for error messages.

    `more` are further flags of the command.
    """
    flags = " ".join([f"--config.text.store={path}", *more])
    return f"python -m diffusion_jax.precache --config=CONFIG {flags}"


def fingerprint(encoder: TextEncoder) -> dict[str, str]:
    """Return {"weights": HASH, "tokenizer": HASH}, which identifies a text encoder.

    The tokenizer's hash is computed from the token ids of a few fixed texts.
    """
    tokens = hashlib.blake2b(digest_size=16)
    for name, array in sorted(encoder.tokenize(_PROBES).items()):
        tokens.update(f"{name} {array.shape}".encode() + array.tobytes())
    weights = pretrained.digest(encoder.frozen)
    return {"weights": weights, "tokenizer": tokens.hexdigest()}


def check_identity(path: str | os.PathLike[str], stored: Identity, wanted: Identity) -> None:
    """Raise ValueError if a store's identity differs from `wanted`. `path` is the store's folder.

    An identity holds the values that determine embeddings. `stored` is the identity in the store's
    manifest. Fields that `wanted` lacks are not compared.
    """
    if different := settings_record.differences(
        {name: stored.get(name) for name in wanted}, wanted
    ):
        raise ValueError(
            f"the embeddings in {path} were made with other settings ({different}): set the "
            "text group of the config to the stored values, or make another store with\n  "
            f"{command('NEW_FOLDER')}"
        )


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


class Store:
    """A finished store of text embeddings, mapped into memory. Several threads may use it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a store, and check the size of each shard and the SHA-256 of the index.

        Raises:
            FileNotFoundError: A file is missing. The message shows the command that creates it.
            ValueError: A file is damaged, or the store is unfinished.
        """
        self.path = pathlib.Path(path)
        self.manifest = read_manifest(self.path)
        if not self.manifest["shards"]:
            raise ValueError(f"the store {path} is unfinished: continue with\n  {command(path)}")
        for shard in self.manifest["shards"]:
            check_size(self.path / shard["file"], shard["bytes"])
        index = self.manifest["index"]
        check_size(self.path / INDEX, index["bytes"])
        with (self.path / INDEX).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != index["sha256"]:
            raise ValueError(
                f"{self.path / INDEX} is damaged, or does not belong to the manifest: create it "
                f"again with\n  {command(self.path)}"
            )
        self._index = map_safetensors(self.path / INDEX)
        self._keys = self._index["keys"].view(KEY)[:, 0]
        self._shard = functools.lru_cache(_OPEN_SHARDS)(self._map_shard)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def identity(self) -> Identity:
        """The name, options and hashes of the text encoder that made the store."""
        return self.manifest["identity"]

    def find(self, keys: Shaped[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
        """Return the position of each key in the store's index; -1 for a key that is missing."""
        at = np.minimum(np.searchsorted(self._keys, keys), len(self) - 1)
        return np.where(self._keys[at] == keys, at, -1)

    def read(self, texts: Sequence[Any]) -> dict[str, np.ndarray]:
        """Look up the embeddings of B texts, padded with 0 to L = max_tokens.

        Returns:
            "text_values" [B, L, D] in the stored format, "text_mask" bool [B, L], which is False
            for padding, and for int8 "text_scales" [B, L, G].

        Raises:
            ValueError: A text is not in the store, or its rows are damaged.
        """
        keys = keys_of(texts, self.identity)
        places = self.find(keys)
        if (places < 0).any():
            missing = [text for text, at in zip(texts, places, strict=True) if at < 0]
            raise ValueError(
                f"{len(missing)} of {len(texts)} captions are not in the store {self.path}, such "
                f"as {missing[0]!r}: encode the missing ones with\n  {command(self.path)}"
            )
        length, width = self.identity["max_tokens"], self.identity["width"]
        values = np.zeros((len(texts), length, width), FORMATS[self.manifest["format"]])
        batch = {"text_values": values, "text_mask": np.zeros((len(texts), length), bool)}
        if self.manifest["format"] == "int8":
            shape = (len(texts), length, quantize.num_groups(width))
            batch["text_scales"] = np.zeros(shape, jnp.bfloat16)
        for row, at in enumerate(places.tolist()):
            values, scales = self._rows(at, texts[row])
            batch["text_values"][row, : len(values)] = values
            batch["text_mask"][row, : len(values)] = True
            if scales is not None:
                batch["text_scales"][row, : len(values)] = scales
        return batch

    def _rows(self, at: int, text: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the values [L, D] and scales [L, G] of the text at position `at` of the index.

        L is the text's number of tokens. The scales are None unless the format is int8. Raises
        ValueError, which quotes `text`, if the checksum is wrong.
        """
        number, first, tokens, check = (
            int(self._index[name][at]) for name in ("shard", "first", "tokens", "check")
        )
        shard = self._shard(number)
        values = shard["values"][first : first + tokens]
        scales = shard["scales"][first : first + tokens] if "scales" in shard else None
        if checksum(self._index["keys"][at], values, scales) != check:
            file = self.path / self.manifest["shards"][number]["file"]
            raise ValueError(
                f"the embeddings of {text!r} in {file} are damaged: encode the damaged files "
                "again with\n"
                f"  {command(self.path, '--verify')}"
            )
        return values, scales

    def _map_shard(self, number: int) -> dict[str, np.ndarray]:
        return map_safetensors(self.path / self.manifest["shards"][number]["file"])


def encoder(opened: Store) -> TextEncoder:
    """Return a TextEncoder that looks up embeddings in a store and converts them to float32."""

    def encode(frozen: tuple[()], batch: TextArrays):
        del frozen  # The weights that made the embeddings are not needed.
        values, mask = jnp.asarray(batch["text_values"]), jnp.asarray(batch["text_mask"])
        if "text_scales" in batch:
            return quantize.dequantize(values, jnp.asarray(batch["text_scales"])), mask
        return values.astype(jnp.float32), mask

    name, width, length = (opened.identity[k] for k in ("encoder", "width", "max_tokens"))
    return TextEncoder(name, width, length, opened.read, (), encode)


def read_manifest(path: pathlib.Path) -> dict[str, Any]:
    """Return the manifest of a store of text embeddings.

    Raises:
        FileNotFoundError: The manifest is missing.
        ValueError: The manifest is damaged or has another version.
    """
    if not (path / MANIFEST).is_file():
        problem = f"holds no {MANIFEST}" if path.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{path} {problem}: check the path, or make a store of embeddings with\n"
            f"  {command(path)}"
        )
    manifest = pretrained.read_json(path / MANIFEST)
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"the version of {path / MANIFEST} is {manifest.get('version')}, but this code reads "
            f"version {VERSION}: make the store again in another folder"
        )
    return manifest


def check_size(path: pathlib.Path, size: int) -> None:
    """Check the size in bytes of a file of a store.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file has another size.
    """
    actual = path.stat().st_size if path.is_file() else None
    if actual != size:
        state = "is missing" if actual is None else f"has {actual} of {size} bytes"
        kind = FileNotFoundError if actual is None else ValueError
        raise kind(f"{path} {state}: create it again with\n  {command(path.parent)}")


def checksum(key: np.ndarray, values: np.ndarray, scales: np.ndarray | None) -> int:
    """Return the CRC-32 of a text's key, embedding values and scales."""
    check = zlib.crc32(_bytes(values), zlib.crc32(_bytes(key)))
    return check if scales is None else zlib.crc32(_bytes(scales), check)


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data
