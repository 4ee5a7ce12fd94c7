"""Read folders of image files, whose texts are in files beside the images or in tables."""

import collections
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from diffusion_jax.config import picture_fields
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.config.settings import EMBEDDINGS, Data
from diffusion_jax.data import captions, home, reading, records, storage
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import PICTURES, TEXTS, Inventory, LeftOut
from diffusion_jax.data.pictures import TaskShapes
from diffusion_jax.data.reading import Place
from diffusion_jax.data.records import Alternative, Records
from diffusion_jax.data.sources import metadata
from diffusion_jax.data.table import InPlace, Row, Table
from diffusion_jax.files import untrusted

MASK = "mask.png"
"""The suffix of the masks of data.loss_mask="file". Beside an image, such a file is no image."""
_UNUSED = 100  # The largest number of tables that are not read and that the table names.


def open_source(data: Data, _: TaskShapes) -> Records:
    """Open the folder of image files at a config's data.path, with its texts."""
    fields = picture_fields.read(data.fields)
    masked = data.loss_mask == "file"
    return open_folder(records.path_of(data), data.text, data.uncaptioned, fields, MASK * masked)


def open_folder(
    path: str | os.PathLike[str],
    text: str = "txt",
    uncaptioned: str = "error",
    fields: Sequence[Field] = (),
    mask: str = "",
) -> Table:
    """Open the images under a folder, in the order of their names, each with a text.

    Args:
        path: the folder, which is searched recursively, or a table of captions in it; then, no
            other table of its kind is read. Or the folder that `data import --out` wrote.
        text: where the texts are. Files beside the images: "txt" or "json:FIELD" for captions, or a
            suffix such as "npy" or "t5.npz" for embeddings. Tables: the kind (a key of
            metadata.SUFFIXES) and the caption column, such as "jsonl:caption". Several places, such
            as "txt,jsonl:long*0.5", give the images several texts.
        uncaptioned: "error" raises ValueError if images lack a text, "drop" leaves them out, and
            "empty" gives them the text "".
        fields: the numbers of each image. By default, they are in the tables of `text` or, if it
            names none, in JSON files beside the images.
        mask: suffix of the image file beside each image that holds its mask, or "" for none.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: there are no images, images lack a text and `uncaptioned` is "error", all images
            lack a text and `uncaptioned` is "drop", images lack a number or mask, or `text` or
            `fields` names a table that is missing or damaged.
    """
    rule = home.rule("folder", text, fields, mask=mask)
    table = home.saved(path, rule) or home.open_table(_Files(path, text, fields, mask).source())
    empty = uncaptioned == "empty"
    bare = table.bare()[: None if not empty else 0]
    first, suffixes = table.names(bare[:3].tolist()), table.card["facts"]["suffixes"]
    records.check_captions(len(bare), first, len(table), text, uncaptioned, suffixes)
    rows = np.delete(np.arange(len(table)), bare)
    for name in table.card["fields"]:
        if len(lacking := rows[table.lacks_number(name)[rows]]):
            raise ValueError(
                f"{len(lacking)} of {len(rows)} images in {path} have no number for {name!r} in "
                f"data.fields: {', '.join(table.names(lacking[:3].tolist()))}; add their numbers, "
                "or remove these images"
            )
    if mask and len(lacking := rows[table.lacks_mask()[rows]]):
        raise ValueError(
            f"{len(lacking)} of {len(rows)} images in {path} have no file .{mask} beside them: "
            f"{', '.join(table.names(lacking[:3].tolist()))}; add these masks, or set "
            "data.loss_mask=''"
        )
    return table.view(rows, "" if empty else None)


def captioned(path: str | os.PathLike[str], text: str) -> set[str]:
    """Return the images of a folder that have a text; see `open_folder` for the arguments.

    No file but the tables is read. Raises ValueError if there is no image, or a table is damaged.
    """
    found = _Files(path, text)
    return set[str]().union(*(texts for _, texts in found.texts(LeftOut())))


