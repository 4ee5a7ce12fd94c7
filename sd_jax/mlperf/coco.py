"""COCO-2014's validation set as MLPerf evaluates on it: 30,000 captions, their images squashed."""

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
    """One of COCO's captions."""

    image_id: int
    id: int
    caption: str


def read_annotations(path: pathlib.Path) -> list[Caption]:
    """Every caption of captions_val2014.json, in its order; ValueError if it is another file."""
    try:
        content = json.loads(path.read_bytes())
        rows = [Caption(*(a[name] for name in _COLUMNS)) for a in content["annotations"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is none of COCO's files of captions: {error!r}") from error
    return [row._replace(caption=row.caption.replace("\n", "").strip()) for row in rows]


def choose(captions: Sequence[Caption], number: int = NUMBER) -> list[Caption]:
    """MLPerf's subset: shuffled, the first caption of each image, the first `number`, by id.

    The shuffle is that of pandas' sample(frac=1, random_state=2023). ValueError if there are fewer
    images.
    """
    order = np.random.RandomState(SEED).permutation(len(captions))
    of_image: dict[int, Caption] = {}
    for i in order.tolist():
        of_image.setdefault(captions[i].image_id, captions[i])
    if len(of_image) < number:
        raise ValueError(f"{number} captions of different images are asked for, and there are "
                         f"{len(of_image)}")  # fmt: skip
    return sorted(list(of_image.values())[:number], key=lambda row: row.id)


def to_tsv(captions: Sequence[Caption]) -> str:
    """The table, as pandas writes it: a header, tabs, quotes only where they are needed."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows(captions)
    return buffer.getvalue()


def read_tsv(path: pathlib.Path) -> list[Caption]:
    """The table again; ValueError that names a missing column, or the first row that is none."""
    if not path.is_file():
        raise FileNotFoundError(f"no file of captions at {path}")
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t")
        names = rows.fieldnames or []
        if missing := [name for name in _COLUMNS if name not in names]:
            raise ValueError(
                f"{path} has no column {missing[0]}: its first line must be {' '.join(_COLUMNS)}, "
                f"with tabs, and is {' '.join(names) or 'empty'}"
            )
        return [_caption(path, number, row) for number, row in enumerate(rows, 2)]


def _caption(path: pathlib.Path, number: int, row: Mapping[str, Any]) -> Caption:
    try:
        caption = Caption(int(row["image_id"]), int(row["id"]), row["caption"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}, row {number} is no caption: {error}") from error
    if not caption.caption:
        raise ValueError(f"{path}, row {number} has no caption")
    return caption


def image_name(image_id: int) -> str:
    """The name of an image's file, such as COCO_val2014_000000000042.jpg."""
    return f"COCO_val2014_{image_id:012}.jpg"


def squash(contents: bytes, size: int = SIZE) -> bytes:
    """A JPEG of `size` by `size` pixels, bicubic, whatever the aspect; Pillow's own quality, 75."""
    with untrusted.open_image(contents) as image:
        small = image.resize((size, size), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG")
    return buffer.getvalue()


def squash_all(
    captions: Sequence[Caption], images: pathlib.Path, out: pathlib.Path, threads: int = 8
) -> int:
    """Squashes the captions' images from a folder or val2014.zip into `out`; how many were done.

    Those in `out` are left alone. FileNotFoundError names the first image that is not there.
    """
    out.mkdir(parents=True, exist_ok=True)
    names = [image_name(row.image_id) for row in captions]
    missing = [name for name in names if not (out / name).exists()]
    logging.info("%d of %d images are there", len(names) - len(missing), len(names))
    read = _reader(images)
    done = lambda name: files.write_whole(out / name, squash(read(name)))
    with ThreadPoolExecutor(threads) as pool:  # Pillow works outside Python's lock.
        for _ in progress.reported(pool.map(done, missing), len(missing), "images"):
            pass
    return len(missing)


def _reader(images: pathlib.Path) -> Callable[[str], bytes]:
    """read(name) of a folder, or of a zip whatever its folders."""
    if images.is_dir():
        return lambda name: (images / name).read_bytes()
    if not zipfile.is_zipfile(images):
        raise FileNotFoundError(f"{images} is neither a folder of images nor a zip of them")
    archive = zipfile.ZipFile(images)
    places = {name.rpartition("/")[2]: name for name in archive.namelist()}

    def read(name: str) -> bytes:
        if name not in places:
            raise FileNotFoundError(f"{images} holds no {name}")
        return archive.read(places[name])

    return read
