"""Read webdataset tars in random order: their records are the rows of a table."""

import collections
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Int

from diffusion_jax.config import picture_fields
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.config.settings import EMBEDDINGS, Data
from diffusion_jax.data import captions, home, reading, records, tars
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import COMPANIONS, PICTURES, TEXTS, USED, Inventory, LeftOut
from diffusion_jax.data.pictures import TaskShapes
from diffusion_jax.data.reading import TAR, Place
from diffusion_jax.data.records import Records
from diffusion_jax.data.table import InPlace, Row, Table
from diffusion_jax.data.tars import Index
from diffusion_jax.files import untrusted
from diffusion_jax.logs import progress

_INDICES = 32  # Number of tars whose indices are held in memory together.
_TEXTS = 256  # Number of records whose texts are read together.
_KINDS = (
    PICTURES,
    TEXTS,
    COMPANIONS,
    "dot_in_name",
    "format",
    "second_picture",
    "second_caption",
    "no_caption",
    "no_picture",
    "duplicate_key",
    "broken_record",
)


def open_source(data: Data, _: TaskShapes) -> Records:
    """Open the webdataset tars at a config's data.path."""
    return open_tars(
        records.path_of(data), data.text, data.uncaptioned, data.max_broken, fields=picture_fields.read(data.fields)
    )


def open_tars(
    path: str | os.PathLike[str],
    text: str = "txt",
    uncaptioned: str = "error",
    max_broken: float = 0.0,
    images: Sequence[str] = (),
    fields: Sequence[Field] = (),
) -> Table:
    """Open the images and texts in one or more tars, in the order of the tars and of their members.

    Args:
        path: a tar, a folder (searched recursively), NeMo's list of tars (wdinfo.pkl), or a pattern
            such as "shard-{0000..0099}.tar". All of these may be URLs.
        text: suffix of the text files: "txt" or "json:FIELD" for captions, or a suffix such as
            "npy" or "t5.npz" for embeddings. Several places, such as "txt,json:long*0.5", give the
            images several texts.
        uncaptioned: "error" raises ValueError if images lack a text, "drop" leaves them out.
        max_broken: largest allowed share of unreadable tars, and of files that are lost behind
            damaged headers.
        images: suffixes of the files of VAE moments, if the tars hold moments; () for images.
        fields: the numbers of each image, which are fields of the JSON file KEY.json.

    Raises:
        FileNotFoundError: a tar is missing.
        ValueError: too many tars or headers are damaged, there are no images, no image has a text,
            or some images lack a text and `uncaptioned` is not "drop".
    """
    table = import_tars(path, text, images, fields)
    table = table.view(np.delete(np.arange(len(table)), table.bare()))  # Of a column.
    inventory, facts = table.inventory(), table.card["facts"]
    _check_damage(len(table), inventory, facts, max_broken)
    num_bare, first = inventory.counts["no_caption"], inventory.first.get("no_caption", [])
    num_images = len(table) + num_bare
    kind = f"{', '.join(images)} files" if images else "pictures (jpg, png, webp, ...)"
    if not num_images and (number := inventory.counts["duplicate_key"]):
        raise ValueError(
            f"names of files occur several times in a tar ({number}, such as "
            f"{inventory.first['duplicate_key'][0]}), so no text is certain to belong to a picture: give each record "
            "a name of its own"
        )
    try:
        records.check_any(num_images, path, facts["suffixes"], kind)
        records.check_captions(num_bare, first, num_images, text, uncaptioned, facts["suffixes"])
    except ValueError as error:
        if not inventory.damaged():
            raise
        raise ValueError(
            f"tars in {path} are damaged: copy or download them again. This may be the cause: {error}"
        ) from error
    return table


def import_tars(
    path: str | os.PathLike[str], text: str, images: Sequence[str] = (), fields: Sequence[Field] = ()
) -> Table:
    """Return the table of the tars at `path`, even if they are damaged or hold no images.

    Raises:
        FileNotFoundError: a tar is missing.
        ValueError: there are no tars, a wdinfo.pkl is damaged, or `text` or `fields` is wrong.
    """
    settings = home.rule("webdataset", text, fields)
    if (table := home.saved(path, settings)) is not None:
        return table
    beside = LeftOut()
    names, stamps = tars.find_stamped(os.fspath(path), beside)
    root = _root(os.fspath(path), names)
    importer = _Importer(names, text, images or untrusted.image_suffixes(), fields)
    rule = {**settings, "path": f"{path}/".removeprefix(root).rstrip("/"), "images": importer.images}
    table = home.open_table(home.Source(root, names, rule, importer.rows, LeftOut(), importer.facts, stamps))
    table.add_beside(beside)
    return table


def _root(path: str, names: Sequence[str]) -> str:
    """Return the folder of the tars, with a slash at its end: the given one, if one is given."""
    root = f"{path.rstrip('/')}/"
    if not all(name.startswith(root) and name[len(root) :][:1] != "/" for name in names):
        root = os.path.commonprefix(names)  # noqa: RUF071 - URLs are not paths.
    return root[: root.rfind("/") + 1]