class _Files:
    """The files under a folder, and which of them belong to each image."""

    def __init__(self, path: str | os.PathLike[str], text: str, fields: Sequence[Field] = (), mask: str = ""):
        """List the files; see `open_folder`."""
        records.check_exists([os.fspath(path)], "folder")
        self._parts = records.check_text(text, metadata.SUFFIXES)
        root, table = os.fspath(path), ""
        if os.path.isfile(root):
            root, table = os.path.dirname(root) or ".", os.path.basename(root)
        kind = os.path.splitext(table)[1].lower()
        if table and kind not in {metadata.SUFFIXES.get(part.suffix) for part in self._parts}:
            raise ValueError(
                f"data.path is the file {path}, but data.text is {text!r}: name a folder or, with "
                "data.text=csv:COLUMN, a table"
            )
        images = untrusted.image_suffixes()
        self._rule = home.rule("folder", text, fields, mask=mask, table=table, images=images)
        self._root, self._left, self._mask = pathlib.Path(root), LeftOut(), mask
        self._prefix, prefix = os.path.join(self._root, ""), os.path.join(root, "")
        found = (name.removeprefix(prefix) for name in storage.walk(root, self._left))
        is_other = lambda name: table and name != table and name.lower().endswith(kind)
        self._names = {name: records.suffix_of(name) for name in found if not is_other(name)}
        kinds = frozenset(images)
        pictures = dict.fromkeys(n for n, kind in self._names.items() if kind.rpartition(".")[2] in kinds)
        self._others = {name: kind for name, kind in self._names.items() if name not in pictures}
        masks = masks_of([*pictures])
        is_mask = lambda name: name in masks or (bool(mask) and name.lower().endswith(f".{mask}"))
        self._images = [name for name in pictures if not is_mask(name)]
        self._unused_masks = [] if mask else sorted(masks)
        self._warnings, self._doubts = list[str](), list[str]()
        suffixes = self._names.values()
        noun = "pictures (jpg, png, webp, ...)" + " in the table's folder (name one that holds both)" * bool(table)
        records.check_any(len(self._images), self._root, suffixes, noun)
        tables = [part.suffix for part in self._parts if part.suffix in metadata.SUFFIXES]
        records.check_places(fields, ("json", *metadata.SUFFIXES))
        self._fields = [f._replace(place=f.place or (*tables, "json")[0]) for f in fields]
        self._facts = {
            "suffixes": sorted({*suffixes}),
            "warnings": self._warnings,
            "doubts": self._doubts,
            "unused_tables": self._unused(table),
        }

    def source(self) -> home.Source:
        """Return the data set for `home.open_table`."""
        paths = [self._prefix + name for name in self._names]
        return home.Source(str(self._root), paths, self._rule, self._rows, self._left, self._facts)

    def _unused(self, table: str) -> list[str]:
        """Return the first tables and lists that are not read, and not beside an image."""
        kinds = {part.suffix for part in self._parts} | {field.place for field in self._fields}
        read = {metadata.SUFFIXES.get(kind, f".{kind}") for kind in kinds}
        others = tuple({*metadata.SUFFIXES.values(), ".txt", ".xml", ".yaml"} - read)
        found = [name for name in self._others if name.lower().endswith(others) and not table]
        stems = {stem for image in self._images if found for stem in (image, os.path.splitext(image)[0])}
        return [name for name in found if os.path.splitext(name)[0] not in stems][:_UNUSED]

    def texts(self, inventory: Inventory) -> list[tuple[Alternative, dict[str, Any]]]:
        """Return the texts of images for each place in data.text, keyed by image.

        In files beside the images, a text is the name of its file; in tables, a metadata.Found.
        """
        found = []
        for part in self._parts:
            if part.suffix in metadata.SUFFIXES:
                place = part.suffix, part.field
                names = list(self._names)
                also = [other.field for other in self._parts if other.suffix == part.suffix]
                texts = metadata.read(self._root, names, self._images, *place, inventory, also=also)
            else:
                texts = _beside(self._images, self._names, part.suffix)
            found.append((part, texts))
        return found

    def _rows(self, inventory: LeftOut) -> Iterator[Row]:
        found = self.texts(inventory)
        captioned = set[str]().union(*(texts for _, texts in found))
        numbers = [(field, self._places_of(field)) for field in self._fields]
        masks = _beside(self._images, self._names, self._mask) if self._mask else {}
        self._count_others(found, inventory)
        self._warnings.clear()  # Of an import that ended at a full disk.
        self._doubts.clear()
        inventory.add(PICTURES, self._images)
        inventory.add("unused_mask", self._unused_masks)
        for part, texts in found:
            of = collections.Counter(texts.values()) if part.suffix not in metadata.SUFFIXES else {}
            if shared := [text for text, number in of.items() if number > 1]:
                names = ", ".join(image for image, text in texts.items() if text == shared[0])
                self._doubts.append(
                    f"texts of several pictures: {len(shared):,}, such as {shared[0]} of {names}: give each picture "
                    "its own text, as in NAME.jpg.txt, or move masks and the like to another folder"
                )
            others = set[str]().union(*(of for other, of in found if other is not part))
            lacking = sorted(captioned - texts.keys())
            if lacking and not others.isdisjoint(texts):  # Else, each picture has a text of one place.
                self._warnings.append(
                    f"{len(lacking)} of {len(captioned)} pictures have no {part.text}, only other "
                    f"texts; the first: {lacking[0]}"
                )
        for image in self._images:
            text, origins = self._text(image, found)
            mask = self._place(masks[image]) if image in masks else None
            yield Row(
                image, records.key_of(image), self._place(image), text, origins, self._numbers(image, numbers), mask
            )

    def _text(self, image: str, found: Sequence[tuple[Alternative, Any]]) -> tuple[Any, list[str]]:
        """Return the text of an image and the origin of each of its captions."""
        parts = list[tuple[Any, float, Any]]()
        for part, texts in found:
            if image not in texts:
                continue
            if part.suffix in metadata.SUFFIXES:
                text, origins = texts[image]
            elif part.suffix.endswith(EMBEDDINGS):
                text = InPlace(self._place(texts[image]), part.text, part.weight)
                origins = f"NAME.{part.suffix}"
            else:
                contents = reading.read_file(self._prefix + texts[image])
                unreadable = isinstance(contents, Unusable)
                text = contents if unreadable else records.read_text(contents, part.text)
                origins = f"NAME.{part.suffix}" + f": {part.field}" * bool(part.field)
            parts.append((text, part.weight, origins))
        if not parts or isinstance(parts[0][0], InPlace):
            return [text for text, *_ in parts], [origin for *_, origin in parts]
        return captions.with_origins(parts)

    def _places_of(self, field: Field) -> dict[str, Any]:
        """Return a field's number of each image, or the JSON file that may hold it."""
        if field.place == "json":
            return dict[str, Any](_beside(self._images, self._names, "json"))
        place = field.place, field.name
        names = list(self._names)
        found = metadata.read(self._root, names, self._images, *place, Inventory(), field)
        return {image: of.value for image, of in found.items()}

    def _numbers(self, image: str, places: Sequence[tuple[Field, Mapping[str, Any]]]) -> dict[str, float | Unusable]:
        numbers = dict[str, float | Unusable]()
        for field, of in places:
            value = of.get(image)
            if isinstance(value, str):
                contents = reading.read_file(self._prefix + value)
                if not isinstance(contents, Unusable):
                    contents = records.read_numbers(contents, [field]).get(field.name)
                value = records.number_of(field, contents)
            if value is not None:
                numbers[field.name] = value
        return numbers

    def _place(self, name: str) -> Place:
        return Place(self._prefix + name)

    def _count_others(self, found: Sequence[tuple[Alternative, Mapping[str, Any]]], inventory: LeftOut) -> None:
        beside = {part.suffix: set(texts.values()) for part, texts in found if part.suffix not in metadata.SUFFIXES}
        used = set[str]().union(*beside.values())
        counted = tuple(metadata.SUFFIXES[part.suffix] for part in self._parts if part.suffix in metadata.SUFFIXES)
        first = {suffix: name for name, suffix in reversed(self._others.items())}
        for name in dict.fromkeys([*reversed(first.values()), *self._others]):  # First one of each suffix.
            if name in used:
                inventory.add(TEXTS, [name])
            elif not name.lower().endswith(counted):  # Tables count themselves.
                inventory.add(records.other_kind(self._others[name], beside), [name])


def masks_of(names: Sequence[str]) -> set[str]:
    """Return which of these image files are masks: NAME.mask.png beside NAME.jpg."""
    images = [name for name in names if not name.lower().endswith(f".{MASK}")]
    return set(_beside(images, set(names), MASK).values())


def _beside(images: Sequence[str], names: Collection[str], suffix: str) -> dict[str, str]:
    """Return the file with this suffix beside each image, keyed by image.

    For NAME.jpg, this is NAME.txt or NAME.jpg.txt; for NAME.jpg.webp beside NAME.jpg, it is
    NAME.jpg.webp.txt only. A suffix in other case, as in NAME.TXT, is accepted. Images without such
    a file get the one whose name differs only in case or Unicode form, if there is just one.
    """
    lower = {name[: -len(suffix)] + suffix: name for name in names if name.lower().endswith(f".{suffix}")}
    if not lower:
        return {}
    whole = set(map(_folded, images))
    found, rest = dict[str, str](), list[tuple[str, list[str]]]()
    for image in images:
        stem = os.path.splitext(image)[0]
        stems = [image] if _folded(stem) in whole else [image, stem]
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
