"""The writing of a store of embeddings, shard by shard; index.py finishes it.

store.py tells the format. A store without its shards in the manifest is unfinished.
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

from diffusion_jax.machine import files
from diffusion_jax.precache import store
from diffusion_jax.weights import pretrained


class Rows(NamedTuple):
    """The embeddings of some texts, one after the other, as they are stored."""

    tokens: Int[np.ndarray, "N"]
    values: Shaped[np.ndarray, "T D"]
    scales: Shaped[np.ndarray, "T G"] | None
    errors: Float[np.ndarray, "T 2"]
    """The error of each row relative to its length, and its cosine with the encoder's output."""


def start(path: pathlib.Path, identity: store.Identity, format: str) -> dict[str, Any]:
    """The manifest of the store at `path`, which is made if need be.

    ValueError if the store is of another identity or format.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not (path / store.MANIFEST).is_file():
        manifest = {"version": store.VERSION, "identity": identity, "format": format}
        files.write_whole(path / store.MANIFEST, json.dumps(manifest | {"shards": []}, indent=1))
    manifest = store.read_manifest(path)
    store.check_identity(path, manifest["identity"], identity)
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
    """Whether a shard is there and whole; a damaged one is removed.

    `verify` reads every row and compares its checksum; otherwise only the sizes are looked at.
    """
    if not file.is_file():
        return False
    try:
        shard = pretrained.open_safetensors(file)
        if not verify:
            return True
        checks = _checks(shard["keys"], shard["first"], shard["values"], shard.get("scales"))
        if np.array_equal(checks, shard["check"]):
            return True
    except (ValueError, KeyError):
        pass  # Cut off, or damaged in its header.
    file.unlink(missing_ok=True)
    return False


def _summary(errors: Float[np.ndarray, "T 2"]) -> Float[np.ndarray, "3"]:
    """Mean and largest relative error, and the least cosine."""
    relative, cosine = errors.T.astype(np.float64)
    return np.array([relative.mean(), relative.max(), cosine.min()] if len(errors) else [0, 0, 1.0])


def _save(arrays: Mapping[str, np.ndarray]) -> bytes:
    return safetensors.numpy.save({n: np.ascontiguousarray(a) for n, a in arrays.items()})


def _checks(
    keys: np.ndarray, first: np.ndarray, values: np.ndarray, scales: np.ndarray | None
) -> np.ndarray:
    """The checksum of each text of a shard."""
    spans = (slice(*pair) for pair in itertools.pairwise(first.tolist()))
    rows = ((values[s], None if scales is None else scales[s]) for s in spans)
    return np.array([store.checksum(k, *row) for k, row in zip(keys, rows, strict=True)], np.int64)
