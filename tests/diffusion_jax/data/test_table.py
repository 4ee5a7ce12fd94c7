"""Tables: every kind of row is read as it was written, and damage is never read as other rows."""

import json
import os
import shutil

import numpy as np
import pytest

from diffusion_jax.data import captions, table
from diffusion_jax.data.captions import Captions
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import LeftOut
from diffusion_jax.data.reading import BYTES, TAR, Place
from diffusion_jax.data.sources.folder import open_folder
from diffusion_jax.data.table import InPlace, Row, Table
from diffusion_jax.examples.digits import rendering as digits

FIELDS = {"fields": ["year", "score"]}


def in_memory(rows, inventory, **options):
    contents = {}
    table.write(contents, rows, inventory, **options)
    return table.Table(contents)


def written(home, rows, left=(), **options):
    """Write rows to a folder or a dictionary, and return the table."""
    inventory = LeftOut()
    for name, reason in left:
        inventory.add(reason, [name])
    table.write(home, iter(rows), inventory, **options)
    return Table(home)


def row(number, text=(), **options):
    return Row(f"{number}.png", number, Place(f"/data/{number}.png"), text, **options)


def plain(text):
    """Return a value that compares equal for equal texts."""
    return ("unusable", text.reason, str(text)) if isinstance(text, Unusable) else text


SEVERAL = captions.join([("a", 1.0), ("b", 0.3), ("", 0.1), ("a", 1 / 3)])
TEXTS = {
    "a caption": "a red square",
    "an empty caption": "",
    "odd characters": "two\nlines, \u00e9 and e\u0301, \U0001f600, \0, \ufeff",
    "several captions": SEVERAL,
    "equal weights": captions.join([(str(n), 1.0) for n in range(7)]),
    "an error": Unusable("broken_text", "the text: is not UTF-8 (\udce9, \ud800)\nline 2"),
}


@pytest.fixture(params=["folder", "memory"])
def home(request, tmp_path):
    return tmp_path / "home" if request.param == "folder" else {}


def test_captions_and_errors_are_read_as_they_were_written(home):
    opened = written(home, [row(n, text) for n, text in enumerate(TEXTS.values())])
    indices = [5, 0, 3, 1, 2, 4, 3]
    texts = opened.texts(indices)
    values = list(TEXTS.values())
    assert list(map(plain, texts)) == [plain(values[i]) for i in indices]
    assert isinstance(texts[2], Captions) and texts[2].weights == SEVERAL.weights  # Bit for bit.


@pytest.mark.parametrize("kind", ["file", BYTES, TAR])
def test_embeddings_stay_in_their_files(tmp_path, home, kind):
    arrays = [np.full((2, 3), n, np.float32) for n in range(3)]
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
    encoded = [(tmp_path / f"{number}.npy").read_bytes() for number in range(3)]
    (tmp_path / "all.tar").write_bytes(bytes(512) + (bytes(512)).join(encoded))
    at = [512, 1024 + len(encoded[0]), 1536 + 2 * len(encoded[0])]
    places = [Place(f"{tmp_path}/all.tar", first, len(of), kind) for first, of in zip(at, encoded, strict=True)]
    if kind == "file":
        places = [Place(f"{tmp_path}/{n}.npy") for n in range(3)]
    one, two = InPlace(places[0], "npy"), InPlace(places[1], "t5.npy", 0.25)
    rows = [row(0, [one]), row(1, [two, InPlace(places[2], "npy")]), row(2, [one])]
    first, several, again = written(home, rows, root=str(tmp_path)).texts([0, 1, 2])
    equal = written(home, [row(0, [one, two._replace(weight=1.0)])], root=str(tmp_path)).texts([0])
    assert equal[0].weights == (0.5, 0.5)
    np.testing.assert_array_equal(first, arrays[0], strict=True)
    np.testing.assert_array_equal(again, arrays[0], strict=True)
    np.testing.assert_array_equal(several.texts, arrays[1:], strict=True)
    assert several.weights == (0.2, 0.8)


NAMES = {
    "NFD": "e\u0301.png",
    "NFC": "\u00e9.png",
    "not UTF-8": os.fsdecode(b"caf\xe9.png"),
    "two lines": "a\nb.png",
    "dots": "a..b/../c.png",
    "spaces": " a .png",
    "a colon": "a: b.png",
    "a URL": "gs:/x.png",
}


