"""Images from some tars and embeddings from others, joined into tars that training reads.

NeMo's precaching writes members `SOURCE_TAR/KEY.pickle`. They become `KEY.npy` beside the images of
the source; the pickles are opened by an unpickler that makes arrays, dictionaries and nothing else.
"""

import collections
import io
import itertools
import pathlib
import pickle
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float

from diffusion_jax.data import storage
from diffusion_jax.data import tars as tar_files
from diffusion_jax.machine import progress
from diffusion_jax.settings import EMBEDDINGS

_ARRAYS = {
    ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"),
    *((f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}  # fmt: skip


class _Place(NamedTuple):
    """A tar member's place: the tar, and the range of its bytes."""

    tar: str
    offset: int
    size: int
    suffix: str


def merge(images: str, embeddings: str, out: pathlib.Path, key: str = "") -> dict[str, int]:
    """Writes a tar for each tar of `images` into `out`, those that are there not again.

    Both are what tar_files.find takes, of local files. An embedding belongs to a record of its own
    name in the tar that its folder is called after, or without a folder in any tar. `key` names the
    array in pickles (see read_pickle). Returns counts: "merged" records, and "no_embedding" ones,
    which are left out. ValueError if nothing fits.
    """
    tars = tar_files.find(images)
    places = _places(tar_files.find(embeddings))
    out.mkdir(parents=True, exist_ok=True)
    counts = collections.Counter[str]()
    missing = [tar for tar in tars if not (out / pathlib.Path(tar).name).exists()]
    if len({pathlib.Path(tar).name for tar in tars}) < len(tars):
        raise ValueError(f"several tars of {images} have one name: merge their folders one by one")
    logging.info("%d of %d tars are there", len(tars) - len(missing), len(tars))
    for tar in progress.reported(missing, len(missing), "tars"):
        tar_files.write(out / pathlib.Path(tar).name, _joined(tar, places, key, counts))
    if counts["no_embedding"] and not counts["merged"]:
        raise ValueError(
            f"no embedding in {embeddings} belongs to a record of {images}: the former are called "
            f"{', '.join(list(places)[:3])}"
        )
    return dict(counts)


def read_pickle(contents: bytes, key: str = "") -> Float[np.ndarray, "L D"]:
    """The array at `key` ("embeddings_t5_xxl/encodings") of nested dictionaries in a pickle.

    Without `key` the one called "encodings", or the only one. Nothing of the file is run.
    ValueError if it holds no such array, or anything but arrays and plain values.
    """
    try:
        tree = _ArrayUnpickler(io.BytesIO(contents)).load()
    except Exception as error:  # A damaged pickle can raise anything.
        raise ValueError(f"cannot read embeddings from a pickle: {error}") from error
    arrays = dict(_flat(tree))
    names = [name for name in arrays if name == key or (not key and _last(name) == "encodings")]
    names = names or ([] if key else list(arrays))
    if len(names) != 1:
        raise ValueError(f"the pickle holds {', '.join(arrays) or 'no arrays'}: name one as key")
    array = arrays[names[0]]
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        found = f"{array.dtype}{list(array.shape)}"
        raise ValueError(f"{names[0]} in the pickle is {found}, not floats [tokens, width]")
    return array


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct":  # Numpy's takes memory for whatever shape the file says.
            return lambda *_: np.ndarray((0,), "b")  # The true one is in the array's state.
        if (module, name) in _ARRAYS:
            return super().find_class(module, name)
        raise ValueError(f"it names {module}.{name}, which embeddings do not need")


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(tree, np.ndarray):
        yield prefix.rstrip("/"), tree
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from _flat(value, f"{prefix}{name}/")


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _places(tars: Sequence[str]) -> dict[str, _Place]:
    """The places of the embeddings, by their names without suffix."""
    places = {}
    for tar in progress.reported(tars, len(tars), "tars of embeddings listed"):
        with tarfile.open(tar, "r:") as opened:
            for member in filter(tarfile.TarInfo.isfile, opened):
                stem, suffix = tar_files.split(member.name)
                if suffix in ("pickle", "pkl") or suffix.rpartition(".")[2] in EMBEDDINGS:
                    places[stem] = _Place(tar, member.offset_data, member.size, suffix)
    return places


def _joined(
    tar: str, places: Mapping[str, _Place], key: str, counts: collections.Counter[str]
) -> Iterator[dict[str, bytes]]:
    """The records of a tar that have embeddings, with them."""
    path = pathlib.Path(tar)
    with tarfile.open(path, "r:") as opened:
        members = filter(tarfile.TarInfo.isfile, opened)
        key_of = lambda member: tar_files.split(member.name)[0]
        for stem, files in itertools.groupby(members, key_of):
            names = (f"{path.name}/{stem}", f"{path.stem}/{stem}", stem)
            place = next((places[name] for name in names if name in places), None)
            if place is None:
                counts["no_embedding"] += 1
                continue
            counts["merged"] += 1
            read = {tar_files.split(m.name)[1]: _contents(opened, m) for m in files}
            yield {tar_files.KEY: stem.encode(), **read, **_embedding(place, key)}


def _embedding(place: _Place, key: str) -> dict[str, bytes]:
    (contents,) = storage.read_ranges([place.tar], [place.offset], [place.offset + place.size])
    if place.suffix not in ("pickle", "pkl"):
        return {place.suffix: contents}
    array = io.BytesIO()
    np.save(array, read_pickle(contents, key))
    return {"npy": array.getvalue()}


def _contents(opened: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = opened.extractfile(member)
    return file.read() if file else b""