def _check_damage(num_records: int, inventory: Inventory, facts: Mapping[str, Any], max_broken: float) -> None:
    num_broken, lost = inventory.counts["broken_tar"], inventory.counts["broken_header"]
    if num_broken and (num_broken > max_broken * facts["tars"] or num_broken == facts["tars"]):
        raise ValueError(
            f"{num_broken} of {facts['tars']} tars cannot be read, and data.max_broken is "
            f"{max_broken}: replace or remove these tars. The first error is: {facts['error']}"
        )
    if lost > max_broken * (num_records + lost):
        (first, *_) = inventory.first["broken_header"]
        raise ValueError(
            f"damaged headers in tars, such as {first}, hide {lost} files or more, a larger "
            f"share than data.max_broken={max_broken}: copy or download these tars again"
        )


class _Importer:
    """Yields the records in tars that have an image and a text."""

    def __init__(self, names: Sequence[str], text: str, images: Sequence[str], fields: Sequence[Field]):
        self._parts = records.check_text(text)
        records.check_places(fields, ("json",))
        self._names, self.images, self._fields = names, images, fields
        self._texts = [part.suffix for part in self._parts]
        self._in_place = self._texts[0].endswith(EMBEDDINGS)
        self.facts: dict[str, Any] = {"tars": len(names), "suffixes": [], "error": ""}
        """The number of tars, the suffixes of all files in them, and the error of the first
        unreadable one."""

    def rows(self, inventory: LeftOut) -> Iterator[Row]:
        """Yield the rows of all tars, in their order."""
        suffixes = set[str]()
        found = indices(self._names, "tars imported")
        for tar, index in zip(self._names, found, strict=True):
            if isinstance(index, ValueError):
                inventory.add("broken_tar", [tar])
                self.facts["error"] = self.facts["error"] or str(index)
            else:
                suffixes.update(np.unique(index.suffix).tolist())
                yield from self._rows_of(tar, index, inventory)
        self.facts["suffixes"] = sorted(suffixes)

    def _rows_of(self, tar: str, index: Index, inventory: LeftOut) -> Iterator[Row]:
        files, kinds = _paired(index, self.images, self._texts, "json" if self._fields else "")
        if index.inventory.damaged() and len(files):  # The text was probably lost.
            kinds[kinds == _KINDS.index("no_caption")] = _KINDS.index("broken_record")
        names = tars.unpack(index.names)
        _count(tar, index, names, kinds, inventory)
        key = records.key_of(os.path.basename(tar))
        places = [Place(tar, at, size, TAR) for at, size in index.span.tolist()]
        read = slice(1 + len(self._parts) * self._in_place, None)
        for first in range(0, len(files), _TEXTS):
            batch = files[first : first + _TEXTS]
            used = np.unique(batch[:, read])
            used = used[used >= 0].tolist()
            (found,) = reading.read([[places[number] for number in used]])
            contents = dict(zip(used, found, strict=True))
            for rank, (image, *others) in enumerate(batch.tolist(), first):
                text, origins = self._text(others, places, contents)
                numbers = contents.get(others[-1], b"{}") if self._fields else b"{}"
                text = numbers if isinstance(numbers, Unusable) else text
                yield Row(names[image], (key + rank) % 2**64, places[image], text, origins, self._numbers(numbers))

    def _text(
        self, files: Sequence[int], places: Sequence[Place], contents: Mapping[int, Any]
    ) -> tuple[Any, list[str]]:
        """Return the text of a record, and the origin of each of its captions."""
        found = []
        for part, number in zip(self._parts, files, strict=False):
            if number >= 0:
                of: Any = contents.get(number)
                if self._in_place:
                    text = InPlace(places[number], part.text, part.weight)
                else:
                    text = of if isinstance(of, Unusable) else records.read_text(of, part.text)
                place = f"KEY.{part.suffix}" + f": {part.field}" * bool(part.field)
                found.append((text, part.weight, place))
        if self._in_place:
            return [text for text, *_ in found], [origin for *_, origin in found]
        return captions.with_origins(found)

    def _numbers(self, contents: Any) -> dict[str, float | Unusable]:
        if not self._fields or isinstance(contents, Unusable):
            return {}
        values = records.read_numbers(contents or b"{}", self._fields)
        return {f.name: records.number_of(f, values.get(f.name)) for f in self._fields}


def indices(names: Sequence[str], noun: str) -> Iterator[Index | ValueError]:
    """Yield the index of each tar, or its error, and log progress in `noun`.

    Reading headers is limited by the disk's latency, so threads do it.
    """
    with ThreadPoolExecutor(8) as threads:
        parts = (names[first : first + _INDICES] for first in range(0, len(names), _INDICES))
        found = itertools.chain.from_iterable(threads.map(_attempt, part) for part in parts)
        yield from progress.reported(found, len(names), noun)


