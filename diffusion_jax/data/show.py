"""Show a data set: where its captions come from, what was left out, and what looks wrong."""

import collections
import contextlib
import difflib
import functools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import UInt8

from diffusion_jax import files
from diffusion_jax.data import captions, decoding, guess, reading, storage
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import COMPANIONS
from diffusion_jax.data.reading import Place
from diffusion_jax.data.records import Records
from diffusion_jax.data.table import Table
from diffusion_jax.files import sheets, untrusted

_ID = re.compile(r"\S*(\d|/|\\|\w\.\w)\S*|[^a-zA-Z]*")  # Numbers, hashes, names of files, paths and URLs.
# Lists of texts and objects, as programs write them into the cells of a .csv.
_LIST = re.compile(r"\[\s*['\"].*['\"]\s*\]|\{.*\}", re.DOTALL)
_PACKED = (".tar", ".zip", ".gz", ".tgz", ".7z", ".rar")
_FREQUENT = 3  # Number of the most frequent captions that are shown.
_LOOKED = 1000  # The largest number of files to look into.
_POINTER = 1024  # Pointers of Git LFS have fewer bytes.
_SHEET = 32  # Pictures on a sheet.


def overview(records: Records) -> list[tuple[str, str]]:
    """Return (label, text) pairs that describe a data set, for printing. No picture is read."""
    inventory = records.inventory()
    rows = inventory.rows()
    if companions := inventory.first.get(COMPANIONS):
        more = ", ..." * (inventory.counts[COMPANIONS] > len(companions))
        rows.append(("companions", ", ".join(companions) + more))
    if not isinstance(records, Table):
        return rows
    texts, unreadable = _count_texts(records)
    frequent = [f"{n:,} x {_short(text)}" for text, n in texts.most_common(_FREQUENT)]
    if texts:
        most = f"; the most frequent: {', '.join(frequent)}" * (len(texts) < texts.total())
        rows.append(("captions", f"{texts.total():,}, {len(texts):,} of them different{most}"))
    for origin, (count, row) in _count_origins(records).items():
        rows.append(("origin", f"{count:,} {origin}, such as that of {_name(records, row)}"))
    for reason in dict.fromkeys(text.reason for text in unreadable):
        some = {text: of for text, of in unreadable.items() if text.reason == reason}
        text, (_, row) = next(iter(some.items()))
        number = sum(count for count, _ in some.values())
        rows.append(("unreadable", f"{number:,}, such as that of {_name(records, row)}: {text}"))
    rows.append(("table", str(records.home or "in memory, because no folder for it is writable")))
    return [(label, line(text)) for label, text in rows]


def about(table: Table, name: str) -> list[tuple[str, str]]:
    """Return (label, text) pairs with all that is known of a picture, which is decoded.

    Args:
        table: the data set.
        name: the picture's name, or the end of its path; or the name of a file that was left out.

    Raises:
        ValueError: there is no such file, or several pictures have this name.
    """
    whole = table.whole()
    names, left = whole.names(range(len(whole))), dict(table.left())
    ends = lambda others: [o for o in others if f"/{o}".endswith((f"/{name}", f", {name}"))]
    named = [name] if name in (*names, *left) else ends(names) or ends(left)
    known = named[0] if named else name
    found = [i for i, other in enumerate(names) if other == known]
    reasons = [left[known]] if known in left else []
    if not found and not reasons:
        close = [f": did you mean {n}?" for n in difflib.get_close_matches(name, names, 1)]
        raise ValueError(
            f"--row={name}: no picture has this name, and no file of this name was left out" + "".join(close)
        )
    if (number := max(len(named), len(found))) > 1:
        raise ValueError(f"--row={name} names {number} pictures: write {known}")
    rows = [("name", known)]
    if found:
        row, [record], [place] = whole.row(found[0]), whole.read(found), whole.places(found)
        rows = [
            ("name", row.name),
            ("key", str(row.key)),
            ("place", _placed(place)),
            ("picture", _picture(record.image, record.text)),
        ]
        texts = captions.every(record.text)
        weights = getattr(record.text, "weights", (1.0,))
        origins = [*row.origins, *[""] * (len(texts) - len(row.origins))]
        for text, weight, origin in zip(texts, weights, origins, strict=True):
            shown = f"array {np.shape(text)}" if isinstance(text, np.ndarray) else str(text)
            rows.append(("caption", f"{shown} (weight {weight:.3g}, {origin or 'no origin'})"))
        rows += [("number", f"{field}: {number}") for field, number in row.numbers.items()]
        rows += [("mask", row.mask.file)] if row.mask else []
    rows += [("left out", reason) for reason in reasons]
    return [(label, line(text)) for label, text in rows]


def line(text: str) -> str:
    """Return a text, such as the name of a file, as one line that is safe to print."""
    return untrusted.printable(text).replace("\n", r"\n")


