"""The COCO-2014 validation set of the MLPerf benchmark: 30,000 captions and their images.

The images are resized to squares without keeping the aspect ratio.
"""

import csv
import io
import json
import pathlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from PIL import Image

from diffusion_jax.machine import files, progress, untrusted

NUMBER, SEED, SIZE = 30_000, 2023, 512
_COLUMNS = ("image_id", "id", "caption")


class Caption(NamedTuple):
    """A caption of COCO, with its number and the number of its image."""

    image_id: int
    id: int
    caption: str


def read_annotations(path: pathlib.Path) -> list[Caption]:
    """Return the captions of captions_val2014.json, in the order of the file.

    Raises ValueError if the file has another format.
    """
    try:
        content = json.loads(path.read_bytes())
        rows = [Caption(*(a[name] for name in _COLUMNS)) for a in content["annotations"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a COCO captions file: {error!r}") from error
    return [row._replace(caption=row.caption.replace("\n", "").strip()) for row in rows]


def choose(captions: Sequence[Caption], number: int = NUMBER) -> list[Caption]:
    """Return the subset of captions that MLPerf evaluates on, sorted by id.

    Shuffle the captions, keep the first of each image, and take the first `number`. The shuffle
    equals sample(frac=1, random_state=2023) of pandas. Raises ValueError if there are fewer than
    `number` images.
    """
    order = np.random.RandomState(SEED).permutation(len(captions))
    of_image: dict[int, Caption] = {}
    for i in order.tolist():
        of_image.setdefault(captions[i].image_id, captions[i])
    if len(of_image) < number:
        raise ValueError(
            f"{number} captions of different images are needed, but the file has captions of "
            f"{len(of_image)} images"
        )
    return sorted(list(of_image.values())[:number], key=lambda row: row.id)


def to_tsv(captions: Sequence[Caption]) -> str:
    """Return the captions as a table with tabs and a header, byte for byte as pandas writes it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows(captions)
    return buffer.getvalue()


def read_tsv(path: pathlib.Path) -> list[Caption]:
    """Read a table that `to_tsv` wrote.

    Raises ValueError that names a missing column or the first malformed row.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file of captions at {path}")
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t")
        names = rows.fieldnames or []
        if missing := [name for name in _COLUMNS if name not in names]:
            raise ValueError(
                f"{path} has no column {missing[0]}: its first line must be {' '.join(_COLUMNS)}, "
                f"with tabs, but is {' '.join(names) or 'empty'}"
            )
        return [_caption(path, number, row) for number, row in enumerate(rows, 2)]


def _caption(path: pathlib.Path, number: int, row: Mapping[str, Any]) -> Caption:
    try:
        caption = Caption(int(row["image_id"]), int(row["id"]), row["caption"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}, row {number} is malformed: {error}") from error
    if not caption.caption:
        raise ValueError(f"{path}, row {number} has no caption")
    return caption


def image_name(image_id: int) -> str:
    """Return the file name of an image, such as COCO_val2014_000000000042.jpg."""
    return f"COCO_val2014_{image_id:012}.jpg"


def squash(contents: bytes, size: int = SIZE) -> bytes:
    """Resize an image file to size x size pixels, whatever its aspect ratio, as a JPEG.

    The resize is bicubic, the quality is Pillow's default of 75.
    """
    with untrusted.open_image(contents) as image:
        small = image.resize((size, size), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG")
    return buffer.getvalue()


def squash_all(
    captions: Sequence[Caption], images: pathlib.Path, out: pathlib.Path, threads: int = 8
) -> int:
    """Squash the images of the captions, from a folder or val2014.zip, into `out`.

    Images that `out` already holds are skipped. Returns the number of images written. Raises
    FileNotFoundError that names the first missing image.
    """
    out.mkdir(parents=True, exist_ok=True)
    names = [image_name(row.image_id) for row in captions]
    missing = [name for name in names if not (out / name).exists()]
    logging.info("%d of %d images exist", len(names) - len(missing), len(names))
    read = _reader(images)
    write = lambda name: files.write_whole(out / name, squash(read(name)))
    with ThreadPoolExecutor(threads) as pool:  # Pillow releases the GIL.
        for _ in progress.reported(pool.map(write, missing), len(missing), "images"):
            pass
    return len(missing)


def _reader(images: pathlib.Path) -> Callable[[str], bytes]:
    """Return read(name) for a folder, or for a zip, in which the image may lie in any folder."""
    if images.is_dir():
        return lambda name: (images / name).read_bytes()
    if not zipfile.is_zipfile(images):
        raise FileNotFoundError(f"{images} is neither a folder nor a zip file of images")
    archive = zipfile.ZipFile(images)
    places = {name.rpartition("/")[2]: name for name in archive.namelist()}

    def read(name: str) -> bytes:
        if name not in places:
            raise FileNotFoundError(f"{images} holds no {name}")
        return archive.read(places[name])

    return read
