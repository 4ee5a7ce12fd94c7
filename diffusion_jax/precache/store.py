"""A store of embeddings: each different text once, without padding, found by a hash.

A store is a folder. Its shards are safetensors files: `keys` uint8 [N, 16], `first` int64 [N + 1],
the row where each text begins, `check` int64 [N], a CRC-32 of a text's key and rows, and the rows
themselves, `values` [T, D] and, for int8, `scales` bfloat16 [T, G] (see quantize.py); `errors`
float64 [3] is that of the rows. `index.safetensors` has all keys, sorted, and where their rows
are. `manifest.json` says by what the rows were made, lists the shards and has the SHA-256 of the
index; it is written last, and a store without its shards in it is unfinished.

Safetensors and not ArrayRecord, since texts are looked up by key, for which that format has
nothing: an index is needed either way, and rows of one width need no further framing to be read by
a single copy from the mapped file. The key is a hash of the text and of everything that makes its
rows: encoder, weights, tokenizer, length rule, type.
"""

import functools
import hashlib
import itertools
import json
import os
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Shaped

from diffusion_jax.machine import files
from diffusion_jax.precache import quantize
from diffusion_jax.text.encoder import Batch, TextEncoder
from diffusion_jax.weights import pretrained

MANIFEST = "manifest.json"
INDEX = "index.safetensors"
FORMATS = {"int8": np.int8, "bfloat16": jnp.bfloat16, "float32": np.float32}
Identity = Mapping[str, Any]
_VERSION = 1
_KEY_SIZE = 16
KEY = np.dtype(f"S{_KEY_SIZE}")
_OPEN_SHARDS = 4096  # Mapped at once; Linux allows a process 65,530 maps.
_PROBES = (
    "", "A photo of a corgi riding a bike in Times Square.", "naïve café — 東京 ½ 🙂 &amp; İ\tß",
    "don't; 3.14159 (x) [y] {z} <extra_id_0> </s> #@!?%$^*~`|\\/", "word " * 700,
)  # fmt: skip


class Rows(NamedTuple):
    """The embeddings of some texts, one after the other, as they are stored."""

    tokens: Int[np.ndarray, "N"]
    values: Shaped[np.ndarray, "T D"]
    scales: Shaped[np.ndarray, "T G"] | None
    errors: Float[np.ndarray, "T 2"]
    """Of each row: the error relative to its length, and the cosine with what was encoded."""


def command(path: str | os.PathLike[str], *more: str) -> str:
    """What makes or completes the store at `path`, for error messages."""
    flags = " ".join([f"--config.text.store={path}", *more])
    return f"python -m diffusion_jax.precache --config=CONFIG {flags}"


def fingerprint(encoder: TextEncoder) -> dict[str, str]:
    """Digests of an encoder's weights and tokenizer (the ids of some texts), in milliseconds."""
    tokens = hashlib.blake2b(digest_size=16)
    for name, array in sorted(encoder.tokenize(_PROBES).items()):
        tokens.update(f"{name} {array.shape}".encode() + array.tobytes())
    weights = pretrained.digest(encoder.frozen)
    return {"weights": weights, "tokenizer": tokens.hexdigest()}


def check_identity(path: str | os.PathLike[str], stored: Identity, wanted: Identity) -> None:
    """ValueError unless the store was made with everything that `wanted` names."""
    differing = [
        f"{name} {stored.get(name)!r} there, {value!r} wanted"
        for name, value in wanted.items()
        if stored.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"the embeddings in {path} were made in another way ({'; '.join(differing)}): set the "
            f"text group of the config to what is there, or make another store with\n  "
            f"{command('NEW_FOLDER')}"
        )


def keys_of(texts: Sequence[Any], identity: Identity) -> Shaped[np.ndarray, "N"]:
    """The key of each text, bytes [16]; ValueError for what is no text."""
    salt = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=32).digest()
    digests = bytearray()
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(
                f"a store of embeddings is looked up by captions, and got {type(text).__name__} "
                f"of shape {np.shape(text)}: set data.text=txt, or leave text.store empty"
            )
        data = text.encode("utf-8", "surrogatepass")
        digests += hashlib.blake2b(data, key=salt, digest_size=_KEY_SIZE).digest()
    return np.frombuffer(bytes(digests), KEY)