def sample_sheet(records: Records, size: int = 128, lines: int = 3) -> UInt8[np.ndarray, "_ _ 3"]:
    """Return a contact sheet with the images and captions of 32 random records.

    Each image is cropped to `size` x `size` pixels. A caption has at most `lines` lines. Unusable
    records are left out.

    Raises:
        ValueError: No drawn record is usable.
    """
    images, labels = [], []
    for record in records.read(draw(len(records), min(_SHEET, len(records)), 0)):
        if isinstance(record.text, Unusable):
            continue
        try:
            images.append(decoding.crop(record.image, (size, size)))
        except Unusable:
            continue
        text = captions.first(record.text)
        labels.append(text if isinstance(text, str) else f"text {np.shape(text)}")
    if not images:
        raise ValueError(
            f"no sheet of samples can be drawn, because none of {_SHEET} random records has a "
            "usable image and text: `prepare validate` finds the reasons"
        )
    return sheets.contact_sheet(np.stack(images), labels, lines=lines)


@functools.cache
def draw(length: int, num: int, seed: int) -> Sequence[int]:
    """Return `num` different random numbers below `length`, sorted."""
    return np.sort(np.random.default_rng(seed).choice(length, num, replace=False)).tolist()


def doubts(records: Records) -> list[str]:
    """Return what looks wrong in a table, as lines that each name an example and the way out.

    Of other records, nothing is known.
    """
    if not isinstance(records, Table):
        return []
    table = records.whole()
    texts, unreadable = _count_texts(table)
    blank = texts.pop("", 0)
    total = texts.total()
    found = [*_lacking(table, blank), *_pointers(table, unreadable), *_unread(table), *_by_name(table)]
    found += table.card["facts"].get("doubts", ())
    if first := table.inventory().first.get("second_picture"):
        found.append(
            f"the last picture of each record gets its text, not others such as {first[0]}: leave masks out of the tars"
        )
    if total > 1 and len(texts) == 1:
        found.append(
            f"all {total:,} captions are {_short(next(iter(texts)))}: a model learns nothing from "
            "its prompts then; unless this is meant, name another place of captions (data.text)"
        )
    single = {text: n for text, n in texts.items() if not guess.has_several_words(text)}
    ids = {text: n for text, n in single.items() if _ID.fullmatch(text)}
    lists = {text: n for text, n in texts.items() if _LIST.fullmatch(text)}
    # Paragraphs have blank lines between them.
    lines = {text: n for text, n in texts.items() if "\n" in text and all(map(str.strip, text.split("\n")))}
    nouns = "look like ids, paths or URLs", "look like lists or objects of a program", "have one word"
    nouns = *nouns, "have several lines (txt:lines reads each line of a .txt as a caption)"
    for some, noun in zip((ids, lists, single, lines), nouns, strict=True):
        if 2 * (number := sum(some.values())) > total and len(texts) > 1:
            found.append(
                f"{number:,} of {total:,} captions {noun}, such as {_short(next(iter(some)))}: "
                "unless these are meant, name another place of captions (data.text)"
            )
            break
    return list(map(line, found))


def _lacking(table: Table, blank: int) -> Iterable[str]:
    """Count the pictures without a caption. With several each, some may be blank."""
    bare, inventory = table.bare(), table.inventory()
    entries = list(table.distinct("text"))
    more = sum(count for _, count, _ in entries) - (len(table) - len(bare))
    missing = [
        (count, row) for text, count, row in entries if isinstance(text, Unusable) and text.reason == "no_caption"
    ]
    lacking = len(bare) + inventory.counts["no_caption"] + max(0, blank - more)
    lacking += sum(count for count, _ in missing)
    pictures = len(table) + inventory.counts["no_caption"]
    if lacking and 2 * lacking >= pictures:
        first = [*table.names(bare[:1].tolist()), *inventory.first.get("no_caption", ())]
        first += [_name(table, row) for text, _, row in entries if text == ""]
        first += [_name(table, row) for _, row in missing]
        others = inventory.first.get("no_picture", ())
        yield (
            f"{lacking:,} of {pictures:,} pictures have no caption, such as {first[0]}"
            + f"; texts without a picture: {', '.join(others)}" * bool(others)
            + ": add captions, or name the place of captions (data.text)"
        )


def _pointers(table: Table, unreadable: Mapping[Unusable, tuple[int, int]]) -> Iterable[str]:
    """Look into the texts and into at most 1,000 picture files for pointers of Git LFS."""
    rows = draw(len(table), min(_LOOKED, len(table)), 0)
    places = table.places(rows)
    inside = [p for p in places if p.kind in (reading.TAR, reading.BYTES) and p.size < _POINTER]
    starts = dict(zip(inside, reading.ends(inside, len(untrusted.POINTER)), strict=True))
    is_pointer = lambda p: storage.is_pointer(p.file) if p.kind == reading.FILE else starts.get(p) == untrusted.POINTER
    found = [row for row, place in zip(rows, places, strict=True) if is_pointer(place)]
    texts = [of for text, of in unreadable.items() if untrusted.IS_POINTER in str(text)]
    packed = "" if table.card["rule"].get("source") == "folder" else ", and write the data set again"
    for number, noun, row in (
        (len(found), f"of {len(rows):,} picture files looked into", found[:1]),
        (sum(count for count, _ in texts), "in texts", [row for _, row in texts]),
    ):
        if number:
            yield (
                f"pointers of Git LFS: {number:,} {noun}, such as that of "
                f"{_name(table, row[0])}: run git lfs pull in their repository{packed}"
            )


