"""Read the data set of benchmarks.input_pipeline with other libraries, for comparison.

Each function reads batches of BATCH images and captions from a folder and returns the number of
images. It drops an incomplete last batch. Images are resized and cropped to `size` x `size` pixels.
`workers` is the number of reader processes; with 0, the calling process reads.
"""

import io
import pathlib
import tarfile
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from PIL import Image

BATCH = 32


def tar_loop(tars: str, size: int, workers: int = 0) -> int:
    """Read the tars of a folder in order of their names, with the module tarfile.

    `workers` must be 0.
    """
    assert not workers
    batch, done = [], 0
    for image, caption in _tar_records(tars):
        batch.append((decoded(image, size), caption.decode()))
        if len(batch) == BATCH:
            np.stack([pixels for pixels, _ in batch])
            batch, done = [], done + BATCH
    return done


def webdataset(tars: str, size: int, workers: int = 0) -> int:
    """Read the tars of a folder with webdataset and torch's DataLoader, in a shuffled order."""
    import torch.utils.data  # pyright: ignore[reportMissingImports]
    import webdataset as wds  # pyright: ignore[reportMissingImports]

    paths = sorted(map(str, pathlib.Path(tars).glob("*.tar")))
    read = lambda record: (decoded(record["jpg"], size), record["txt"].decode())
    shards: Any = wds.WebDataset  # pyright: ignore[reportAttributeAccessIssue]
    records = shards(paths, shardshuffle=False, empty_check=False).shuffle(1_000).map(read)
    loader: Any = torch.utils.data.DataLoader(records, BATCH, num_workers=workers, drop_last=True)
    return sum(len(images) for images, _ in loader)


def grain_alone(folder: str, size: int, workers: int = 0) -> int:
    """Read the JPEGs of a folder with grain, in a shuffled order."""
    paths = sorted(pathlib.Path(folder).glob("*.jpg"))

    def read(path: pathlib.Path) -> tuple[np.ndarray, str]:
        return decoded(path.read_bytes(), size), path.with_suffix(".txt").read_text()

    rows = (
        grain.MapDataset.source(paths).shuffle(seed=0).map(read).batch(BATCH, drop_remainder=True)
    )
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches: Any = rows.to_iter_dataset(reading)
    if workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return sum(len(images) for images, _ in batches)


def decoded(data: bytes, size: int) -> np.ndarray:
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
