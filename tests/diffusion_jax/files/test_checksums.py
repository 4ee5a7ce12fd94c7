"""Checksums of a folder's files: damaged files are named, and processes share the work."""

import json

import pytest

from diffusion_jax.files import checksums

CONTENTS = {"a": b"one", "params/b": b"\x00" * 5000, "params/deep/c": b"", "data/d": b"four"}


@pytest.fixture
def folder(tmp_path):
    for name, content in CONTENTS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_write_lists_every_file_once_with_its_sha256(folder):
    checksums.write(folder)
    (path,) = (folder / "checksums").iterdir()
    listed = json.loads(path.read_text())
    assert list(listed) == sorted(CONTENTS)
    assert checksums.damage(folder) is None
    # SHA-256 of "one".
    assert listed["a"] == [3, "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"]


def test_a_flipped_bit_a_truncated_file_and_a_missing_file_are_named(folder):
    checksums.write(folder)
    flip(folder / "params" / "b")
    assert checksums.damage(folder) == "params/b: its bytes differ from those written"
    (folder / "data" / "d").write_bytes(b"fo")
    assert checksums.damage(folder) == "data/d: 2 bytes, but 4 were written"
    (folder / "a").unlink()
    assert checksums.damage(folder) == "a: cannot be read (No such file or directory)"
    assert [name for name, _ in checksums.damaged(folder)] == ["a", "data/d", "params/b"]
    assert checksums.damage(folder, ["data"]) == "data/d: 2 bytes, but 4 were written"
    assert checksums.damage(folder, ["optimizer"]) is None


def test_checksums_of_two_processes_can_be_checked_by_three(folder):
    checksums.write(folder)
    path = folder / "checksums" / "0-of-1.json"
    listed = list(json.loads(path.read_text()).items())
    for part in range(2):  # Earlier versions wrote one list per process.
        path.with_name(f"{part}-of-2.json").write_text(json.dumps(dict(listed[part::2])))
    path.unlink()
    flip(folder / "params" / "b")
    damages = [checksums.damage(folder, (), part, 3) for part in range(3)]
    assert sorted(map(str, damages)) == ["None", "None", "params/b: its bytes differ from those written"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 3}', b"\xff\xfe", b'{"a": [1, 2'])
def test_a_damaged_list_of_checksums_is_named(folder, content):
    checksums.write(folder)
    (folder / "checksums" / "0-of-1.json").write_bytes(content)
    assert checksums.damage(folder) == "checksums/0-of-1.json: not a list of files"


@pytest.mark.parametrize("content", [None, b"{}"])
def test_a_file_without_a_checksum_counts_as_damaged(folder, content):
    checksums.write(folder)
    path = folder / "checksums" / "0-of-1.json"
    path.write_bytes(content) if content else path.unlink()
    assert checksums.damage(folder) == "a: it has no checksum"
    assert checksums.damage(folder, ["params"]) == "params/b: it has no checksum"


def test_orbaxs_own_files_and_temporary_files_need_no_checksum(folder):
    checksums.write(folder)
    temporary = ("params/.hidden", "data/d.tmp", ".diffusion_jax/x.arrow")
    for name in ("commit_success.txt", "_CHECKPOINT_METADATA", *temporary):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    assert checksums.damage(folder) is None


def test_a_folder_without_checksums_counts_as_undamaged(folder):
    assert checksums.damage(folder) is None


def test_read_back_raises_if_a_file_differs_from_what_was_written(folder, monkeypatch):
    monkeypatch.setattr(checksums, "_drop_cache", flip)
    (folder / "params" / "deep" / "c").unlink()
    checksums.write(folder)
    with pytest.raises(OSError, match="a differs from what was written: its bytes differ"):
        checksums.read_back(folder)


def test_read_back_stops_as_soon_as_unless_returns_true(folder, monkeypatch):
    read = []
    monkeypatch.setattr(checksums, "_drop_cache", lambda path: read.append(path.name))
    checksums.write(folder)
    checksums.read_back(folder, unless=lambda: len(read) == 2)
    assert read == ["a", "d"]
