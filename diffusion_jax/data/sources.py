"""Where records come from: the shape of every source, and folders of image files."""

import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from diffusion_jax.text import precomputed

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")


class Record(NamedTuple):
    """One encoded image with its text."""

    image: bytes
    """A JPEG, PNG or WebP file."""
    text: Any
    """A caption, or an array [tokens, width] of precomputed embeddings."""
    name: str
    """Where it was found, for messages."""


class Records(Protocol):
    """Random access to a fixed list of records: `records[i]` depends on nothing but i."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: int) -> Record:
        """Reads one."""
        ...

    def left_out(self) -> dict[str, int]:
        """How many things were found but are not in the list, by reason."""
        ...


class Folder:
    """The images under a folder, in the order of their names, each with a text of the same stem.

    `text` is the suffix of the texts: "txt" for captions, or one of precomputed embeddings such as
    "npy" or "t5.npz". `uncaptioned` says what happens to images without a text: "error" or "drop".
    """

    def __init__(self, path: str | os.PathLike[str], text: str = "txt", uncaptioned: str = "error"):
        """Lists the files and reads none; FileNotFoundError or ValueError if they cannot do."""
        self._root = pathlib.Path(path)
        check_exists([self._root], "folder")
        precomputed.check_suffix(text)
        names = _walk(self._root)
        images = [n for n in sorted(names) if suffix_of(n).rsplit(".")[-1] in IMAGE_SUFFIXES]
        check_any(len(images), self._root, map(suffix_of, names))
        self._pairs = [(n, t) for n in images if (t := _text_name(n, text)) in names]
        bare = sorted(set(images) - {image for image, _ in self._pairs})
        check_captions(bare, len(images), text, uncaptioned)
        self._left_out = {"no_caption": len(bare)} if bare else {}

    def __len__(self) -> int:
        """How many images have a text."""
        return len(self._pairs)

    def __getitem__(self, index: int) -> Record:
        """Reads both files; OSError if they have gone."""
        image, text = self._pairs[index]
        contents = (self._root / text).read_bytes()
        return Record((self._root / image).read_bytes(), read_text(contents, text), image)

    def left_out(self) -> dict[str, int]:
        """Images without a text, as {"no_caption": n}."""
        return self._left_out


def read_text(contents: bytes, name: str) -> Any:
    """A caption from a .txt file, embeddings from any other; `name` decides which."""
    if suffix_of(name).rsplit(".")[-1] == "txt":
        return contents.decode("utf-8", errors="replace").strip()
    return precomputed.read(contents, name)


def suffix_of(name: str) -> str:
    """What follows the first dot of the last part, in lower case: "t5.npy" of "a/b.t5.npy"."""
    return os.path.basename(name).partition(".")[2].lower()


def check_exists(paths: Sequence[pathlib.Path], format: str) -> None:
    """FileNotFoundError with a command that makes an example in place of what is missing."""
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise FileNotFoundError(
            f"no data at {_some(map(str, missing))}: check the path, or make a tiny example set "
            f"with\n  python -m diffusion_jax.data.digits --format={format} --num=100 "
            f"--out={missing[0] if len(paths) == 1 else missing[0].parent}"
        )


def check_any(num_images: int, place: Any, suffixes: Iterable[str]) -> None:
    """ValueError if there are no images, saying what there is instead."""
    if num_images == 0:
        counts: dict[str, int] = {}
        for suffix in suffixes:
            counts[suffix] = counts.get(suffix, 0) + 1
        found = ", ".join(f"{n} {suffix or 'without a suffix'}" for suffix, n in counts.items())
        tars = "; tars are read by the source 'webdataset'" if "tar" in counts else ""
        raise ValueError(
            f"no images in {place}: looked for {', '.join(IMAGE_SUFFIXES)} "
            f"and found {found or 'nothing at all'}{tars}"
        )


def check_captions(bare: Sequence[str], num_images: int, text: str, uncaptioned: str) -> None:
    """ValueError if images lack their text, unless they are to be dropped and some are left."""
    if uncaptioned not in ("error", "drop"):
        raise ValueError(f"uncaptioned is {uncaptioned!r}: it must be 'error' or 'drop'")
    if bare and (uncaptioned == "error" or len(bare) == num_images):
        raise ValueError(
            f"{len(bare)} of {num_images} images have no .{text} beside them: {_some(bare)}. Write "
            f"a .{text} of the same stem for each (an empty one will do), say which suffix the "
            "texts have with data.text, or leave these images out with data.uncaptioned=drop"
        )


def _some(names: Iterable[str]) -> str:
    first = list(names)
    return ", ".join(first[:3]) + (f" and {len(first) - 3} more" if len(first) > 3 else "")


def _walk(root: pathlib.Path) -> set[str]:
    """Every file under a folder, relative to it, but for hidden ones (macOS writes ._a.jpg)."""
    return {
        os.path.relpath(os.path.join(folder, file), root)
        for folder, _, files in os.walk(root)
        for file in files
        if not file.startswith(".")
    }


def _text_name(image: str, text: str) -> str:
    return f"{os.path.splitext(image)[0]}.{text}"
