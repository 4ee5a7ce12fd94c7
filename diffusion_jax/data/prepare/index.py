"""Write the index of each tar and the table of all records, so that training starts faster."""

import collections
import functools
import pathlib
import tempfile
from concurrent.futures import ThreadPoolExecutor

from diffusion_jax import files
from diffusion_jax.data import storage, tars
from diffusion_jax.data.engines import ALONE, Engine
from diffusion_jax.data.sources import webdataset

_PART = 64  # Tars that are indexed together, by several threads.


def index(path: str, text: str, threads: int = 8, engine: Engine = ALONE) -> dict[str, int]:
    """Index the tars at `path` that have no index yet, and write the table of all records.

    Args:
        path: A tar, a folder, NeMo's list of tars, or a pattern such as "shard-{0000..0099}.tar".
        text: The value of data.text in the config that reads the tars.
        threads: The number of tars that each worker indexes at once.
        engine: Distributes the work.

    Returns:
        The numbers of all "tars", of the "records" and "files" in the tars, and of "damaged" files,
        as counted by tars.members. Tars that already had an index are included.

    Raises:
        FileNotFoundError: A tar is missing.
        ValueError: There are no tars, or a tar cannot be read.
    """
    names = tars.find(path)
    # All tars are counted, even those with an index. So `never` names files that do not exist, and
    # the engine runs every part.
    home = files.path(names[0]).parent
    if storage.is_url(names[0]) and not files.is_store(names[0]):
        home = pathlib.Path(tempfile.gettempdir())
    parts = range(-(-len(names) // _PART))
    size = lambda part: min(_PART, len(names) - part * _PART)
    never = lambda part: home / f".indexed-{part}.tmp"
    counts = engine.fill(parts, never, functools.partial(_index, names, threads), noun="tars", size=size)
    webdataset.import_tars(path, text)
    return {name: counts[name] for name in ("tars", "records", "files", "damaged")}


def _index(names: list[str], threads: int, part: int) -> collections.Counter[str]:
    counts = collections.Counter[str]()
    with ThreadPoolExecutor(threads) as pool:
        for one in pool.map(tars.load_index, names[part * _PART : (part + 1) * _PART]):
            counts.update(tars=1, records=len(one.key), files=len(one.record))
            counts["damaged"] += one.inventory.damaged()
    return counts