def _attempt(name: str) -> Index | ValueError:
    try:
        return tars.load_index(name)
    except ValueError as error:
        logging.warning("skipped a tar: %s", error)
        return error


def _count(tar: str, index: Index, names: Sequence[str], kinds: np.ndarray, inventory: LeftOut) -> None:
    """Add all files of a tar to the inventory. The first names have different suffixes."""
    for number in np.flatnonzero(np.bincount(kinds)).tolist():
        kind, rows = _KINDS[number], np.flatnonzero(kinds == number)
        first = np.sort(np.unique(index.suffix[rows], return_index=True)[1])
        rows = np.concatenate([rows[first], np.delete(rows, first)]).tolist()
        left = [] if kind in USED else [f"{tar}/{names[row]}" for row in rows]
        inventory.add(kind, left, len(rows))
    for kind, number in index.inventory.counts.items():
        left = [f"{tar}/{name}" for name, reason in tars.unpack(index.left) if reason == kind]
        inventory.add(kind, left, number)


def _paired(
    index: Index, images: Sequence[str], texts: Sequence[str], more: str
) -> tuple[Int[np.ndarray, "N S"], Int[np.ndarray, "M"]]:
    """Return the records of a tar that have an image and a text, and the kind of each file.

    Returns:
        the numbers of each record's files, or -1: the image, each text and, unless `more` is "",
        the file with the suffix `more`; and the index in _KINDS of each file's kind.
    """
    suffixes, number = np.unique(index.suffix, return_inverse=True)
    kind_of = lambda suffix: _KINDS.index(_kind(suffix, images, texts))
    kinds = np.array([kind_of(suffix) for suffix in suffixes.tolist()], np.int64)[number]
    others = [*texts, *([more] if more else [])]
    files = np.full((len(index.key), 1 + len(others)), -1)  # Numbers of each record's files.
    for column, rows in enumerate((kinds == 0, *(index.suffix == other for other in others))):
        rows = np.flatnonzero(rows)
        files[index.record[rows], column] = rows  # The last one of several images.
        kinds[rows[files[index.record[rows], column] != rows]] = _KINDS.index("second_picture")
    repeated = np.bincount(index.key, minlength=1)[index.key] > 1
    if not index.inventory.damaged():  # Otherwise, the picture of a text may be lost.
        kinds[_take_last_texts(files, index, repeated)] = _KINDS.index("second_caption")
        repeated &= (files >= 0).any(1)
    # Of several records with one key, it is only certain which files belong together if all
    # records are complete.
    needed = files[:, : 1 + len(texts)]
    is_bare, has_no_picture = (needed[:, 1:] < 0).all(1), needed[:, 0] < 0
    incomplete = is_bare | has_no_picture
    unclear = repeated & np.isin(index.key, index.key[repeated & incomplete])
    for chosen, kind in ((is_bare, "no_caption"), (has_no_picture, "no_picture"), (unclear, "duplicate_key")):
        rows = needed[chosen].ravel()
        kinds[rows[rows >= 0]] = _KINDS.index(kind)
    return files[~incomplete & ~unclear], kinds


def _take_last_texts(files: np.ndarray, index: Index, repeated: np.ndarray) -> list[int]:
    """Give the only picture of a key the last text of each suffix, as unpacking the tar does.

    The records without a picture lose their texts. If a text comes before the picture, and files
    with other keys are between them, nothing changes: it may belong to a missing picture.

    Args:
        files: the numbers of each record's files, or -1: the picture, then the texts. Is changed.
        index: the index of the tar.
        repeated: whether other records have the key of a record.

    Returns:
        The numbers of the texts that others replace.
    """
    groups, replaced = collections.defaultdict[int, list[int]](list), list[int]()
    for record in np.flatnonzero(repeated).tolist():
        groups[int(index.key[record])].append(record)
    for key, of_key in groups.items():
        pictures = [record for record in of_key if files[record, 0] >= 0]
        texts = files[of_key, 1:]
        if len(pictures) != 1 or (texts < 0).all():
            continue
        between = slice(texts[texts >= 0].min(), files[pictures[0], 0])
        if (index.key[index.record[between]] == key).all():
            last = texts.max(0)
            replaced += texts[(texts >= 0) & (texts != last)].tolist()
            files[of_key, 1:], files[pictures, 1:] = -1, last
    return replaced


def _kind(suffix: str, images: Sequence[str], texts: Sequence[str]) -> str:
    if suffix in images:
        return PICTURES
    if suffix in texts:
        return TEXTS
    last = suffix.rpartition(".")[2]
    if last in images or last in texts:
        return "dot_in_name"  # The record's key ends at the first dot.
    return COMPANIONS if last in untrusted.image_suffixes() else records.other_kind(suffix, texts)
