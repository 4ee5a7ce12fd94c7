"""Bytes at places: ranges that are read together, damage, and files that are gone."""

import os

import pytest

from diffusion_jax.data import reading, storage, tars
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.reading import BYTES, FILE, TAR, Place


@pytest.fixture
def bytes_file(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)) * 2000)
    return str(path)


@pytest.fixture
def tar(tmp_path):
    """The places of the members of two records, a to d, in a tar with checksums."""
    path = str(tmp_path / "a.tar")
    contents = [{tars.KEY: b"1", "jpg": b"aa", "txt": b"b"}, {tars.KEY: b"2", "jpg": b"", "txt": b"d" * 600}]
    tars.write(path, contents, checksums=True)
    index = tars.scan(path)
    return [Place(path, at, size, TAR) for at, size in index.span.tolist()]


GROUPS = {
    "one range": ([[(5, 3)]], [[b"\5\6\7"]]),
    "an empty range": ([[(5, 0)], [(0, 0)], [(512_000, 0)]], [[b""], [b""], [b""]]),
    "an empty range after its neighbour": ([[(5, 2), (7, 0)]], [[b"\5\6", b""]]),
    "an empty range inside another": ([[(5, 0), (4, 2), (4, 3)]], [[b"", b"\4\5", b"\4\5\6"]]),
    "overlapping ranges": ([[(4, 4), (6, 3)]], [[b"\4\5\6\7", b"\6\7\x08"]]),
    "the same range twice": ([[(4, 2), (4, 2)], [(4, 2)]], [[b"\4\5", b"\4\5"], [b"\4\5"]]),
    "a later range first": ([[(261, 2), (4, 2)]], [[b"\5\6", b"\4\5"]]),
    "two distant ranges": ([[(256_002, 2), (3, 2)]], [[b"\2\3", b"\3\4"]]),
    "behind the end": ([[(511_999, 2), (512_000, 1), (3, 1)]], [[b"", b"", b"\3"]]),
    "an empty group": ([[], [(1, 1)], []], [[], [b"\1"], []]),
}


@pytest.mark.parametrize(("groups", "expected"), GROUPS.values(), ids=GROUPS)
def test_bytes_are_read_at_their_places(bytes_file, groups, expected):
    places = [[Place(bytes_file, at, n, BYTES) for at, n in group] for group in groups]
    assert reading.read(places) == expected


def test_near_ranges_of_a_group_are_read_together(bytes_file, monkeypatch):
    spans = []
    read = storage.read_ranges

    def recorded(*columns):
        spans.extend(zip(*columns, strict=True))
        return read(*columns)

    monkeypatch.setattr(storage, "read_ranges", recorded)
    near, far = Place(bytes_file, 30_000, 2, BYTES), Place(bytes_file, 200_000, 2, BYTES)
    reading.read([[Place(bytes_file, 10, 2, BYTES), near], [far, near]])
    assert [span[1:] for span in spans] == [(10, 30_002), (30_000, 30_002), (200_000, 200_002)]


def test_members_of_tars_are_read_and_their_checksums_compared(tar):
    contents = [b"aa", b"b", b"", b"d" * 600]
    assert reading.read([tar[:2], tar[2:]]) == [contents[:2], contents[2:]]
    assert reading.read([[place] for place in reversed(tar)]) == [[c] for c in contents[::-1]]
    with open(tar[3].file, "r+b") as file:
        file.seek(tar[3].at + 7)
        file.write(b"x")
    (same,), (changed,) = reading.read([[tar[0]], [tar[3]]])
    assert same == b"aa" and isinstance(changed, Unusable) and changed.reason == "wrong_checksum"
    os.truncate(tar[3].file, tar[3].at + 9)
    assert reading.read([[tar[3], tar[0]]]) == [[b"", b"aa"]]


def test_files_are_read_whole(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 5)
    a, b = (Place(str(tmp_path / name)) for name in "ab")
    assert reading.read([[a, b], [a]]) == [[b"aaaaa", b"bbbbb"], [b"aaaaa"]]

    def refuse(path, mode):
        if path == a.file:
            raise PermissionError(13, "Permission denied", path)
        return open(path, mode)

    monkeypatch.setattr(reading, "open", refuse, raising=False)
    unreadable, other = reading.read([[a, b]])[0]
    assert isinstance(unreadable, Unusable) and unreadable.reason == "unreadable"
    assert other == b"bbbbb"
    monkeypatch.undo()
    os.remove(a.file)
    for read in (lambda: reading.read([[a]]), lambda: reading.ends([a], 4)):
        with pytest.raises(FileNotFoundError, match=f"{tmp_path}/a"):
            read()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (2, [b"aa", b"de", b"bc", b""]),
        (-2, [b"ac", b"fg", b"cd", b""]),
        (99, [b"aaac", b"defg", b"bcd", b""]),
        (-99, [b"aaac", b"defg", b"bcd", b""]),
    ],
)
def test_the_ends_of_contents_are_read_alone(tmp_path, size, expected):
    (tmp_path / "a").write_bytes(b"aaac")
    (tmp_path / "b").write_bytes(bytes(512) + b"abcdefgh")
    places = [
        Place(str(tmp_path / "a"), kind=FILE),
        Place(str(tmp_path / "b"), 515, 4, TAR),
        Place(str(tmp_path / "b"), 513, 3, BYTES),
        Place(str(tmp_path / "b"), 513, 0, BYTES),
    ]
    assert reading.ends(places, size) == expected
    assert reading.ends(places[::-1] + places[:1], size) == expected[::-1] + expected[:1]
    assert reading.ends([], size) == []
