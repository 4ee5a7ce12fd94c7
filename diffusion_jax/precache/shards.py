"""The writing of a store of embeddings: shards one by one, in the end the index and the manifest.

store.py tells the format. A store without its shards in the manifest is unfinished.
"""

import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
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


def finish(path: pathlib.Path, names: Sequence[str]) -> dict[str, Any]:
    """Writes the index and the manifest over the shards `names`; others are removed.

    Needs about 100 bytes of memory a text. Returns the manifest.
    """
    shards = [pretrained.map_safetensors(path / name) for name in names]
    index = _make_index(shards)
    content = _save(index)
    files.write_whole(path / store.INDEX, content)
    digest = hashlib.sha256(content).hexdigest()
    sizes = [os.path.getsize(path / name) for name in names]
    manifest = store.read_manifest(path) | {
        **_totals(index, shards, sum(sizes) + len(content)),
        "index": {"file": store.INDEX, "bytes": len(content), "sha256": digest},
        "shards": [{"file": n, "bytes": size} for n, size in zip(names, sizes, strict=True)],
    }
    files.write_whole(path / store.MANIFEST, json.dumps(manifest, indent=1))
    for stray in {file.name for file in path.glob("shard-*.safetensors")} - set(names):
        (path / stray).unlink(missing_ok=True)
    return manifest


def whole_shards(path: pathlib.Path, names: Sequence[str], *, verify: bool) -> list[str]:
    """Removes the damaged ones of the shards `names`, and returns the others.

    `verify` reads every row and compares its checksum; otherwise only the sizes are looked at.
    """
    return [name for name in names if (path / name).is_file() and _usable(path / name, verify)]


def held_keys(path: pathlib.Path, names: Sequence[str]) -> Shaped[np.ndarray, "N"]:
    """The keys of all texts in the shards `names`, sorted."""
    raw = [pretrained.map_safetensors(path / name)["keys"].view(store.KEY)[:, 0] for name in names]
    return np.sort(np.concatenate([np.zeros(0, store.KEY), *raw]))


def _make_index(shards: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Keys in order, each once, with its shard, first row, number of rows and checksum."""
    keys = np.concatenate([shard["keys"] for shard in shards])
    order = np.argsort(keys.view(store.KEY)[:, 0], kind="stable")
    ordered = keys[order].view(store.KEY)[:, 0]
    order = order[np.concatenate([[True], ordered[1:] != ordered[:-1]])]
    column = lambda part: np.concatenate([part(number) for number in range(len(shards))])[order]
    return {
        "keys": keys[order],
        "shard": column(lambda n: np.full(len(shards[n]["keys"]), n, np.int32)),
        "first": column(lambda n: shards[n]["first"][:-1]),
        "tokens": column(lambda n: np.diff(shards[n]["first"])).astype(np.int32),
        "check": column(lambda n: shards[n]["check"]),
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


def _save(arrays: Mapping[str, np.ndarray]) -> bytes:
    return safetensors.numpy.save({n: np.ascontiguousarray(a) for n, a in arrays.items()})


def _usable(file: pathlib.Path, verify: bool) -> bool:
    try:
        shard = pretrained.map_safetensors(file)
        if not verify:
            return True
        checks = _checks(shard["keys"], shard["first"], shard["values"], shard.get("scales"))
        if np.array_equal(checks, shard["check"]):
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
    return np.array([store.checksum(k, *row) for k, row in zip(keys, rows, strict=True)], np.int64)
