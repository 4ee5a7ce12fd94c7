"""A file is whole or absent."""

import os
import pathlib

import pytest

from diffusion_jax import files


def test_text_and_bytes_replace_what_was_there(tmp_path):
    path = tmp_path / "a.txt"
    files.write_whole(path, "Übung")
    assert path.read_bytes() == "Übung".encode()
    files.write_whole(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_write_that_fails_leaves_the_old_content_and_no_other_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    files.write_whole(path, "old")

    def fail(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("links", [True, False])
def test_write_new_leaves_what_is_there(tmp_path, monkeypatch, links):
    def refuse(path, target):
        raise OSError("Operation not supported")

    if not links:
        monkeypatch.setattr(pathlib.Path, "hardlink_to", refuse)
    path = tmp_path / "a.txt"
    files.write_new(path, "first")
    files.write_new(path, "second")
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["a.txt"]


def test_what_is_written_beside_a_file_takes_its_place_only_when_whole(tmp_path):
    path = tmp_path / "a.npz"
    with pytest.raises(ValueError, match="halfway"), files.whole(path) as temporary:
        temporary.write_text("half")
        raise ValueError("halfway")
    assert os.listdir(tmp_path) == []
    with files.whole(path) as temporary:
        temporary.write_text("all")
        assert not path.exists() and temporary.name.startswith(".a.npz.")
    assert path.read_text() == "all" and os.listdir(tmp_path) == ["a.npz"]


def test_a_folder_is_whole_or_absent_too(tmp_path):
    path = tmp_path / "model"
    path.mkdir()  # An empty one may be there.
    with pytest.raises(ValueError, match="halfway"), files.whole(path) as temporary:
        temporary.mkdir()
        (temporary / "part").write_text("half")
        raise ValueError("halfway")
    assert os.listdir(tmp_path) == ["model"] and not os.listdir(path)
    with files.whole(path) as temporary:
        temporary.mkdir()
        (temporary / "part").write_text("all")
    assert os.listdir(tmp_path) == ["model"] and (path / "part").read_text() == "all"


def test_an_error_in_a_temporary_folder_names_the_folder_that_it_would_become(tmp_path):
    with pytest.raises(OSError) as raised, files.whole(tmp_path / "new") as temporary:
        temporary.mkdir()
        files.write_whole(temporary / "none" / "a.txt", "")
    assert raised.value.filename == str(tmp_path / "new" / "none" / "a.txt")
