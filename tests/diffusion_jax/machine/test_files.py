"""A file is whole or absent."""

import os
import pathlib

import pytest

from diffusion_jax.machine import files


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
