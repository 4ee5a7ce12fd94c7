"""Measure the input pipeline's images/s for each data source, and compare with other libraries.

    python -m benchmarks.input_pipeline --num=512

The command writes a data set of `num` JPEGs in every format to a temporary folder. The JPEGs are
random crops of two photographs in scikit-learn, at quality 95, with 512x384 pixels (1365x1024 for
sizes above 512). The command prints one line of JSON per source and size:
- images_per_second_core: images per CPU second, without reader threads. Other work on the machine
  has little effect on this number.
- images_per_second_host: images per second of wall time, with --threads threads.
- peers: the same two numbers for each peer: per CPU second without reader processes, and per second
  of wall time with --threads processes. The peers are webdataset with torch's DataLoader, grain
  alone, and a plain loop with tarfile (always one process). All of them decode, resize (bicubic)
  and crop with Pillow. A library that is not installed is left out.
- ratios: images_per_second_core of the source divided by that of each peer. Sources and peers are
  measured in alternation.
- cores_for_8: the number of cores that supply eight accelerators at the rates in RATES, if each
  core reads images_per_second_core.
All numbers are medians over rounds.
"""

import functools
import importlib.util
import io
import os
import pathlib
import platform
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
import PIL
import pyarrow
from absl import flags
from PIL import Image

from benchmarks import measure
from diffusion_jax import cli
from diffusion_jax.config.settings import Data
from diffusion_jax.data import pipeline
from diffusion_jax.data.prepare import reshard
from diffusion_jax.data.sources import open_pictures
from diffusion_jax.data.sources.folder import open_folder
from diffusion_jax.data.table import Table
from diffusion_jax.devices import tuning

flags.adopt_module_key_flags(measure)
_NUM = flags.DEFINE_integer("num", 512, "Images in the data set.", lower_bound=64)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Number of measurements per source and size.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", os.cpu_count() or 1, "Reader threads.", lower_bound=1)
_SIZES = flags.DEFINE_multi_integer("size", [64, 256, 512, 1024], "Side of the images in pixels.")


class Rate(NamedTuple):
    """Training speed of a model, in images/s of one accelerator."""

    size: int
    """Side of the model's images in pixels."""
    published: float | None
    """Published speed: of NeMo's Imagen on an H100, or of MLPerf's Stable Diffusion on an H200;
    None if unknown."""
    planned: float
    """Speed that `python -m launch.plan --target=h100:1 --fast` predicts."""


RATES = {
    "base64_500m": Rate(64, 202.4, 394.0),
    "base64_2b": Rate(64, 61.9, 100.0),
    "sr256_400m": Rate(256, 50.7, 92.2),
    "sr256_600m": Rate(256, 170.8, 265.5),
    "sr1024_600m": Rate(1024, None, 267.9),
    "sd2_512_base": Rate(512, 149.6, 110.8),
}
"""Training speeds by config. The rates of sd2_512_base are for training on stored latents; this
benchmark treats them as if the model read images."""
BATCH = 32


def main() -> None:
    """Write the data set in every format, measure each source, and print the results."""
    tuning.apply()  # As in every command; the peers run in the same process, so it serves them too.
    with tempfile.TemporaryDirectory() as folder:
        for side in (384, 1024):
            sizes = [size for size in _SIZES.value if (size > 512) == (side > 512)]
            places = _write(pathlib.Path(folder) / str(side), _NUM.value, side) if sizes else {}
            for size in sizes:
                _compare(places, size)


def _compare(places: Mapping[str, tuple[str, str]], size: int) -> None:
    """Measure all sources and peers in turn, at one image size, and print the results.

    `places` maps each source of this project to (path, text field) of the data set in its format.
    """
    ours = {name: functools.partial(_ours, name, *at, size) for name, at in places.items()}
    peers = {
        name: functools.partial(read, places[form][0], size)
        for name, (form, read) in _PEERS.items()
        if name == "tarfile" or importlib.util.find_spec(name)
    }
    rows = [_Row({}, {}) for _ in range(_ROUNDS.value)]
    everything = {**ours, **{f"peer {name}": read for name, read in peers.items()}}
    for row in [_Row({}, {}), *rows]:  # The first is a warm-up, not counted.
        # Without threads first: a thread may finish a batch after its pipeline was closed.
        for name, read in everything.items():
            row.core[name] = _rate(time.process_time, read, 0)
        for name, read in everything.items():
            threads = 0 if name == "peer tarfile" else _THREADS.value
            row.host[name] = _rate(time.perf_counter, read, threads)
    for source in ours:
        measure.say(_result(source, list(peers), size, rows))


class _Row(NamedTuple):
    """The rates of one round, keyed by the name of the source or by "peer NAME"."""

    core: dict[str, float]
    """Images per CPU second."""
    host: dict[str, float]
    """Images per second of wall time."""


def _result(source: str, peers: Sequence[str], size: int, rows: Sequence[_Row]) -> dict:
    core = lambda name: statistics.median(row.core[name] for row in rows)
    host = lambda name: statistics.median(row.host[name] for row in rows)
    ratio = lambda name: statistics.median(row.core[source] / row.core[name] for row in rows)
    cores = lambda rate: rate and round(8 * rate / core(source), 1)
    rates = {model: rate for model, rate in RATES.items() if rate.size == size}
    named = {name: f"peer {name}" for name in peers}
    return {
        "source": source,
        "size": size,
        "images_per_second_core": round(core(source)),
        "images_per_second_host": round(host(source)),
        "threads": _THREADS.value,
        "peers": {
            name: {"images_per_second_core": round(core(key)), "images_per_second_host": round(host(key))}
            for name, key in named.items()
        },
        "ratios": {name: round(ratio(key), 2) for name, key in named.items()},
        "cores_for_8": {
            model: {"published": cores(rate.published), "planned": cores(rate.planned)} for model, rate in rates.items()
        },
        "cores": os.cpu_count(),
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        "pillow": PIL.__version__,
    }


