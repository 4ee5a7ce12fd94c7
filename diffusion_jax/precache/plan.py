"""Which captions of a data set are still to be encoded: all workers make the same plan."""

import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from diffusion_jax.data.pictures import Pictures
from diffusion_jax.machine import files
from diffusion_jax.precache import store
from diffusion_jax.precache.workers import Share

_CHUNK = 2**16  # Captions whose keys one file holds.
_READ = 256  # Captions that a thread reads at a time.


class Captions(NamedTuple):
    """A list of captions: a config's prompts or a file's lines, then those of a data set."""

    prompts: Sequence[str]
    data: Pictures | None
    num_data: int
    threads: int

    def __len__(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The number of captions, repeated ones counted each time."""
        return len(self.prompts) + self.num_data

    def read(self, numbers: Int[np.ndarray, "N"]) -> list[Any]:
        """The captions of these numbers, read by several threads."""
        with ThreadPoolExecutor(max(1, self.threads)) as threads:
            parts = [numbers[i : i + _READ] for i in range(0, len(numbers), _READ)]
            return [text for part in threads.map(self._read, parts) for text in part]

    def _read(self, numbers: Int[np.ndarray, "N"]) -> list[Any]:
        first = len(self.prompts)  # Of the data set.
        texts = [self.prompts[i] for i in numbers[numbers < first].tolist()]
        if self.data is None or (numbers < first).all():
            return texts
        return texts + list(self.data.texts(numbers[numbers >= first] - first))


def read_keys(
    captions: Captions,
    folder: pathlib.Path,
    identity: store.Identity,
    share: Share,
    report: Callable[[int], None],
) -> Shaped[np.ndarray, "N"]:
    """The key of every caption, in their order; kept in `folder`, in case this is interrupted.

    `report` hears how many captions are read so far.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{i:08}.npy" for i in range(-(-len(captions) // _CHUNK))]
    for done, i in enumerate(share.turns(len(paths))):
        if not paths[i].exists():
            texts = captions.read(np.arange(i * _CHUNK, min((i + 1) * _CHUNK, len(captions))))
            files.write_whole(paths[i], store.keys_of(texts, identity).tobytes())
        report(min((done + 1) * _CHUNK, len(captions)))
    return np.concatenate([np.frombuffer(path.read_bytes(), store.KEY) for path in paths])


def pending(
    keys: Shaped[np.ndarray, "N"], have: Shaped[np.ndarray, "M"]
) -> tuple[Int[np.ndarray, "P"], int]:
    """The number of the first caption of each key that is not among `have`, which is sorted.

    And how many different keys there are. Takes about 50 bytes a caption.
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    different = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(keys)]
    first, ordered = order[different], ordered[different]
    if len(have):
        at = np.minimum(np.searchsorted(have, ordered), len(have) - 1)
        first = first[have[at] != ordered]
    return np.sort(first), int(different.sum())


def folder_of(path: pathlib.Path, source: Mapping[str, Any], identity: store.Identity):
    """The folder that holds the keys of this data while a store is being made."""
    text = json.dumps([source, identity], sort_keys=True, default=str)
    return path / "plan" / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def remove(path: pathlib.Path) -> None:
    """Forgets all plans of a store that is finished."""
    shutil.rmtree(path / "plan", ignore_errors=True)
    for file in path.glob(".shard-*.tmp"):  # Of workers that were killed.
        file.unlink(missing_ok=True)


def free_bytes(path: pathlib.Path) -> int:
    """The free bytes on the disk of a folder, or of the first of its parents that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize
