"""Read folders of image files, whose texts are in files beside the images or in tables."""

import collections
import os
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Int, UInt64

from diffusion_jax.config import picture_fields
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.config.settings import Data
from diffusion_jax.data import captions, records, storage
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import PICTURES, TEXTS, Inventory
from diffusion_jax.data.pictures import TaskShapes
from diffusion_jax.data.records import Alternative, Record, Records
from diffusion_jax.data.sources import metadata
from diffusion_jax.files import untrusted

MASK = "mask.png"
"""The suffix of the masks of data.loss_mask="file". Beside an image, such a file is no image."""


def open_source(data: Data, _: TaskShapes) -> Records:
    """Open the folder of image files at a config's data.path, with its texts."""
    fields = picture_fields.read(data.fields)
    masked = data.loss_mask == "file"
    return Folder(records.path_of(data), data.text, data.uncaptioned, fields, MASK * masked)


class Folder(Records):
    """The images under a folder, in the order of their names, each with a text."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        text: str = "txt",
        uncaptioned: str = "error",
        fields: Sequence[Field] = (),
        mask: str = "",
    ):
        """List the files and read the tables.

        Args:
            path: the folder, which is searched recursively, or a table of captions in it; then, no
                other table of its kind is read.
            text: where the texts are. Files beside the images: "txt" or "json:FIELD" for captions,
                or a suffix such as "npy" or "t5.npz" for embeddings. Tables: the kind (a key of
                metadata.SUFFIXES) and the caption column, such as "jsonl:caption". Several places,
                such as "txt,jsonl:long*0.5", give the images several texts.
            uncaptioned: "error" raises ValueError if images lack a text, "drop" leaves them out,
                and "empty" gives them the text "".
            fields: the numbers of each image. By default, they are in the tables of `text` or, if
                it names none, in JSON files beside the images.
            mask: suffix of the image file beside each image that holds its mask, or "" for none.

        Raises:
            FileNotFoundError: the folder does not exist.
            ValueError: there are no images, images lack a text and `uncaptioned` is "error", all
                images lack a text and `uncaptioned` is "drop", images lack a number or mask, or
                `text` or `fields` names a table that is missing or damaged.
        """
        records.check_exists([os.fspath(path)], "folder")
        parts = records.check_text(text, metadata.SUFFIXES)
        root, table = os.fspath(path), ""
        if os.path.isfile(root):
            root, table = os.path.dirname(root) or ".", os.path.basename(root)
        kind = os.path.splitext(table)[1].lower()
        if table and kind not in {metadata.SUFFIXES.get(part.suffix) for part in parts}:
            raise ValueError(
                f"data.path is the file {path}, but data.text is {text!r}: name a folder or, with "
                "data.text=csv:COLUMN, a table"
            )
        self._root, self._inventory, self._texts = pathlib.Path(root), Inventory(), []
        found = (
            n.removeprefix(os.path.join(root, "")) for n in storage.walk(root, self._inventory)
        )
        is_other = lambda name: table and name != table and name.lower().endswith(kind)
        names = {name: records.suffix_of(name) for name in found if not is_other(name)}
        suffixes = names.values()
        is_picture = lambda name: names[name].rpartition(".")[2] in untrusted.image_suffixes()
        masks = masks_of([name for name in names if is_picture(name)])
        is_mask = lambda name: name in masks or (bool(mask) and name.lower().endswith(f".{mask}"))
        images = [name for name in names if is_picture(name) and not is_mask(name)]
        records.check_any(len(images), self._root, suffixes, "pictures (jpg, png, webp, ...)")
        for part in parts:
            if part.suffix in metadata.SUFFIXES:
                place = part.suffix, part.field
                texts = metadata.read(self._root, list(names), images, *place, self._inventory)
            else:
                texts = _beside(images, names, part.suffix)
            self._texts.append((part, texts))
        captioned = set[str]().union(*(texts for _, texts in self._texts))
        tables = [part.suffix for part in parts if part.suffix in metadata.SUFFIXES]
        records.check_places(fields, ("json", *metadata.SUFFIXES))
        self._fields = [f._replace(place=f.place or (*tables, "json")[0]) for f in fields]
        self._numbers = {f.name: self._places_of(f, images, names) for f in self._fields}
        # Images, and files or tables of texts and numbers.
        kinds = [*(part.suffix for part in parts), *(field.place for field in self._fields)]
        kinds = tuple(metadata.SUFFIXES.get(kind, kind) for kind in kinds)
        self._files = [name for name in names if is_picture(name) or name.lower().endswith(kinds)]
        empty = uncaptioned == "empty"
        self._images = [name for name in images if empty or name in captioned]
        self._without = set(self._images) - captioned
        for name, numbers in self._numbers.items():
            if lacking := [image for image in self._images if image not in numbers]:
                raise ValueError(
                    f"{len(lacking)} of {len(self._images)} images in {path} have no number for "
                    f"{name!r} in data.fields: {', '.join(lacking[:3])}; add their numbers, or "
                    "remove these images"
                )
        self._masks = _beside(self._images, names, mask) if mask else {}
        if mask and (lacking := [image for image in self._images if image not in self._masks]):
            raise ValueError(
                f"{len(lacking)} of {len(self._images)} images in {path} have no file .{mask} "
                f"beside them: {', '.join(lacking[:3])}; add these masks, or set data.loss_mask=''"
            )
        bare = sorted(set(images) - set(self._images))
        records.check_captions(len(bare), bare[:3], len(images), text, uncaptioned, suffixes)
        self._count_others({name: kind for name, kind in names.items() if not is_picture(name)})
        self._inventory.add(PICTURES, self._images)
        self._inventory.add("no_caption", bare)
        self._inventory.add("unused_mask", [] if mask else sorted(masks))
        for part, texts in self._texts:
            if lacking := sorted(captioned - texts.keys()):
                logging.warning("%d of %d pictures have no %s, only other texts; the first: %s",
                                len(lacking), len(captioned), part.text, lacking[0])  # fmt: skip

    def __len__(self) -> int:
        return len(self._images)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Return the images with these indices and their texts.

        Raises:
            OSError: a file has been removed.
        """
        return [self._read(self._images[index]) for index in indices]

    def heads(self, indices: Sequence[int]) -> list[bytes]:
        return [_part(self._root / self._images[index], 0) for index in indices]

    def ends(self, indices: Sequence[int]) -> list[bytes]:
        return [_part(self._root / self._images[index], -records.HEAD) for index in indices]

    def texts(self, indices: Sequence[int]) -> list[Any]:
        """Return the caption or embeddings of each image, without reading the images.

        Raises OSError for a removed file.
        """
        return [self._read_text(self._images[index]) for index in indices]

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """Return a hash of each image's path relative to the folder."""
        return np.array([records.key_of(self._images[i]) for i in indices.tolist()], np.uint64)

    def files(self) -> list[str]:
        return [os.fspath(self._root / name) for name in self._files]

    def inventory(self) -> Inventory:
        return self._inventory

    def _read(self, name: str) -> Record:
        image, text = self._contents(name), self._read_text(name)
        if isinstance(image, Unusable):
            return Record(b"", image, name)
        numbers = {field: of[name] for field, of in self._numbers.items()}
        for file in {file for file in numbers.values() if isinstance(file, str)}:
            contents = self._contents(file)
            of_file = [field for field in self._fields if numbers[field.name] == file]
            numbers |= (
                dict.fromkeys((field.name for field in of_file), contents)
                if isinstance(contents, Unusable)
                else records.read_numbers(contents, of_file)
            )
        mask = self._contents(self._masks[name]) if self._masks else None
        if isinstance(mask, Unusable):
            return Record(b"", mask, name)
        return Record(image, text, name, numbers, mask)

    def _places_of(
        self, field: Field, images: Sequence[str], names: Collection[str]
    ) -> dict[str, Any]:
        """Return a field's number of each image, or its JSON file if there is one for each."""
        if field.place == "json":
            return dict[str, Any](_beside(images, names, "json"))
        place = field.place, field.name
        return metadata.read(self._root, list(names), images, *place, Inventory(), field)

    def _read_text(self, name: str) -> Any:
        if name in self._without:
            return ""
        texts = ((part, texts[name]) for part, texts in self._texts if name in texts)
        return captions.join((self._text(part, text), part.weight) for part, text in texts)

    def _text(self, part: Alternative, text: Any) -> Any:
        if part.suffix in metadata.SUFFIXES:
            return text
        contents = self._contents(text)
        return (
            contents if isinstance(contents, Unusable) else records.read_text(contents, part.text)
        )

    def _contents(self, name: str) -> bytes | Unusable:
        try:
            return (self._root / name).read_bytes()
        except PermissionError as error:
            return Unusable("unreadable", str(error))

    def _count_others(self, names: dict[str, str]) -> None:
        beside = {part.suffix: set(texts.values()) for part, texts in self._texts
                  if part.suffix not in metadata.SUFFIXES}  # fmt: skip
        used = set[str]().union(*beside.values())
        counted = tuple(metadata.SUFFIXES[part.suffix] for part, _ in self._texts
                        if part.suffix in metadata.SUFFIXES)  # fmt: skip
        first = {suffix: name for name, suffix in reversed(names.items())}
        for name in dict.fromkeys([*reversed(first.values()), *names]):  # First one of each suffix.
            if name in used:
                self._inventory.add(TEXTS, [name])
            elif not name.lower().endswith(counted):  # Tables count themselves.
                self._inventory.add(records.other_kind(names[name], beside), [name])


def masks_of(names: Sequence[str]) -> set[str]:
    """Return which of these image files are masks: NAME.mask.png beside NAME.jpg."""
    images = [name for name in names if not name.lower().endswith(f".{MASK}")]
    return set(_beside(images, set(names), MASK).values())


def _part(path: pathlib.Path, first: int) -> bytes:
    """Return HEAD bytes of a file from the byte `first`, which counts from the end if negative."""
    with path.open("rb") as file:
        if first < 0:
            first += max(file.seek(0, os.SEEK_END), -first)
        file.seek(first)
        return file.read(records.HEAD)


def _beside(images: Sequence[str], names: Collection[str], suffix: str) -> dict[str, str]:
    """Return the file with this suffix beside each image, keyed by image.

    For NAME.jpg, this is NAME.txt or NAME.jpg.txt; for NAME.jpg.webp beside NAME.jpg, it is
    NAME.jpg.webp.txt only. A suffix in other case, as in NAME.TXT, is accepted. Images without such
    a file get the one whose name differs only in case or Unicode form, if there is just one.
    """
    lower = {name[: -len(suffix)] + suffix: name for name in names
             if name.lower().endswith(f".{suffix}")}  # fmt: skip
    if not lower:
        return {}
    whole = set(map(_folded, images))
    found, rest = dict[str, str](), list[tuple[str, list[str]]]()
    for image in images:
        stem = os.path.splitext(image)[0]
        stems = [image] if _folded(stem) in whole else [stem, image]
        texts = [f"{stem}.{suffix}" for stem in stems]
        if name := next((text for text in texts if text in names or text in lower), ""):
            found[image] = name if name in names else lower[name]
        else:
            rest.append((image, texts))
    free = metadata.unique(_folded, set(lower.values()) - set(found.values()))
    claims = collections.defaultdict[str, list[str]](list)
    for image, texts in rest:
        forms = [form for text in texts if (form := _folded(text)) in free]
        if forms:
            claims[free[forms[0]]].append(image)
    return found | {claiming[0]: text for text, claiming in claims.items() if not claiming[1:]}


def _folded(path: str) -> str:
    """Return the form of a path that is the same if the file has another case or Unicode form."""
    folder, name = os.path.split(path)
    return os.path.join(folder, metadata.folded(name))