class Store:
    """A finished store, mapped into memory; safe to use from many threads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Checks that all is there, each shard by its size and the index by its SHA-256.

        FileNotFoundError or ValueError that says how to make what is missing.
        """
        self.path = pathlib.Path(path)
        self.manifest = read_manifest(self.path)
        if not self.manifest["shards"]:
            raise ValueError(f"the store {path} is unfinished: go on with\n  {command(path)}")
        for shard in self.manifest["shards"]:
            check_size(self.path / shard["file"], shard["bytes"])
        self._index = _open_index(self.path, self.manifest["index"])
        self._keys = self._index["keys"].view(KEY)[:, 0]
        self._shard = functools.lru_cache(_OPEN_SHARDS)(self._map_shard)

    def __len__(self) -> int:
        """How many texts there are."""
        return len(self._keys)

    @property
    def identity(self) -> Identity:
        """What made the rows."""
        return self.manifest["identity"]

    def find(self, keys: Shaped[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
        """The number of each key's text, -1 where there is none."""
        at = np.minimum(np.searchsorted(self._keys, keys), len(self) - 1)
        return np.where(self._keys[at] == keys, at, -1)

    def read(self, texts: Sequence[Any]) -> dict[str, np.ndarray]:
        """The rows of texts as stored, padded with 0 to the identity's max_tokens L.

        "text_values" [B, L, D], for int8 also "text_scales" [B, L, G], and "text_mask" [B, L].
        ValueError that says what to do for a text that is not there and for damaged rows.
        """
        keys = keys_of(texts, self.identity)
        found = self.find(keys)
        if (found < 0).any():
            missing = [text for text, at in zip(texts, found, strict=True) if at < 0]
            raise ValueError(
                f"{len(missing)} of {len(texts)} captions are not in the store {self.path}, first "
                f"{missing[0]!r}: encode them, and them alone, with\n  {command(self.path)}"
            )
        batch = self._empty(len(texts))
        for row, at in enumerate(found.tolist()):
            values, scales = self._rows(at, texts[row])
            batch["text_values"][row, : len(values)] = values
            batch["text_mask"][row, : len(values)] = True
            if scales is not None:
                batch["text_scales"][row, : len(values)] = scales
        return batch

    def _rows(self, at: int, text: str) -> tuple[np.ndarray, np.ndarray | None]:
        """What is stored of one text; ValueError if it does not have its checksum."""
        number, first, tokens, check = (
            int(self._index[name][at]) for name in ("shard", "first", "tokens", "check")
        )
        shard = self._shard(number)
        values = shard["values"][first : first + tokens]
        scales = shard["scales"][first : first + tokens] if "scales" in shard else None
        if _check(self._index["keys"][at], values, scales) != check:
            file = self.path / self.manifest["shards"][number]["file"]
            raise ValueError(
                f"{file} is damaged where the embeddings of {text!r} are: encode it again with\n"
                f"  {command(self.path, '--verify')}"
            )
        return values, scales

    def _empty(self, rows: int) -> dict[str, np.ndarray]:
        length, width = self.identity["max_tokens"], self.identity["width"]
        values = np.zeros((rows, length, width), FORMATS[self.manifest["format"]])
        batch = {"text_values": values, "text_mask": np.zeros((rows, length), bool)}
        if self.manifest["format"] == "int8":
            shape = (rows, length, quantize.num_groups(width))
            batch["text_scales"] = np.zeros(shape, jnp.bfloat16)
        return batch

    def _map_shard(self, number: int) -> dict[str, np.ndarray]:
        return pretrained.map_safetensors(self.path / self.manifest["shards"][number]["file"])


def encoder(opened: Store) -> TextEncoder:
    """A TextEncoder that looks its texts up: rows travel as stored and become floats on devices."""

    def encode(frozen: tuple[()], batch: Batch):
        del frozen  # What made the rows stays away.
        values, mask = jnp.asarray(batch["text_values"]), jnp.asarray(batch["text_mask"])
        if "text_scales" in batch:
            return quantize.dequantize(values, jnp.asarray(batch["text_scales"])), mask
        return values.astype(jnp.float32), mask

    name, width, length = (opened.identity[k] for k in ("encoder", "width", "max_tokens"))
    return TextEncoder(name, width, length, opened.read, (), encode)


def read_manifest(path: pathlib.Path) -> dict[str, Any]:
    """The manifest of a store; FileNotFoundError or ValueError that says what is wrong."""
    if not (path / MANIFEST).is_file():
        held = "is a folder without" if path.is_dir() else "does not exist: no"
        raise FileNotFoundError(
            f"{path} {held} {MANIFEST}: check the path, or make a store of embeddings with\n"
            f"  {command(path)}"
        )
    manifest = pretrained.read_json(path / MANIFEST)
    if manifest.get("version") != _VERSION:
        raise ValueError(f"{path / MANIFEST} is of version {manifest.get('version')}, not 1")
    return manifest


def start(path: pathlib.Path, identity: Identity, format: str) -> dict[str, Any]:
    """The manifest of the store at `path`, which is made if need be.

    ValueError if the store is of another identity or format.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not (path / MANIFEST).is_file():
        manifest = {"version": _VERSION, "identity": identity, "format": format}
        files.write_whole(path / MANIFEST, json.dumps(manifest | {"shards": []}, indent=1))
    manifest = read_manifest(path)
    check_identity(path, manifest["identity"], identity)
    if manifest["format"] != format:
        raise ValueError(
            f"the store {path} is of format {manifest['format']!r}, not {format!r}: "
            "take the same, or another folder"
        )
    return manifest


def shard_name(keys: Shaped[np.ndarray, "N"]) -> str:
    """The file that holds these texts and no others: so that no two can hold the same."""
    return f"shard-{hashlib.blake2b(keys.tobytes(), digest_size=12).hexdigest()}.safetensors"


def write_shard(path: pathlib.Path, keys: Shaped[np.ndarray, "N"], rows: Rows) -> pathlib.Path:
    """A shard in the store at `path`, whole or not at all; one that is there already is left."""
    first = np.concatenate([[0], np.cumsum(rows.tokens)]).astype(np.int64)
    raw = keys.view(np.uint8).reshape(-1, _KEY_SIZE)
    check = _checks(raw, first, rows.values, rows.scales)
    arrays = {"keys": raw, "first": first, "check": check}
    arrays |= {"errors": _summary(rows.errors), "values": rows.values}
    if rows.scales is not None:
        arrays["scales"] = rows.scales
    target = path / shard_name(keys)
    files.write_new(target, serialize(arrays))
    return target


def finish(path: pathlib.Path, names: Sequence[str]) -> dict[str, Any]:
    """Writes the index and the manifest over the shards `names`; others are removed.

    Needs about 100 bytes of memory a text. Returns the manifest.
    """
    shards = [pretrained.map_safetensors(path / name) for name in names]
    index = _make_index(shards)
    content = serialize(index)
    files.write_whole(path / INDEX, content)
    sizes = [os.path.getsize(path / name) for name in names]
    manifest = read_manifest(path) | {
        **_totals(index, shards, sum(sizes) + len(content)),
        "index": {"file": INDEX, "bytes": len(content), "sha256": _sha256(content)},
        "shards": [{"file": n, "bytes": size} for n, size in zip(names, sizes, strict=True)],
    }
    files.write_whole(path / MANIFEST, json.dumps(manifest, indent=1))
    for stray in {file.name for file in path.glob("shard-*.safetensors")} - set(names):
        (path / stray).unlink(missing_ok=True)
    return manifest


def whole_shards(path: pathlib.Path, names: Sequence[str], *, verify: bool) -> list[str]:
    """Those of the shards `names` that can be used; the damaged ones are removed.

    `verify` reads every row and compares its checksum; otherwise only the sizes are looked at.
    """
    return [name for name in names if (path / name).is_file() and _usable(path / name, verify)]


def held_keys(path: pathlib.Path, names: Sequence[str]) -> Shaped[np.ndarray, "N"]:
    """The keys of all texts in the shards `names`, sorted."""
    raw = [pretrained.map_safetensors(path / name)["keys"].view(KEY)[:, 0] for name in names]
    return np.sort(np.concatenate([np.zeros(0, KEY), *raw]))


def check_size(path: pathlib.Path, size: int) -> None:
    """ValueError or FileNotFoundError unless the file has this size."""
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        state = "is missing" if found is None else f"has {found} of {size} bytes"
        kind = FileNotFoundError if found is None else ValueError
        raise kind(f"{path} {state}: make it again with\n  {command(path.parent)}")


def serialize(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A safetensors file. By hand, since the library's numpy side knows no bfloat16 everywhere."""
    header, parts, end = {}, [], 0
    # The widest types first, so that each begins at a multiple of its size.
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize):
        span = [end, end := end + array.nbytes]
        header[name] = {"dtype": _TYPES[array.dtype], "shape": array.shape, "data_offsets": span}
        parts.append(np.ascontiguousarray(array).tobytes())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


_TYPES = {
    np.dtype(dtype): name
    for name, dtype in (
        ("U8", np.uint8), ("I8", np.int8), ("I32", np.int32), ("I64", np.int64),
        ("BF16", jnp.bfloat16), ("F32", np.float32), ("F64", np.float64),
    )
}  # fmt: skip


def _make_index(shards: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Keys in order, each once, with its shard, first row, number of rows and checksum."""
    keys = np.concatenate([shard["keys"] for shard in shards])
    order = np.argsort(keys.view(KEY)[:, 0], kind="stable")
    ordered = keys[order].view(KEY)[:, 0]
    order = order[np.concatenate([[True], ordered[1:] != ordered[:-1]])]
    column = lambda make, dtype: np.concatenate([make(shard) for shard in shards])[order].astype(
        dtype
    )
    return {
        "keys": keys[order],
        "shard": np.repeat(np.arange(len(shards)), [len(s["keys"]) for s in shards])[order].astype(
            np.int32
        ),
        "first": column(lambda s: s["first"][:-1], np.int64),
        "tokens": column(lambda s: np.diff(s["first"]), np.int32),
        "check": column(lambda s: s["check"], np.int64),
    }


def _totals(index, shards, size: int) -> dict[str, Any]:
    """Numbers of a store for its manifest: sizes, and the errors of its rows."""
    captions, tokens = len(index["keys"]), int(index["tokens"].sum())
    errors = np.array([shard["errors"] for shard in shards])
    weights = [max(1, int(shard["first"][-1])) for shard in shards]
    return {
        "captions": captions,
        "tokens": tokens,
        "bytes_per_caption": size / captions,
        "mean_relative_error": float(np.average(errors[:, 0], weights=weights)),
        "largest_relative_error": float(errors[:, 1].max()),
        "least_cosine": float(errors[:, 2].min()),
    }


def _summary(errors: Float[np.ndarray, "T 2"]) -> Float[np.ndarray, "3"]:
    """Mean and largest relative error, and the least cosine."""
    relative, cosine = errors.T.astype(np.float64)
    return np.array([relative.mean(), relative.max(), cosine.min()] if len(errors) else [0, 0, 1.0])


def _open_index(path: pathlib.Path, entry: Mapping[str, Any]) -> dict[str, np.ndarray]:
    check_size(path / INDEX, entry["bytes"])
    with (path / INDEX).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry["sha256"]:
        raise ValueError(
            f"{path / INDEX} is damaged, or of another run than the manifest: make it again with\n"
            f"  {command(path)}"
        )
    return pretrained.map_safetensors(path / INDEX)


def _usable(file: pathlib.Path, verify: bool) -> bool:
    try:
        shard = pretrained.map_safetensors(file)
        if not verify:
            return True
        found = _checks(shard["keys"], shard["first"], shard["values"], shard.get("scales"))
        if np.array_equal(found, shard["check"]):
            return True
    except (ValueError, KeyError):
        pass  # Cut off, or damaged in its header.
    file.unlink(missing_ok=True)
    return False


def _checks(
    keys: np.ndarray, first: np.ndarray, values: np.ndarray, scales: np.ndarray | None
) -> np.ndarray:
    """The checksum of each text of a shard."""
    spans = (slice(*pair) for pair in itertools.pairwise(first.tolist()))
    rows = ((values[s], None if scales is None else scales[s]) for s in spans)
    return np.array([_check(k, *row) for k, row in zip(keys, rows, strict=True)], np.int64)


def _check(key: np.ndarray, values: np.ndarray, scales: np.ndarray | None) -> int:
    check = zlib.crc32(_bytes(values), zlib.crc32(_bytes(key)))
    return check if scales is None else zlib.crc32(_bytes(scales), check)


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