def test_names_are_the_bytes_of_the_files_names(home):
    rows = [Row(n, i, Place(f"/data/{n}"), mask=Place(f"/data/m{n}")) for i, n in enumerate(NAMES.values())]
    opened = written(home, rows, root="/data")
    assert opened.names(range(len(rows))) == list(NAMES.values())
    paths = [f"/data/{name}" for name in NAMES.values()]
    assert [place.file for place in opened.places(range(len(rows)))] == paths
    assert opened.files() == [*paths, *(f"/data/m{name}" for name in NAMES.values())]


def test_places_are_relative_to_the_root_of_the_table(home):
    tar = lambda at: Place("/data/a.tar", at, 7, TAR)
    rows = [
        Row("x/1", 1, tar(512), mask=Place("/masks/1.png")),
        Row("x/2", 2, Place("gs://bucket/b.tar", 3, 4, BYTES)),
        Row("the name", 3, Place("/data/other/name.png")),
        Row("a.png", 4, Place("/database/a.png")),
        Row("x/5", 5, tar(1024)),
    ]
    written(home, rows, root="/data")
    for moved in ("/data", "/elsewhere", "/"):
        opened, inside = Table(home, moved), moved.rstrip("/")
        assert opened.places(range(5)) == [
            Place(f"{inside}/a.tar", 512, 7, TAR),
            Place("gs://bucket/b.tar", 3, 4, BYTES),
            Place(f"{inside}/other/name.png"),
            Place("/database/a.png"),
            Place(f"{inside}/a.tar", 1024, 7, TAR),
        ]
        names = [f"{inside}/a.tar/x/1", "x/2", "the name", "a.png", f"{inside}/a.tar/x/5"]
        assert opened.names(range(5)) == names
        outside = ["gs://bucket/b.tar", "/database/a.png", "/masks/1.png"]
        assert sorted(opened.files()) == sorted([f"{inside}/a.tar", f"{inside}/other/name.png", *outside])


def test_numbers_masks_and_contents_belong_to_their_rows(tmp_path, home):
    for name in ("0.png", "1.png", "2.png", "m.png"):
        (tmp_path / name).write_bytes(name.encode())
    numbers = [
        {"year": 1999.5, "score": 1e-300},
        {"year": Unusable("broken_number", "it is: 'x'"), "score": 2.0},
        {"score": Unusable("unreadable", "no")},
    ]
    place = lambda n: Place(str(tmp_path / f"{n}.png"))
    rows = [Row(f"{n}.png", n, place(n), "x", (), numbers[n], place("m") if n else None) for n in range(3)]
    opened = written(home, rows, root=str(tmp_path), rule=FIELDS)
    first, second, third = opened.read([0, 1, 2])
    assert first == (b"0.png", "x", "0.png", {"year": 1999.5, "score": 1e-300}, None)
    assert second[:3] + second[4:] == (b"1.png", "x", "1.png", b"m.png")
    assert (str(second.numbers["year"]), second.numbers["score"]) == ("broken_number: it is: 'x'", 2.0)
    assert np.isnan(third.numbers["year"]) and str(third.numbers["score"]) == "unreadable: no"
    assert opened.lacks_number("year").tolist() == [False, False, True]  # It is not just wrong.
    assert opened.lacks_number("score").tolist() == [False, False, False]
    assert opened.lacks_mask().tolist() == [True, False, False]
    os.remove(tmp_path / "1.png")
    with pytest.raises(FileNotFoundError, match=r"1\.png"):
        opened.read([1])
    assert opened.texts([1]) == ["x"]  # The picture is not read.


@pytest.mark.parametrize("num_rows", [1, 3, 4, 8, 11])
def test_rows_in_several_parts_are_one_list(monkeypatch, home, num_rows):
    monkeypatch.setattr(table, "PART", 4)
    key, text = lambda n: 2**64 - 1 - n, lambda n: f"text {n % 3}" if n % 5 else ()
    rows = [Row(f"{n}.png", key(n), Place(f"/r/{n}.png"), text(n), [f"origin {n}"]) for n in range(num_rows)]
    left = [("notes.doc", "format"), (os.fsdecode(b"caf\xe9"), "hidden")]
    opened = written(home, rows, left, root="/r")
    assert len(opened) == num_rows == sum(map(len, opened._parts))
    order = np.random.default_rng(0).permutation(num_rows).tolist()
    assert opened.names(order) == [f"{n}.png" for n in order]
    assert opened.keys(np.array(order)).tolist() == [key(n) for n in order]
    assert opened.origins(order) == [(f"origin {n}",) for n in order]
    missing = plain(Unusable("no_caption", "it has no text"))
    assert list(map(plain, opened.texts(order))) == [text(n) or missing for n in order]
    assert opened.bare().tolist() == list(range(0, num_rows, 5))
    assert opened.files() == [f"/r/{n}.png" for n in range(num_rows)]
    assert list(opened.left()) == left and opened.left_out() == {"format": 1, "hidden": 1}
    assert len(opened.keys(np.zeros(0, int))) == 0 and opened.texts([]) == []