def _ours(source: str, path: str, text: str, size: int, threads: int) -> int:
    steps = _NUM.value // BATCH
    pictures = open_pictures(Data(source, path=path, text=text), size)
    batches = pipeline.make_batches(pictures, lambda texts: {}, batch_size=BATCH, seed=0, num_threads=threads)
    with batches:
        for _ in range(steps):
            next(batches)
    return steps * BATCH


def _write(root: pathlib.Path, num: int, side: int) -> dict[str, tuple[str, str]]:
    """Write the data set in every format.

    The data set has `num` pictures with a height of `side` pixels. Returns (path, name of the text
    field) for each source.
    """
    folder = root / "folder"
    folder.mkdir(parents=True)
    for i, jpeg in enumerate(_photographs(num, side)):
        (folder / f"{i:06}.jpg").write_bytes(jpeg)
        (folder / f"{i:06}.txt").write_text(f"photograph number {i}")
    records = open_folder(folder)
    for format in reshard.FORMATS:
        reshard.reshard(records, root / format, num=64, format=format, identity={})
    (root / "arrow").mkdir()
    _write_arrow(root / "arrow/data-00000-of-00001.arrow", records)
    texts = {"folder": "txt", **dict.fromkeys(reshard.FORMATS, "txt"), "arrow": "text"}
    return {source: (str(root / source), text) for source, text in texts.items()}


def _write_arrow(path: pathlib.Path, records: Table) -> None:
    """Write the records as an Arrow stream, the format of Hugging Face's save_to_disk."""
    read = records.read(range(len(records)))
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    images = pyarrow.array([{"bytes": r.image, "path": None} for r in read], kind)
    table = pyarrow.table({"image": images, "text": [record.text for record in read]})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)


def _photographs(num: int, side: int) -> Iterator[bytes]:
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    rng = np.random.default_rng(0)
    for i in range(num):
        photograph = photographs[i % len(photographs)]
        width = int(rng.integers(256, photograph.width))
        height = min(width * 3 // 4, photograph.height)
        left, top = (int(rng.integers(0, side + 1)) for side in (photograph.width - width, photograph.height - height))
        cut = photograph.resize((side * 4 // 3, side), box=(left, top, left + width, top + height))
        jpeg = io.BytesIO()
        cut.save(jpeg, "jpeg", quality=95)
        yield jpeg.getvalue()


def _rate(clock: Callable[[], float], work: Callable[[int], int], threads: int) -> float:
    start = clock()
    return work(threads) / (clock() - start)


def _cpu_name() -> str:
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _tar_loop(tars: str, size: int, workers: int = 0) -> int:
    """Read the tars of a folder in order of their names, with the module tarfile.

    `workers` must be 0.
    """
    assert not workers
    batch, done = [], 0
    for image, caption in _tar_records(tars):
        batch.append((_decoded(image, size), caption.decode()))
        if len(batch) == BATCH:
            np.stack([pixels for pixels, _ in batch])
            batch, done = [], done + BATCH
    return done


def _webdataset(tars: str, size: int, workers: int = 0) -> int:
    """Read the tars of a folder with webdataset and torch's DataLoader, in a shuffled order."""
    import torch.utils.data  # pyright: ignore[reportMissingImports]
    import webdataset as wds  # pyright: ignore[reportMissingImports]

    paths = sorted(map(str, pathlib.Path(tars).glob("*.tar")))
    read = lambda record: (_decoded(record["jpg"], size), record["txt"].decode())
    shards: Any = wds.WebDataset  # pyright: ignore[reportAttributeAccessIssue]
    records = shards(paths, shardshuffle=False, empty_check=False).shuffle(1_000).map(read)
    loader: Any = torch.utils.data.DataLoader(records, BATCH, num_workers=workers, drop_last=True)
    return sum(len(images) for images, _ in loader)


def _grain_alone(folder: str, size: int, workers: int = 0) -> int:
    paths = sorted(pathlib.Path(folder).glob("*.jpg"))

    def read(path: pathlib.Path) -> tuple[np.ndarray, str]:
        return _decoded(path.read_bytes(), size), path.with_suffix(".txt").read_text()

    rows = grain.MapDataset.source(paths).shuffle(seed=0).map(read).batch(BATCH, drop_remainder=True)
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches: Any = rows.to_iter_dataset(reading)
    if workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return sum(len(images) for images, _ in batches)


def _decoded(data: bytes, size: int) -> np.ndarray:
    """Decode an image to uint8 [size, size, 3], resized (bicubic) and centre-cropped."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size)))


def _tar_records(path: str) -> Iterator[tuple[bytes, bytes]]:
    for name in sorted(pathlib.Path(path).glob("*.tar")):
        record: dict[str, bytes] = {}
        with tarfile.open(name) as tar:
            for member in tar:
                file = tar.extractfile(member)
                record[member.name.partition(".")[2]] = file.read() if file else b""
                if len(record) == 2:
                    yield record["jpg"], record["txt"]
                    record = {}


_PEERS = {
    "tarfile": ("webdataset", _tar_loop),
    "webdataset": ("webdataset", _webdataset),
    "grain": ("folder", _grain_alone),
}
"""Peers by name: (format of the data set that the peer reads, function that reads it)."""


if __name__ == "__main__":
    cli.run(main)
