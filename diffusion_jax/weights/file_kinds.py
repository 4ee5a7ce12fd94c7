"""Tell the format of a file of weights from its content, because files are often renamed."""

import os
import pathlib
import tarfile
import zipfile

SAFETENSORS, NPZ, TORCH, NEMO, FLAX = "safetensors", "npz", "torch", "nemo", "flax"
_OTHERS = (
    (b"version https://git-lfs", "a Git LFS pointer instead of the weights: run git lfs pull"),
    (b"GGUF", "a GGUF file of llama.cpp: choose a .safetensors file"),
    (b"\x89HDF", "an HDF5 file of Keras: choose a .safetensors file"),
    (b"\x1f\x8b", "a gzip archive: unpack it"),
    (b"7z\xbc\xaf", "a 7z archive: unpack it"),
    (b"Rar!", "a RAR archive: unpack it"),
    (b"\xfd7zXZ", "an xz archive: unpack it"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive: unpack it"),
)
_HTML = (b"<!doctype", b"<html", b"<?xml")


def kind_of(path: str | os.PathLike[str]) -> str:
    """Return the format of a file of weights: SAFETENSORS, NPZ, TORCH, NEMO or FLAX.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty or has another format, which the message names.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: check the path")
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise ValueError(f"cannot read {path}: the file is empty: download it again")
    if path.suffix == ".nemo":  # A tar, often in gzip.
        return NEMO
    if head.startswith(b"PK"):
        return _kind_of_zip(path)
    for start, name in _OTHERS:
        if head.startswith(start):
            raise ValueError(f"cannot read {path}: it is {name}")
    if head.lstrip().lower().startswith(_HTML):
        raise ValueError(
            f"cannot read {path}: it is a web page instead of the weights: download the file "
            "itself, after logging in if the page asks for it"
        )
    if head[8:9] == b"{":  # After the length of the header.
        return SAFETENSORS
    if _is_msgpack(head):
        return FLAX
    if _is_text(head):
        start = head[:60].decode()
        raise ValueError(f"cannot read {path}: it holds no weights, but the text {start!r}")
    if path.suffix == ".onnx":
        raise ValueError(f"cannot read {path}: it is an ONNX file; choose the original weights")
    if tarfile.is_tarfile(path):
        raise ValueError(f"cannot read {path}: it is a tar archive: unpack it")
    return TORCH


def _kind_of_zip(path: pathlib.Path) -> str:
    if not zipfile.is_zipfile(path):  # A cut zip lacks its table, which is last.
        raise ValueError(f"cannot read {path}: the file is cut off: download it again")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any(name.endswith("data.pkl") for name in names):
        return TORCH
    if names and all(name.endswith(".npy") for name in names):
        return NPZ
    raise ValueError(f"cannot read {path}: it is a zip archive of {', '.join(names[:3]) or 'nothing'}: unpack it")


def _is_msgpack(head: bytes) -> bool:
    """Return whether a file starts with a msgpack dictionary whose first key is a string."""
    sizes = {0xDE: 2, 0xDF: 4}  # Bytes that hold the number of keys, if there are more than 15.
    after = 1 + sizes.get(head[0], 0)
    is_dictionary = 0x81 <= head[0] <= 0x8F or head[0] in sizes
    return is_dictionary and len(head) > after and (head[after] >> 5 == 5 or head[after] == 0xD9)


def _is_text(head: bytes) -> bool:
    return all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head)
