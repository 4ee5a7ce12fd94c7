"""Files are written completely or not at all."""

import errno
import os
import pathlib

import pytest

from diffusion_jax import files


def test_write_whole_replaces_the_previous_content(tmp_path):
    path = tmp_path / "a.txt"
    files.write_whole(path, "Übung")
    assert path.read_bytes() == "Übung".encode()
    files.write_whole(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_failed_write_keeps_the_old_content_and_leaves_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    files.write_whole(path, "old")

    def fail(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("links", [True, False])
def test_write_new_keeps_an_existing_file(tmp_path, monkeypatch, links):
    def refuse(path, target):
        raise OSError("Operation not supported")

    if not links:
        monkeypatch.setattr(pathlib.Path, "hardlink_to", refuse)
    path = tmp_path / "a.txt"
    files.write_new(path, "first")
    files.write_new(path, "second")
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["a.txt"]


def test_an_error_on_a_read_only_disk_names_the_file(tmp_path, monkeypatch):
    """There, deleting the temporary file that does not exist is an error, too."""

    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(pathlib.Path, "write_bytes", refuse)
    monkeypatch.setattr(pathlib.Path, "unlink", refuse)
    with pytest.raises(OSError, match="Read-only") as error:
        files.write_whole(tmp_path / "a.json", "1")
    assert error.value.filename == str(tmp_path / "a.json")


def test_whole_replaces_a_file_only_if_its_block_succeeds(tmp_path):
    path = tmp_path / "a.npz"
    with pytest.raises(ValueError, match="halfway"), files.whole(path) as temporary:
        temporary.write_text("half")
        raise ValueError("halfway")
    assert os.listdir(tmp_path) == []
    with files.whole(path) as temporary:
        temporary.write_text("all")
        assert not path.exists() and temporary.name.startswith(".a.npz.")
    assert path.read_text() == "all" and os.listdir(tmp_path) == ["a.npz"]


def test_whole_creates_a_folder_only_if_its_block_succeeds(tmp_path):
    path = tmp_path / "model"
    path.mkdir()  # An empty folder may exist already.
    with pytest.raises(ValueError, match="halfway"), files.whole(path) as temporary:
        temporary.mkdir()
        (temporary / "part").write_text("half")
        raise ValueError("halfway")
    assert os.listdir(tmp_path) == ["model"] and not os.listdir(path)
    with files.whole(path) as temporary:
        temporary.mkdir()
        (temporary / "part").write_text("all")
    assert os.listdir(tmp_path) == ["model"] and (path / "part").read_text() == "all"


def test_an_error_in_a_temporary_folder_names_the_final_folder(tmp_path):
    with pytest.raises(OSError) as raised, files.whole(tmp_path / "new") as temporary:
        temporary.mkdir()
        files.write_whole(temporary / "none" / "a.txt", "")
    assert raised.value.filename == str(tmp_path / "new" / "none" / "a.txt")
