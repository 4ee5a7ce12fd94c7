"""Where records come from: the shape of every source, and folders of image files."""

import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

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


@runtime_checkable
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


@runtime_checkable
class TextRecords(Protocol):
    """Records whose texts can be read without their images."""

    def text(self, index: int) -> Any:
        """`records[index].text`."""
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
        suffixes = [suffix_of(name) for name in names]
        check_any(len(images), self._root, suffixes)
        self._pairs = [(n, t) for n in images if (t := _text_name(n, text)) in names]
        bare = sorted(set(images) - {image for image, _ in self._pairs})
        check_captions(len(bare), bare[:3], len(images), text, uncaptioned, suffixes)
        self._left_out = {"no_caption": len(bare)} if bare else {}

    def __len__(self) -> int:
        """How many images have a text."""
        return len(self._pairs)

    def __getitem__(self, index: int) -> Record:
        """Reads both files; OSError if they have gone."""
        image, text = self._pairs[index]
        contents = (self._root / text).read_bytes()
        return Record((self._root / image).read_bytes(), read_text(contents, text), image)

    def text(self, index: int) -> Any:
        """Reads the text alone; OSError if its file has gone."""
        name = self._pairs[index][1]
        return read_text((self._root / name).read_bytes(), name)

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
            f"no data at {_some([str(m) for m in missing[:3]], len(missing))}: check the path, "
            "or make a tiny example set with\n"
            f"  python -m diffusion_jax.data.digits --format={format} --num=100 "
            f"--out={missing[0] if len(paths) == 1 else missing[0].parent}"
        )


def check_any(num_images: int, place: Any, suffixes: Iterable[str]) -> None:
    """ValueError if there are no images, saying what there is instead: the suffixes found."""
    if num_images == 0:
        found = _list(suffixes)
        tars = "; tars are read by the source 'webdataset'" if "tar" in found else ""
        raise ValueError(
            f"no images in {place}: looked for {', '.join(IMAGE_SUFFIXES)} "
            f"and found {found or 'nothing at all'}{tars}"
        )


def check_captions(
    num_bare: int,
    first: Sequence[str],
    num_images: int,
    text: str,
    uncaptioned: str,
    suffixes: Iterable[str],
) -> None:
    """ValueError if images lack their text, unless they are to be dropped and some are left.

    `first` are the names of up to three of them; `suffixes` are those of all files.
    """
    if uncaptioned not in ("error", "drop"):
        raise ValueError(f"uncaptioned is {uncaptioned!r}: it must be 'error' or 'drop'")
    if num_bare and (uncaptioned == "error" or num_bare == num_images):
        raise ValueError(
            f"{num_bare} of {num_images} images have no .{text} beside them: "
            f"{_some(first, num_bare)}. Write a .{text} of the same stem for each (an empty one "
            f"will do), say with data.text which suffix the texts have (there are "
            f"{_list(suffixes)}), or leave these images out with data.uncaptioned=drop"
        )


def _some(first: Sequence[str], total: int) -> str:
    return ", ".join(first[:3]) + (f" and {total - 3} more" if total > 3 else "")


def _list(suffixes: Iterable[str]) -> str:
    return ", ".join(sorted({suffix or "files without a suffix" for suffix in suffixes}))


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