def test_a_view_has_some_rows_in_the_same_order(monkeypatch):
    monkeypatch.setattr(table, "PART", 4)
    inventory = LeftOut()
    inventory.add("pictures", [f"{n}.png" for n in range(10)])
    whole = in_memory((row(n, "x" if n % 4 else ()) for n in range(10)), inventory)
    rows = np.delete(np.arange(10), whole.bare())
    view = whole.view(rows)
    assert (len(whole), len(view), view.id()) == (10, 7, whole.id())
    assert view.names([6, 0, 2]) == ["9.png", "1.png", "3.png"]
    assert view.keys(np.array([6, 0])).tolist() == [9, 1]
    assert view.left_out() == {"no_caption": 3} and whole.left_out() == {}
    assert view.inventory().counts["pictures"] == 7
    assert view.inventory().first["no_caption"] == ["0.png", "4.png", "8.png"]
    assert view.whole().names([0]) == ["0.png"]
    empty = whole.view(np.arange(10), "")
    assert empty.texts([0, 1]) == ["", "x"] and empty._rows is None  # No memory for all rows.


def test_a_table_of_no_rows_can_be_opened(home):
    opened = written(home, [], [("a.doc", "format")])
    assert (len(opened), opened.files(), opened.bare().tolist()) == (0, [], [])
    assert list(opened.left()) == [("a.doc", "format")]


def test_there_may_be_more_origins_than_a_short_integer_counts(home):
    rows = [row(n, "x", origins=[f"{n}.parquet: text, by key"]) for n in range(40_000)]
    assert written(home, rows).origins([39_999]) == [("39999.parquet: text, by key",)]


def test_ids_depend_on_rows_and_texts_only():
    rows = [row(n, "abc") for n in range(3)]
    base = in_memory(rows, LeftOut(), root="/data", seen="1").id()
    left = LeftOut()
    left.add("hidden", [".DS_Store"])
    same = in_memory(rows, left, root="/data", seen="2", rule={"images": ["heic"]})
    moved = [r._replace(image=Place(f"/moved/{r.name}")) for r in rows]
    assert {base, same.id(), in_memory(moved, LeftOut(), root="/moved").id()} == {base}
    changes = [
        [row(0, "abd"), *rows[1:]],
        [*rows, row(3, "abc")],
        [rows[0]._replace(key=9), *rows[1:]],
        [rows[0]._replace(name="x.png"), *rows[1:]],
        [rows[0]._replace(image=Place("/data/a.tar", 5, 6, TAR)), *rows[1:]],
        [rows[0]._replace(mask=Place("/data/m.png")), *rows[1:]],
        [rows[1], rows[0], rows[2]],
    ]
    ids = {in_memory(change, LeftOut(), root="/data").id() for change in changes}
    assert len(ids | {base}) == 1 + len(changes)


def test_equal_parts_are_written_once(monkeypatch, tmp_path):
    monkeypatch.setattr(table, "PART", 4)
    written(tmp_path, [row(n, "x") for n in range(8)])
    before = {path.name: path.stat().st_ino for path in tmp_path.glob("*.arrow")}
    written(tmp_path, [row(n, "x" if n < 4 else "y") for n in range(8)])
    after = {path.name: path.stat().st_ino for path in tmp_path.glob("*.arrow")}
    assert before.items() < after.items() and len(after) == len(before) + 1  # The other texts.


def flipped(path):
    """Yield the file's name and the position of a bit, with this bit flipped in the file."""
    content = path.read_bytes()
    for bit in np.linspace(0, 8 * len(content) - 1, 24).astype(int).tolist():
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        yield path.name, bit
    path.write_bytes(content)