def _unread(table: Table) -> Iterable[str]:
    """Name the tables without a column of names, and other files that name or hold pictures."""
    rows = draw(len(table), min(_LOOKED, len(table)), 0)
    pictures = [name.rpartition("/")[2] for name in table.names(rows)]
    left = collections.defaultdict[str, list[str]](list)
    for name, reason in table.left():
        left[reason].append(name)
    tables = [*left["beside_tars"], *left["beside_records"], *left["table_without_column"]]
    tables = [*tables, *table.card["facts"].get("unused_tables", ())][:_LOOKED]
    found = left["table_without_file_name"]
    for name in [*left["no_picture"][:_LOOKED], *tables]:
        with contextlib.suppress(OSError):
            path = table.path(name)
            is_read = name in left["table_without_column"][:_LOOKED]  # Its rows name pictures anyway.
            names_any = not is_read and guess.names_pictures(files.path(path), pictures)
            if names_any or (name in tables and guess.describes(path, pictures)):
                found.append(name)
    packed = [name for name in left["format"] if name.lower().endswith(_PACKED)]
    packed += [name for name in tables if guess.has_pictures([pathlib.Path(table.path(name))])]
    if packed:
        yield (
            f"files that may hold more pictures, but are not read: {len(packed):,}, such as {packed[0]}: unpack them, "
            "or move them to a folder of their own, and name it in data.path"
        )
    advice = "give it the columns file_name and caption, and name them in data.text, as in csv:caption"
    if (source := table.card["rule"].get("source")) not in ("folder", "webdataset"):
        advice = "captions must be in the records: write the data set again with them"
    if source == "webdataset":
        advice = "captions of tars must be in the tars; or unpack the tars into its folder, and read that folder"
    if found:
        yield f"files that may hold captions, but are not read: {len(found):,}, such as {found[0]}: {advice}"


def _by_name(table: Table) -> Iterable[str]:
    """Count the captions of tables whose rows may mean other pictures.

    A row that names a picture without its suffix is in doubt only if others name it exactly.
    """
    origins = _count_origins(table)
    for origin, (count, row) in origins.items():
        column, _, how = origin.rpartition(", ")
        mixed = how.startswith("without the suffix") and f"{column}, exact path" in origins
        if mixed or how.startswith(("by the file name alone", "by the last")):
            yield (
                f"captions found {how}: {count:,}, such as that of {_name(table, row)} in "
                f"{origin.partition(':')[0]}: look at some with `show --sheet`, or write exact "
                "paths, relative to the table"
            )


def _count_origins(table: Table) -> dict[str, tuple[int, int]]:
    """Return the (number, first row) of each origin, the most frequent one first."""
    counts, first = collections.Counter[str](), dict[str, int]()
    for origin, count, row in table.distinct("origin"):
        counts[origin] += count
        first.setdefault(origin, row)
    return {origin: (count, first[origin]) for origin, count in counts.most_common()}


def _count_texts(table: Table) -> tuple[collections.Counter[str], dict[Unusable, tuple[int, int]]]:
    """Return how often each caption occurs, and the (number, first row) of each unreadable text."""
    counts, unreadable = collections.Counter[str](), dict[Unusable, tuple[int, int]]()
    for text, count, row in table.distinct("text"):
        if isinstance(text, str):
            counts[text] += count
        elif isinstance(text, Unusable):
            unreadable[text] = count, row
    return counts, unreadable


def _name(table: Table, row: int) -> str:
    return table.whole().names([row])[0]


def _placed(place: Place) -> str:
    if place.kind == reading.FILE:
        return place.file
    if place.kind == reading.RECORD:
        return f"{place.file}, record {place.at:,}"
    return f"{place.file}, bytes {place.at:,} to {place.at + place.size:,}"


def _picture(image: bytes, text: object) -> str:
    if not image and isinstance(text, Unusable):
        return str(text)
    if image.startswith(np.lib.format.MAGIC_PREFIX):
        return f"moments, {len(image):,} bytes"
    try:
        decoding.crop(image, (64, 64))
    except Unusable as error:
        return str(error)
    with untrusted.open_image(image) as opened:
        return f"{opened.width} x {opened.height} pixels, {opened.format}, {len(image):,} bytes"


def _short(text: str) -> str:
    return f'"{text[:57]}..."' if len(text) > 60 else f'"{text}"'
