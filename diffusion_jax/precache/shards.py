"""Write the shards of a store of embeddings; index.py finishes the store.

store.py describes the format. A store whose manifest lists no shards is unfinished.
"""

import hashlib
import itertools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from jaxtyping import Float, Int, Shaped

from diffusion_jax import files
from diffusion_jax.files import safetensors_files
from diffusion_jax.precache import store


class EmbeddingRows(NamedTuple):
    """The embeddings of N texts, one after the other, in the format of a store.

    T is the number of tokens of all texts, D the width, and G the number of scales per token.
    """

    tokens: Int[np.ndarray, "N"]
    values: Shaped[np.ndarray, "T D"]
    scales: Shaped[np.ndarray, "T G"] | None
    errors: Float[np.ndarray, "T 2"]
    """Each token's relative error, and its cosine similarity to the text encoder's output."""


def start(path: pathlib.Path, identity: store.Identity, format: str) -> dict[str, Any]:
    """Create the store at `path` if it is missing, and return its manifest.

    Raises:
        ValueError: The store was made with another text encoder or has another format.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not (path / store.MANIFEST).is_file():
        manifest = {"version": store.VERSION, "identity": identity, "format": format}
        files.write_whole(path / store.MANIFEST, json.dumps(manifest | {"shards": []}, indent=1))
    manifest = store.read_manifest(path)
    store.check_identity(path, manifest["identity"], identity)
    if manifest["format"] != format:
        raise ValueError(
            f"the store {path} has the format {manifest['format']!r}, not {format!r}: "
            f"use the same format (--format={manifest['format']}), or another folder "
            "(--config.text.store)"
        )
    return manifest


def shard_name(keys: Shaped[np.ndarray, "N"]) -> str:
    """Return the file name of the shard with these keys, which contains a hash of the keys."""
    return f"shard-{hashlib.blake2b(keys.tobytes(), digest_size=12).hexdigest()}.safetensors"


def write_shard(
    path: pathlib.Path, keys: Shaped[np.ndarray, "N"], rows: EmbeddingRows
) -> pathlib.Path:
    """Write a shard atomically unless it exists, and return its path.

    Args:
        path: The folder of the store.
        keys: The keys of the N texts.
        rows: The embeddings of these texts.
    """
    first = np.concatenate([[0], np.cumsum(rows.tokens)]).astype(np.int64)
    raw = keys.view(np.uint8).reshape(-1, store.KEY_SIZE)
    check = _checks(raw, first, rows.values, rows.scales)
    arrays = {"keys": raw, "first": first, "check": check}
    arrays |= {"errors": _summary(rows.errors), "values": rows.values}
    if rows.scales is not None:
        arrays["scales"] = rows.scales
    target = path / shard_name(keys)
    files.write_new(target, _save(arrays))
    return target


def usable(file: pathlib.Path, verify: bool) -> bool:
    """Return whether a shard exists and is undamaged. A damaged shard is deleted.

    With `verify`, the checksum of every text is compared. Otherwise, only the header and the file
    size are checked.
    """
    if not file.is_file():
        return False
    try:
        shard = safetensors_files.open_safetensors(file)
        if not verify:
            return True
        checks = _checks(shard["keys"], shard["first"], shard["values"], shard.get("scales"))
        if np.array_equal(checks, shard["check"]):
            return True
    except (ValueError, KeyError):
        pass  # The file is truncated, or its header is damaged.
    file.unlink(missing_ok=True)
    return False


def _summary(errors: Float[np.ndarray, "T 2"]) -> Float[np.ndarray, "3"]:
    """Return the mean relative error, the largest one, and the least cosine similarity."""
    relative, cosine = errors.T.astype(np.float64)
    return np.array([relative.mean(), relative.max(), cosine.min()] if len(errors) else [0, 0, 1.0])


def _save(arrays: Mapping[str, np.ndarray]) -> bytes:
    return safetensors.numpy.save({n: np.ascontiguousarray(a) for n, a in arrays.items()})


def _checks(
    keys: np.ndarray, first: np.ndarray, values: np.ndarray, scales: np.ndarray | None
) -> np.ndarray:
    spans = (slice(*pair) for pair in itertools.pairwise(first.tolist()))
    rows = ((values[s], None if scales is None else scales[s]) for s in spans)
    return np.array([store.checksum(k, *row) for k, row in zip(keys, rows, strict=True)], np.int64)
