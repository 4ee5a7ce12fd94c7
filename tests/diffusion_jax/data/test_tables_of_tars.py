"""Tables of tars: the records of the tars in order, imported once and memory-mapped."""

import collections
import hashlib
import json
import os
import pathlib
import re
import shutil
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import numpy as np
import pytest
from absl import logging

from diffusion_jax import files
from diffusion_jax.config import picture_fields
from diffusion_jax.data import reading, storage, table, tars
from diffusion_jax.data.sources.webdataset import import_tars, open_tars
from tests import written_tars

SUFFIXES = ("jpg", "png", "txt", "caption")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Use a temporary cache instead of the user's own."""
    monkeypatch.setattr(tars, "cache_folders", lambda: [tmp_path / "cache"])
    return tmp_path / "cache"


def write_tars(folder: pathlib.Path, num_tars: int = 4, seed: int = 0):
    """Write tars with members in random order, some without image or text. Return the contents."""
    draw, contents = np.random.default_rng(seed), {}
    for t in range(num_tars):
        names = [f"{i}.{s}" for i in range(t * 10, t * 10 + 9) for s in SUFFIXES]
        chosen = draw.permutation([name for name in names if draw.random() < 0.7]).tolist()
        members = {name: name.encode() * int(draw.integers(1, 300)) for name in chosen}
        written_tars.write(folder / f"{t}.tar", members)
        contents |= members
    return contents


def by_hand(folder, contents, text):
    """Return image and text of each record, ordered by the position of its first member."""
    rows = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            names = tar.getnames()
        for key in dict.fromkeys(name.partition(".")[0] for name in names):
            images = [n for n in names if n.partition(".")[0] == key and n[-3:] in ("jpg", "png")]
            if images and f"{key}.{text}" in names:
                rows.append((contents[images[-1]], contents[f"{key}.{text}"]))
    return rows


def read(table):
    """Return image and text of each record."""
    return [(r.image, r.text.encode()) for r in table.read(range(len(table)))]


def files_of(folder):
    """Return the files of the only table beside the tars in a folder."""
    return sorted((folder / storage.OWN).glob("*/*.arrow"))


@pytest.mark.parametrize("text", ["txt", "caption"])
def test_a_table_holds_the_records_in_the_order_of_the_tars(tmp_path, text):
    contents = write_tars(tmp_path / "s")
    opened = import_tars(tmp_path / "s", text)
    rows = by_hand(tmp_path / "s", contents, text)
    assert len(rows) > 15 and read(opened) == rows
    assert len(opened) == len(rows) == opened.inventory().counts["pictures"]
    assert opened.card["facts"]["suffixes"] == sorted(SUFFIXES)
    assert {"KEY." + text} == {origin for of in opened.origins(range(len(rows))) for origin in of}


def test_a_caption_of_tars_has_the_origin_of_the_text_that_was_read(tmp_path):
    broken, lines = {"json": b"{", "txt": b"a"}, {"json": b"{}", "txt": b"a\nb"}
    rows = [{"png": b"x", **texts} for texts in (broken, lines)]
    tars.write(tmp_path / "0.tar", [{tars.KEY: b"%d" % n, **row} for n, row in enumerate(rows)])
    opened = open_tars(tmp_path, "json:long,txt:lines")
    assert opened.origins([0, 1]) == [("KEY.json: long",), ("KEY.txt: lines",) * 2]


def test_the_keys_are_the_hash_of_the_tars_name_and_the_rank_of_the_record(tmp_path):
    write_tars(tmp_path / "s")
    opened = import_tars(tmp_path / "s", "txt")
    keys = opened.keys(np.arange(len(opened))).tolist()
    of_tar = {}
    for name, key in zip(opened.names(range(len(opened))), keys, strict=True):
        of_tar.setdefault(pathlib.Path(name).parent.name, []).append(key)
    for tar, found in of_tar.items():
        digest = hashlib.blake2b(tar.encode(), digest_size=8).digest()
        first = int.from_bytes(digest, "little")
        assert found == [(first + rank) % 2**64 for rank in range(len(found))]
    assert len(of_tar) == 4


def test_a_table_names_every_file_that_is_left_out(tmp_path):
    contents = write_tars(tmp_path / "s")
    opened = import_tars(tmp_path / "s", "txt")
    names, left = opened.names(range(len(opened))), dict(opened.left())
    used = {pathlib.Path(name).name for name in names}
    pictures = {name for name in contents if name[-3:] in ("jpg", "png")}
    out = {pathlib.Path(name).name for name in left if name[-3:] in ("jpg", "png")}
    assert used | out == pictures and not used & out and len(out) > 9
    counts = collections.Counter(left.values())
    assert counts == opened.left_out() and max(counts.values()) > 3


