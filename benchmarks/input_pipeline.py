"""Measure the input pipeline's images/s for each data source, compared with a plain tar loop.

    python -m benchmarks.input_pipeline --num=512

The command writes a data set of `num` JPEGs (512x384, quality 95, random crops of two photographs
in scikit-learn) in every format to a temporary folder. It prints one line of JSON per source and
size:
- images_per_second_core: images per CPU second, without reader threads. Other work on the machine
  has little effect on this figure.
- images_per_second_host: images per second of wall time, with `threads` threads.
- plain_images_per_second_core: images per CPU second of a plain loop that reads a tar with tarfile,
  decodes, resizes (bicubic) and centre-crops with Pillow, and converts to numpy.
- ratio: the median ratio of images_per_second_core to plain_images_per_second_core, which are
  measured in alternation.
- cores_for_8: the number of such cores that supply eight accelerators with images at the rates in
  RATES.
The figures are medians over rounds.
"""

import functools
import io
import itertools
import os
import pathlib
import platform
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import PIL
import pyarrow
from absl import app, flags
from PIL import Image

from benchmarks import measure
from diffusion_jax import cli
from diffusion_jax.config.settings import Data
from diffusion_jax.data import pipeline
from diffusion_jax.data.prepare import reshard
from diffusion_jax.data.sources import open_pictures
from diffusion_jax.data.sources.folder import Folder

flags.adopt_module_key_flags(measure)
_NUM = flags.DEFINE_integer("num", 512, "Images in the data set.", lower_bound=64)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Number of measurements.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", os.cpu_count() or 1, "Reader threads.", lower_bound=1)
_SIZES = flags.DEFINE_multi_integer("size", [64, 256, 512], "Side of the images in pixels.")

_BATCH = 32
# (image size, training images/s of one accelerator): NeMo's Imagen on an H100, and MLPerf's Stable
# Diffusion on an H200. The latter trains on latents, but is listed as if it read images.
RATES = {
    "base64_500m": (64, 202.4),
    "base64_2b": (64, 61.9),
    "sr256_400m": (256, 50.7),
    "sr256_600m": (256, 170.8),
    "sd2_512_base": (512, 149.6),
}


def main(argv: list[str]) -> None:
    """Write the data set in every format, measure each source, and print the results."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    with tempfile.TemporaryDirectory() as folder:
        places = _write(pathlib.Path(folder), _NUM.value)
        tar = places["webdataset"][0]
        for size, (source, (path, text)) in itertools.product(_SIZES.value, places.items()):
            read = functools.partial(_ours, source, path, text, size)
            plain = functools.partial(_plain, tar, size)
            rounds = [(_cpu_rate(read, 0), _cpu_rate(plain)) for _ in range(_ROUNDS.value)]
            host = statistics.median(_rate(read, int(_THREADS.value)) for _ in rounds)
            measure.say(_result(source, size, rounds, host))


def _result(source: str, size: int, rounds: list[tuple[float, float]], host: float) -> dict:
    core, plain = (statistics.median(column) for column in zip(*rounds, strict=True))
    needed = {
        model: round(8 * rate / core, 1) for model, (side, rate) in RATES.items() if side == size
    }
    return {
        "source": source,
        "size": size,
        "images_per_second_core": round(core),
        "images_per_second_host": round(host),
        "threads": _THREADS.value,
        "plain_images_per_second_core": round(plain),
        "ratio": round(statistics.median(ours / theirs for ours, theirs in rounds), 2),
        "cores_for_8": needed,
        "cores": os.cpu_count(),
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        "pillow": PIL.__version__,
    }


def _ours(source: str, path: str, text: str, size: int, threads: int) -> int:
    """Read about one epoch with this project's pipeline, and return the number of images."""
    steps = _NUM.value // _BATCH
    pictures = open_pictures(Data(source, path=path, text=text), size)
    batches = pipeline.make_batches(
        pictures, lambda texts: {}, batch_size=_BATCH, seed=0, num_threads=threads
    )
    with batches:
        for _ in range(steps):
            next(batches)
    return steps * _BATCH


def _plain(tar: str, size: int) -> int:
    """Read a webdataset in order with tarfile and Pillow, and return the number of images."""
    batch, done = [], 0
    for image, caption in _tar_records(tar):
        batch.append((_decode(image, size), caption.decode()))
        if len(batch) == _BATCH:
            np.stack([pixels for pixels, _ in batch])
            batch, done = [], done + _BATCH
    return done


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


def _decode(data: bytes, size: int) -> np.ndarray:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size)))


def _write(root: pathlib.Path, num: int) -> dict[str, tuple[str, str]]:
    """Write the data set in every format; return each source's (path, text field)."""
    folder = root / "folder"
    folder.mkdir()
    for i, jpeg in enumerate(_photographs(num)):
        (folder / f"{i:06}.jpg").write_bytes(jpeg)
        (folder / f"{i:06}.txt").write_text(f"photograph number {i}")
    records = Folder(folder)
    for format in reshard.FORMATS:
        reshard.reshard(records, root / format, num=256, format=format, identity={})
    (root / "arrow").mkdir()
    _write_arrow(root / "arrow/data-00000-of-00001.arrow", records)
    texts = {"folder": "txt", **dict.fromkeys(reshard.FORMATS, "txt"), "arrow": "text"}
    return {source: (str(root / source), text) for source, text in texts.items()}


def _write_arrow(path: pathlib.Path, records: Folder) -> None:
    """Write the records in the format of Hugging Face's save_to_disk."""
    read = records.read(range(len(records)))
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    images = pyarrow.array([{"bytes": r.image, "path": None} for r in read], kind)
    table = pyarrow.table({"image": images, "text": [record.text for record in read]})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)


def _photographs(num: int) -> Iterator[bytes]:
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    rng = np.random.default_rng(0)
    for i in range(num):
        photograph = photographs[i % len(photographs)]
        width = int(rng.integers(256, photograph.width))
        height = min(width * 3 // 4, photograph.height)
        left, top = (int(rng.integers(0, side + 1)) for side in
                     (photograph.width - width, photograph.height - height))  # fmt: skip
        cut = photograph.resize((512, 384), box=(left, top, left + width, top + height))
        jpeg = io.BytesIO()
        cut.save(jpeg, "jpeg", quality=95)
        yield jpeg.getvalue()


def _cpu_rate(work: Callable[..., int], *arguments: int) -> float:
    start = time.process_time()
    return work(*arguments) / (time.process_time() - start)


def _rate(work: Callable[..., int], *arguments: int) -> float:
    start = time.perf_counter()
    return work(*arguments) / (time.perf_counter() - start)


def _cpu_name() -> str:
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    cli.run(main)
