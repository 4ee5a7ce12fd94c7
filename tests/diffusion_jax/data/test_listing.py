"""Listings of tars: the records of the tars in order, built once and memory-mapped."""

import io
import pathlib
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest

from diffusion_jax import files
from diffusion_jax.data import listing, storage, tars
from diffusion_jax.data.inventory import Inventory
from diffusion_jax.data.sources.webdataset import WebDataset

SUFFIXES = ("jpg", "png", "txt", "json")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Use a temporary cache instead of the user's own."""
    monkeypatch.setattr(tars, "cache_folders", lambda: [tmp_path / "cache"])
    return tmp_path / "cache"


def write_tars(folder: pathlib.Path, num_tars: int = 4, seed: int = 0):
    """Write tars with members in random order, some without image or text. Return the contents."""
    draw, contents = np.random.default_rng(seed), {}
    folder.mkdir()
    for t in range(num_tars):
        names = [f"{i}.{s}" for i in range(t * 10, t * 10 + 9) for s in SUFFIXES]
        chosen = draw.permutation([name for name in names if draw.random() < 0.7]).tolist()
        with tarfile.open(folder / f"{t}.tar", "w") as tar:
            for name in chosen:
                info = tarfile.TarInfo(name)
                content = name.encode() * int(draw.integers(1, 300))
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
                contents[name] = content
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


def listed(folder, opened):
    """Return what the listing's spans contain, without using the project's readers."""
    rows = []
    for tar, first, last in zip(opened.tars, opened.firsts[:-1], opened.firsts[1:], strict=True):
        whole = pathlib.Path(tar).read_bytes()
        for image, image_size, text, text_size in opened.spans[first:last].tolist():
            spans = (image * 512, image_size), (text * 512, text_size)
            rows.append(tuple(whole[offset : offset + size] for offset, size in spans))
    return rows


@pytest.mark.parametrize("text", ["txt", "json"])
def test_a_listing_holds_the_records_in_the_order_of_the_tars(tmp_path, text):
    contents = write_tars(tmp_path / "s")
    opened = listing.open_listing(str(tmp_path / "s"), ("jpg", "png"), [text])
    rows = by_hand(tmp_path / "s", contents, text)
    assert len(rows) > 15 and listed(tmp_path / "s", opened) == rows
    assert opened.facts["records"] == len(rows) == opened.inventory.counts["pictures"]
    assert opened.facts["suffixes"] == sorted(SUFFIXES)


def test_a_listing_is_built_once_and_takes_16_bytes_per_record(tmp_path, monkeypatch):
    write_tars(tmp_path / "s", 20)
    first = listing.open_listing(str(tmp_path / "s"), ("jpg", "png"), ["txt"])
    (place,) = (tmp_path / "s").glob("records-*.index")
    beside = 21 * 8 + 2000  # 8 bytes for each tar's first record, and the facts in JSON.
    assert 0 < place.stat().st_size - 16 * len(first.spans) < beside
    monkeypatch.setattr(listing, "_build", lambda *_: pytest.fail("made once more"))
    again = listing.open_listing(str(tmp_path / "s"), ("jpg", "png"), ["txt"])
    np.testing.assert_array_equal(again.spans, first.spans)
    # Memory-mapped, so that processes share its pages.
    assert isinstance(again.spans.base, np.memmap)
    assert sorted(p.suffix for p in (tmp_path / "s").iterdir()) == [
        ".index", *[".npz"] * 20, *[".tar"] * 20]  # fmt: skip


def test_adding_a_tar_builds_a_new_listing_and_keeps_the_old_one(tmp_path):
    contents = write_tars(tmp_path / "s")
    before = listing.open_listing(str(tmp_path / "s"), ("jpg", "png"), ["txt"])
    spans = np.array(before.spans)
    with tarfile.open(tmp_path / "s/9.tar", "w") as tar:
        for name in ("a.jpg", "a.txt"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"new"))
    contents |= {"a.jpg": b"new", "a.txt": b"new"}
    after = listing.open_listing(str(tmp_path / "s"), ("jpg", "png"), ["txt"])
    assert listed(tmp_path / "s", after) == by_hand(tmp_path / "s", contents, "txt")
    np.testing.assert_array_equal(before.spans, spans)
    assert len(list((tmp_path / "s").glob("records-*.index"))) == 2


@pytest.mark.parametrize("place", [0, 17, 4 * 16 + 3, -1, -20])
def test_a_listing_with_a_flipped_bit_is_rebuilt(tmp_path, place):
    write_tars(tmp_path / "s")
    first = listing.open_listing(str(tmp_path / "s"), ("jpg", "png"), ["txt"])
    (path,) = (tmp_path / "s").glob("records-*.index")
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 1
    path.unlink()  # The old file is still mapped.
    path.write_bytes(damaged)
    again = listing.open_listing(str(tmp_path / "s"), ("jpg", "png"), ["txt"])
    np.testing.assert_array_equal(again.spans, first.spans)
    assert path.read_bytes() == whole


def test_a_flipped_bit_anywhere_in_a_listing_is_noticed(tmp_path):
    write_tars(tmp_path / "s")
    opened = listing.open_listing(str(tmp_path / "s"), ("jpg", "png"), ["txt"])
    (path,) = (tmp_path / "s").glob("records-*.index")
    whole, other = path.read_bytes(), tmp_path / "damaged"
    assert listing._load(path, opened.tars, 1) is not None
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 16
        other.write_bytes(damaged)
        assert listing._load(other, opened.tars, 1) is None, place


def test_a_listing_in_an_object_store_is_copied_instead_of_rebuilt(tmp_path, cache, monkeypatch):
    write_tars(tmp_path / "s")
    for tar in (tmp_path / "s").iterdir():
        files.write_whole(f"memory://listed/{tar.name}", tar.read_bytes())
    try:
        first = WebDataset("memory://listed", uncaptioned="drop")
        names = storage.walk("memory://listed", Inventory())
        (stored,) = (name for name in names if name.endswith(".index"))
        (copy,) = cache.glob("*.index")
        assert files.path(stored).read_bytes() == copy.read_bytes()
        copy.unlink()
        monkeypatch.setattr(listing, "_build", lambda *_: pytest.fail("made once more"))
        second = WebDataset("memory://listed", uncaptioned="drop")
        assert second.read([3, 0]) == first.read([3, 0])
        assert copy.exists()
    finally:
        fsspec.filesystem("memory").store.clear()


def test_processes_that_start_together_build_one_listing(tmp_path, monkeypatch):
    contents = write_tars(tmp_path / "s")
    make, builds, start = listing._build, [], threading.Barrier(3)

    def slowly(*arguments):
        builds.append(arguments)
        time.sleep(0.2)
        make(*arguments)

    def open_one(_):  # The lock is on a file, so threads can stand in for processes.
        start.wait()
        return listing.open_listing(str(tmp_path / "s"), ("jpg", "png"), ["txt"])

    monkeypatch.setattr(listing, "_build", slowly)
    with ThreadPoolExecutor(3) as pool:
        opened = list(pool.map(open_one, range(3)))
    rows = by_hand(tmp_path / "s", contents, "txt")
    assert [listed(tmp_path / "s", one) for one in opened] == [rows] * 3
    left = [p.name for p in (tmp_path / "s").iterdir() if p.suffix not in (".tar", ".npz")]
    assert len(builds) == len(left) == 1