def test_long_names_and_names_that_are_not_utf8_are_kept_whole(tmp_path):
    names = ["x" * 150 + "/1.jpg", "./b/2.jpg", b"\xff.jpg".decode(errors="surrogateescape")]
    both = [(each, b"") for name in names for each in (name, name.replace("jpg", "txt"))]
    opened = open_tars(written_tars.write(tmp_path / "a.tar", both))
    assert opened.names(range(3)) == [f"{tmp_path}/a.tar/{name}" for name in names]


def test_a_table_is_imported_once_and_is_mapped_into_memory(tmp_path, monkeypatch):
    write_tars(tmp_path / "s", 20)
    first = import_tars(tmp_path / "s", "txt")
    monkeypatch.setattr(table, "write", lambda *_, **__: pytest.fail("imported once more"))
    again = import_tars(tmp_path / "s", "txt")
    assert read(again) == read(first) and again.id() == first.id()
    assert len(files_of(tmp_path / "s")) == 4
    assert not again._parts[0].rows["key"].flags.owndata  # Mapped: processes share its pages.
    assert {p.name for p in (tmp_path / "s").iterdir() if p.suffix not in (".tar", ".npz")} == {storage.OWN}


def test_tables_beside_the_tars_are_for_all_users_and_those_in_the_cache_for_one(bucket, cache):
    write_tars(cache.parent / "t")
    os.umask(mask := os.umask(0))
    import_tars(cache.parent / "t", "txt")
    (folder,) = (cache.parent / "t" / storage.OWN).iterdir()
    assert folder.stat().st_mode & 0o777 == 0o777 & ~mask
    import_tars(bucket, "txt")
    (folder,) = (path for path in cache.iterdir() if path.suffix != ".npz")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_texts_far_from_each_other_are_read_at_the_import(tmp_path):
    of = lambda i: {"jpg": bytes(reading._GAP + 600), "txt": b"%d.txt" % i, "json": b'{"n": %d}' % i}
    again = written_tars.write(tmp_path / "a.tar", {f"{i}.{s}": text for i in range(5) for s, text in of(i).items()})
    opened = open_tars(again, fields=picture_fields.read(("n=0..9",)))
    found = [(record.text, record.numbers["n"]) for record in opened.read(range(5))]
    assert found == [(f"{i}.txt", i) for i in range(5)]
    os.utime(again, ns=(1, 1))
    assert open_tars(again, fields=picture_fields.read(("n=0..9",))).id() == opened.id()


def test_tars_that_were_moved_are_not_imported_again(tmp_path, monkeypatch):
    write_tars(tmp_path / "s")
    first = import_tars(tmp_path / "s", "txt")
    found = read(first)
    monkeypatch.setattr(table, "write", lambda *_, **__: pytest.fail("imported once more"))
    (tmp_path / "s").rename(tmp_path / "moved")
    again = import_tars(tmp_path / "moved", "txt")
    assert read(again) == found
    assert again.names([0]) == [first.names([0])[0].replace(f"{tmp_path}/s", f"{tmp_path}/moved")]
    monkeypatch.chdir(tmp_path / "moved")
    for path in (".", "./", f"{tmp_path}/moved//"):
        assert read(import_tars(path, "txt")) == found, path


def test_adding_a_tar_imports_the_tars_again_and_keeps_the_old_table(tmp_path):
    contents = write_tars(tmp_path / "s")
    before = import_tars(tmp_path / "s", "txt")
    rows = read(before)
    written_tars.write(tmp_path / "s/9.tar", new := {"a.jpg": b"new", "a.txt": b"new"})
    contents |= new
    after = import_tars(tmp_path / "s", "txt")
    assert read(after) == by_hand(tmp_path / "s", contents, "txt")
    assert read(before) == rows
    cards = {card.name for card in (tmp_path / "s" / storage.OWN).glob("*/card-*")}
    assert cards == {f"card-{one.id()}.json" for one in (before, after)}


def test_other_files_beside_the_tars_are_counted_anew_and_named(tmp_path, bucket):
    others = ["b.tar.gz", "in/a.jpg", "in/b.JPG", "train.csv", "0.parquet", "0_stats.json", "in/note.md"]
    (tmp_path / "s/in").mkdir()
    short = lambda name: re.split("/(?:s|listed)/", name)[-1]
    for place in (f"{tmp_path}/s", bucket):
        before = import_tars(place, "txt")
        assert not {"format", "beside_tars"} & set(before.left_out())
        for name in others:
            files.write_whole(f"{place}/{name}", b"")
        for _ in range(2):
            opened = import_tars(place, "txt")
            left, counts = {short(name): reason for name, reason in opened.left()}, opened.inventory().counts
            assert opened.id() == before.id()
            assert [left.get(name) for name in others] == ["format", *["beside_tars"] * 3, None, None, None]
            assert counts - before.inventory().counts == {"format": 1, "beside_tars": 3, "companions": 3}
            assert [short(name) for name in opened.inventory().first["companions"]] == others[4:]
        opened.copy(tmp_path / "copy")
        copied = table.Table(tmp_path / "copy")
        assert [*copied.left()] == [*opened.left()] and copied.left_out() == opened.left_out()


