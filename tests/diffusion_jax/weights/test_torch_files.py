"""Reading torch's and NeMo's files without torch, and without executing pickled code.

The fixture was written by torch 2.13: a Lightning checkpoint with settings of unknown classes, an
optimizer, and an object whose unpickling would run `touch unpickled`.
"""

import gzip
import io
import pathlib
import re
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from diffusion_jax.files.untrusted import POINTER
from diffusion_jax.weights import torch_files
from tests import written_tars
from tests.diffusion_jax.weights import torch_writer

FIXTURE = pathlib.Path(__file__).parents[2] / "fixtures" / "lightning.ckpt"
LEGACY = FIXTURE.with_name("legacy.pth")
PREFIX = "model.model.unet."


def check_arrays(state):
    grid = np.arange(24, dtype=np.float32).reshape(4, 6)
    expected = {
        "a": grid,
        "b": grid.T[1:3],  # A view of the same memory with other strides.
        "half": np.array([0.5, -2], np.float16),
        "bf16": np.array([1.5, -3]),
        "scalar": np.array(7),
        "parameter": np.array([3.0, 3.0]),
        "flags": np.array([True, False]),
    }
    assert state.keys() == {PREFIX + name for name in expected}
    for name, array in expected.items():
        np.testing.assert_array_equal(state[PREFIX + name].astype(array.dtype), array)
    assert str(state[PREFIX + "bf16"].dtype) == "bfloat16"


def test_a_checkpoint_is_read_without_executing_its_pickle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_arrays(torch_files.read_state_dict(FIXTURE))
    assert b"touch unpickled" in FIXTURE.read_bytes() and not list(tmp_path.iterdir())


def test_a_file_of_torch_before_1_6_is_read_without_executing_its_pickle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_arrays(torch_files.read_state_dict(LEGACY))
    assert b"touch unpickled" in LEGACY.read_bytes() and not list(tmp_path.iterdir())
    (tmp_path / "cut.pth").write_bytes(LEGACY.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"cut.pth: ValueError: the file is truncated"):
        torch_files.read_state_dict(tmp_path / "cut.pth")


def test_float8_arrays_are_read_from_a_file_of_torch_2_13():
    """The fixture holds k / 4 for k = 0 to 5: as a [2, 3] array, and transposed."""
    state = torch_files.read_state_dict(FIXTURE.with_name("float8.pt"))
    grid = np.arange(6, dtype=np.float32).reshape(2, 3) / 4
    assert {name: str(array.dtype) for name, array in state.items()} == {"v": "float8_e5m2", "w": "float8_e4m3fn"}
    np.testing.assert_array_equal(state["v"].astype(np.float32), grid)
    np.testing.assert_array_equal(state["w"].astype(np.float32), grid.T)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_weights_and_config_are_read_from_a_nemo_file(tmp_path, mode):
    members = {"./model_config.yaml": b"unet: {embed_dim: 8}", "./model_weights.ckpt": FIXTURE.read_bytes()}
    path = written_tars.write(tmp_path / "m.nemo", members, mode)
    check_arrays(torch_files.read_state_dict(path))
    assert torch_files.read_nemo_config(path) == {"unet": {"embed_dim": 8}}


def test_safetensors_npz_and_files_with_wrong_suffixes_are_read(tmp_path):
    arrays = {"a": np.arange(3.0)}
    np.savez(tmp_path / "a.npz", **arrays)
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    torch_writer.save(tmp_path / "c.safetensors", {"a": np.arange(3.0, dtype=np.float32)})
    (tmp_path / "b.ckpt").write_bytes((tmp_path / "a.safetensors").read_bytes())
    # The last two have wrong suffixes.
    for name in ("a.npz", "a.safetensors", "b.ckpt", "c.safetensors"):
        read = torch_files.read_state_dict(tmp_path / name)
        np.testing.assert_array_equal(read["a"], arrays["a"])


def test_arrays_are_memory_mapped_and_a_changed_byte_is_an_error(tmp_path):
    array = np.arange(4096, dtype=np.float32)
    torch_writer.save(tmp_path / "a.bin", {"a": array})
    mapped = torch_files.map_state_dict(tmp_path / "a.bin")["a"]
    assert not mapped.flags.owndata and not mapped.flags.writeable
    content = bytearray((tmp_path / "a.bin").read_bytes())
    content[content.index(array.tobytes()) + 5] ^= 1
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match="archive/data/0 in the zip is damaged: download the file"):
        torch_files.read_state_dict(tmp_path / "a.bin")


def zipped(name):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "a")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.ckpt", b"\x80\x02}q\x00.", "a.ckpt: ValueError: the file is not a torch checkpoint, neither in zip"),
        ("a.ckpt", FIXTURE.read_bytes()[:3000], "cannot read"),
        ("a.nemo", b"nothing", "a.nemo: ReadError"),
        ("a.ckpt", b"", "a.ckpt: the file is empty: download it again"),
        ("a.safetensors", POINTER + b"v1\noid sha256:0\nsize 5\n", "it is a Git LFS pointer instead of the w"),
        ("a.bin", b"\n<!DOCTYPE html>", "a.bin: it is a web page instead of the weights: download"),
        ("a.ckpt", b"Entry not found", "holds no weights, but the text 'Entry not found'"),
        ("a.safetensors", b"GGUF\3\0\0\0", "a.safetensors: it is a GGUF file of llama.cpp"),
        ("a.ckpt", gzip.compress(b"a"), "a.ckpt: it is a gzip archive: unpack it"),
        ("a.onnx", b"\x08\x07\x12\x07pytorch", "a.onnx: it is an ONNX file"),
        ("a.pt", zipped("model.txt"), "a.pt: it is a zip archive of model.txt: unpack it"),
        ("a.pt", zipped("a/data.pkl")[:-30], "a.pt: the file is cut off: download it again"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,  # Archives hold the time.
)
def test_files_that_are_not_checkpoints_are_errors_that_name_them(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        torch_files.read_state_dict(tmp_path / name)


def test_split_empty_and_missing_models_are_errors(tmp_path):
    parts = {f"mp_rank_0{i}/model_weights.ckpt": b"" for i in (0, 1)}
    with pytest.raises(ValueError, match=r"2 files named model_weights\.ckpt, not one"):
        torch_files.read_state_dict(written_tars.write(tmp_path / "m.nemo", parts))
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as empty:
        empty.writestr("a/data.pkl", b"\x80\x02}q\x00.")  # An empty dictionary.
    with pytest.raises(ValueError, match=r"holds \[\] instead of a state dict"):
        torch_files.read_state_dict(tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError, match="no file"):
        torch_files.read_state_dict(tmp_path / "none.ckpt")
