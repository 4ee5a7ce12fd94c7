"""The COCO-2014 validation subset of the MLPerf benchmark: 30,000 captions and their images.

The images are resized to squares, which changes their aspect ratio.
"""

import csv
import io
import pathlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from PIL import Image

from diffusion_jax import files
from diffusion_jax.data import rows
from diffusion_jax.files import untrusted
from diffusion_jax.logs import progress

NUMBER, SEED, SIZE = 30_000, 2023, 512
_COLUMNS = ("image_id", "id", "caption")


class Caption(NamedTuple):
    """A caption of COCO."""

    image_id: int
    """COCO's id of the image that the caption describes."""
    id: int
    """COCO's id of the caption."""
    caption: str


def read_annotations(path: pathlib.Path) -> list[Caption]:
    """Return the captions in COCO's file captions_val2014.json, in the order of the file.

    Newlines and surrounding spaces are removed from the captions. Raises ValueError if the file
    does not have COCO's format.
    """
    try:
        content = untrusted.parse_json(path.read_bytes())
        rows = [Caption(*(a[name] for name in _COLUMNS)) for a in content["annotations"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not have the format of COCO's captions_val2014.json: {error!r}") from error
    return [row._replace(caption=row.caption.replace("\n", "").strip()) for row in rows]


def choose(captions: Sequence[Caption], number: int = NUMBER) -> list[Caption]:
    """Return the `number` captions on which MLPerf evaluates models, sorted by id.

    As in MLPerf's script, the captions are shuffled, only the first caption of each image is kept,
    and the first `number` of the kept captions are chosen. The shuffle is that of pandas with
    sample(frac=1, random_state=2023).

    Raises:
        ValueError: If the captions describe fewer than `number` images.
    """
    order = np.random.RandomState(SEED).permutation(len(captions))
    of_image: dict[int, Caption] = {}
    for i in order.tolist():
        of_image.setdefault(captions[i].image_id, captions[i])
    if len(of_image) < number:
        raise ValueError(
            f"{number} captions of different images are needed, but --annotations describes only "
            f"{len(of_image)} images: use COCO's captions_val2014.json, or a smaller --num"
        )
    return sorted(list(of_image.values())[:number], key=lambda row: row.id)


def to_tsv(captions: Sequence[Caption]) -> str:
    """Return the captions as tab-separated text with a header line, exactly as pandas writes it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows(captions)
    return buffer.getvalue()


def read_tsv(path: pathlib.Path) -> list[Caption]:
    """Read captions from a .tsv file with the columns image_id, id and caption.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a column is missing or a row is malformed. The message names the column or
            the row.
    """
    if not path.is_file():
        raise FileNotFoundError(f"the table of captions {path} does not exist: write it with sd_jax.prepare captions")
    return [_caption(place, row) for place, row in rows.read(path)]


def _caption(place: str, row: Mapping[str, Any]) -> Caption:
    if missing := [name for name in _COLUMNS if name not in row]:
        raise ValueError(
            f"{place} has no column {missing[0]}: the first line must hold {' '.join(_COLUMNS)}, "
            f"separated by tabs, but is {' '.join(row)}"
        )
    try:
        caption = Caption(int(row["image_id"]), int(row["id"]), row["caption"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place} is malformed: {error}") from error
    if not caption.caption:
        raise ValueError(f"{place} has an empty caption: add one, or remove the row")
    return caption


def image_name(image_id: int) -> str:
    """Return COCO's file name of an image, such as COCO_val2014_000000000042.jpg."""
    return f"COCO_val2014_{image_id:012}.jpg"


def squash(contents: bytes, size: int = SIZE) -> bytes:
    """Resize an image to a square, ignoring its aspect ratio, and return the bytes of a JPEG file.

    The filter is bicubic, and the JPEG quality is Pillow's default of 75.

    Args:
        contents: The bytes of the image file.
        size: The side of the square in pixels.
    """
    with untrusted.open_image(contents) as image:
        small = image.resize((size, size), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG")
    return buffer.getvalue()


def squash_all(captions: Sequence[Caption], images: pathlib.Path, out: pathlib.Path, threads: int = 8) -> int:
    """Resize the images of captions to squares; return the number of images written.

    Args:
        captions: The captions whose images are resized.
        images: The folder of COCO's images, or the file val2014.zip.
        out: The folder to write to. Images that it already holds are skipped.
        threads: The number of images to resize at once.

    Raises:
        FileNotFoundError: If an image is missing; the message names it.
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
    """Return a function that maps an image's file name to its bytes.

    `images` is a folder, or a zip file that may hold the image in any of its folders.
    """
    if images.is_dir():
        return lambda name: (images / name).read_bytes()
    if not zipfile.is_zipfile(images):
        raise FileNotFoundError(
            f"--images={images} is neither a folder nor a zip file: name val2014.zip, or the folder that it unpacks to"
        )
    archive = zipfile.ZipFile(images)
    places = {name.rpartition("/")[2]: name for name in archive.namelist()}

    def read(name: str) -> bytes:
        if name not in places:
            raise FileNotFoundError(f"--images={images} lacks {name}: use COCO's val2014.zip")
        return archive.read(places[name])

    return read