@pytest.mark.parametrize("kind", ["rows", "texts", "names", "left"])
def test_a_flipped_bit_anywhere_in_a_table_is_noticed(tmp_path, kind):
    write_tars(tmp_path / "s", 1)
    first = read(import_tars(tmp_path / "s", "txt"))
    (path,) = (path for path in files_of(tmp_path / "s") if path.name.endswith(f"{kind}.arrow"))
    whole = path.read_bytes()
    for place in (*range(0, len(whole), len(whole) // 40), len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 16
        path.unlink()  # The old file may still be mapped.
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="has changed since it was written"):
            table.Table(path.parent)
        assert read(import_tars(tmp_path / "s", "txt")) == first  # The data are imported again.
        assert path.read_bytes() == whole


@pytest.fixture
def bucket(tmp_path):
    write_tars(tmp_path / "s")
    for tar in (tmp_path / "s").iterdir():
        files.write_whole(f"memory://listed/{tar.name}", tar.read_bytes())
    yield "memory://listed"
    fsspec.filesystem("memory").store.clear()


def test_a_table_in_an_object_store_is_copied_instead_of_imported(bucket, cache, monkeypatch):
    first = open_tars(bucket, uncaptioned="drop")
    stored: Any = files.path(bucket) / storage.OWN
    (copy,) = (path for path in cache.iterdir() if path.suffix != ".npz")
    in_bucket = {name.rpartition("/")[2] for name in stored.objects()}
    assert in_bucket == {path.name for path in copy.iterdir() if path.name[:5] not in (".lock", "card-")}
    assert first.left_out()["no_picture"] == 1 and "hidden" not in first.left_out()
    shutil.rmtree(copy)
    with monkeypatch.context() as patched:
        patched.setattr(table, "write", lambda *_, **__: pytest.fail("imported once more"))
        second = open_tars(bucket, uncaptioned="drop")
        assert second.read([3, 0]) == first.read([3, 0])
        assert {path.name for path in copy.iterdir()} > {"card.json", f"card-{first.id()}.json"}
    # A damaged copy in the bucket is not used, and is replaced.
    shutil.rmtree(copy)
    name = next(name for name in stored.objects() if name.endswith("rows.arrow"))[1:]
    (stored / name).write_bytes(b"damaged")
    assert open_tars(bucket, uncaptioned="drop").read([3, 0]) == first.read([3, 0])
    assert (stored / name).read_bytes() != b"damaged"


def test_a_card_in_a_bucket_that_names_a_file_elsewhere_is_not_used(bucket, cache, tmp_path):
    first = open_tars(bucket, uncaptioned="drop")
    stored: Any = files.path(bucket) / storage.OWN
    (name,) = (name[1:] for name in stored.objects() if name.endswith("card.json"))
    card = json.loads((stored / name).read_text())
    card["parts"][0]["rows"][0] = "../../harm"
    (stored / name).write_bytes(json.dumps(card).encode())
    (copy,) = (path for path in cache.iterdir() if path.suffix != ".npz")
    shutil.rmtree(copy)
    assert open_tars(bucket, uncaptioned="drop").read([3]) == first.read([3])
    assert not list(tmp_path.rglob("harm"))


def test_a_bucket_that_cannot_be_written_leaves_each_machine_its_own_table(bucket, monkeypatch):
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: warnings.append(text % args))
    monkeypatch.setattr(files.Remote, "send", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
    assert len(open_tars(bucket, uncaptioned="drop")) > 15
    assert warnings == ["the table of the data cannot be uploaded, so each machine makes its own: no"]


def test_processes_that_start_together_import_tars_once(tmp_path, monkeypatch):
    contents = write_tars(tmp_path / "s")
    write, imports, start = table.write, [], threading.Barrier(3)

    def slowly(*arguments, **options):
        imports.append(arguments)
        time.sleep(0.2)
        write(*arguments, **options)

    def open_one(_):  # The lock is on a file, so threads can stand in for processes.
        start.wait()
        return import_tars(tmp_path / "s", "txt")

    monkeypatch.setattr(table, "write", slowly)
    with ThreadPoolExecutor(3) as pool:
        opened = list(pool.map(open_one, range(3)))
    rows = by_hand(tmp_path / "s", contents, "txt")
    assert [read(one) for one in opened] == [rows] * 3
    assert len(imports) == 1 and len(files_of(tmp_path / "s")) == 4
