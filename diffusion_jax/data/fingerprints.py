"""Fingerprints of data sets: short texts that differ if the data sets hold different records."""

import hashlib
from collections.abc import Iterable

import numpy as np

from diffusion_jax.data import storage
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.data.records import Records

NAMES = "the digest of the pictures' names"
"""Key of the digest of names in `digests`."""
_MOST = 2**20  # The largest number of names to digest, evenly spread over the records.


def digests(pictures: Pictures) -> dict[str, int | str]:
    """Return the number of pictures, and digests of their names, of their texts and files.

    The digest covers the contents of texts in a table, and the sizes of files. Copies of a data set
    on several machines have equal digests. No file is read.
    """
    rows = np.unique(np.linspace(0, len(pictures) - 1, min(len(pictures), _MOST)).astype(np.int64))
    sizes = [stamp.partition(" ")[0] for stamp in storage.stamps(pictures.files())]
    return {
        "the number of pictures": len(pictures),
        NAMES: _digest(map(str, pictures.keys(rows).tolist())),
        "the digest of the texts and of the files' sizes": _digest([pictures.id(), *sizes]),
    }


def stamp(pictures: Pictures | Records) -> str:
    """Return a digest that changes when a file is written, added or removed, or a text changes.

    It also changes when the data set is copied. No file is read. Without files, it is constant.
    """
    files = pictures.files()
    return _digest([pictures.id(), *files, *storage.stamps(files)])


def _digest(texts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(errors="replace"), digest_size=8).hexdigest()