def test_a_flipped_bit_is_an_error_and_a_new_table_heals_the_file(tmp_path):
    rows = [row(n, SEVERAL if n else "y") for n in range(5)]
    written(tmp_path, rows, [("a", "format")])
    for path in sorted(tmp_path.iterdir()):
        card = path.name if path.suffix == ".json" else table.CARD
        for place in flipped(path):
            with pytest.raises((ValueError, KeyError)):
                print(place, Table(tmp_path, None, card).texts(range(5)))
        path.write_bytes(os.urandom(path.stat().st_size))
        with pytest.raises((ValueError, KeyError)):
            Table(tmp_path, None, card)
        assert written(tmp_path, rows, [("a", "format")]).texts([1]) == [SEVERAL]
        path.unlink()
        with pytest.raises(FileNotFoundError, match=r"there is no .*: import the data"):
            Table(tmp_path, None, card)
        written(tmp_path, rows, [("a", "format")])


@pytest.mark.parametrize("name", ["../a.rows.arrow", "/etc/passwd", "a/b.rows.arrow", ""])
def test_a_card_names_only_files_beside_it(tmp_path, name):
    """An attacker's card has a correct checksum."""
    home = tmp_path / "home"
    written(home, [row(0, "x")])
    card = json.loads((home / table.CARD).read_bytes())
    (tmp_path / "a.rows.arrow").write_bytes((home / card["parts"][0]["rows"][0]).read_bytes())
    card["parts"][0]["rows"][0] = name
    del card["check"]
    (home / table.CARD).write_text(json.dumps(card | {"check": table._check(card)}))
    with pytest.raises(ValueError, match=r"names the file .*: import the data again"):
        Table(home)


@pytest.mark.parametrize("change", [{"version": 1}, {"version": 0}])
def test_a_card_of_another_version_is_an_error(tmp_path, change):
    written(tmp_path, [row(0, "x")])
    card = json.loads((tmp_path / table.CARD).read_bytes()) | change
    (tmp_path / table.CARD).write_text(json.dumps(card))
    with pytest.raises(ValueError, match="another version wrote the table in"):
        Table(tmp_path)


def test_a_folder_without_a_table_is_an_error_with_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"there is no table in {tmp_path}/x: import the"):
        Table(tmp_path / "x")


def test_a_folders_table_says_where_each_caption_comes_from(tmp_path):
    folder = digits.write_examples(tmp_path / "data", 3, size=8)
    for number in range(3):
        (folder / f"0000{number}.json").write_text('{"long": ["x", "y"]}')
    (folder / "t.csv").write_text("file_name,text\n00000.PNG,z\n")
    opened = open_folder(folder, "txt,json:long,csv:text")
    lines = ("NAME.txt", "NAME.json: long", "NAME.json: long")
    table_line = "t.csv: text, other case or Unicode form"
    assert opened.origins([0, 2]) == [(*lines, table_line), lines]
    shutil.rmtree(folder / ".diffusion_jax")
    assert opened.texts([2])[0].texts[1:] == ("x", "y")  # The table stays mapped into memory.


@pytest.mark.parametrize(
    ("place", "contents", "expected"),
    [
        ("json:long,txt", "{}", ["NAME.txt"]),
        ("json:long,txt", '{"long": ["a", "b"]}', ["NAME.json: long"] * 2 + ["NAME.txt"]),
        ("json:long,txt", '{"long": []}', ["NAME.txt"]),
        ("txt,json:long", "{", ["NAME.json: long"]),  # The origin of the error.
        ("json:long", "{}", ["NAME.json: long"]),
        ("json:long,csv:text,txt", "{}", ["t.csv: text, exact path"] * 2 + ["NAME.txt"]),
        ("npy", "{}", ["NAME.npy"]),
    ],
)
def test_each_caption_has_its_own_origin(tmp_path, place, contents, expected):
    folder = digits.write_examples(tmp_path / "data", 1, size=8)
    (folder / "00000.json").write_text(contents)
    (folder / "t.csv").write_text("file_name,text\n00000.png,y\n00000.png,z\n")
    np.save(folder / "00000.npy", np.zeros((2, 3)))
    opened = open_folder(folder, place)
    assert opened.origins([0]) == [tuple(expected)]
    assert len(captions.every(opened.texts([0])[0])) == len(expected)
