"""Weights of the former Flax models of diffusers and transformers are read with torch's names."""

import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import serialization, traverse_util

from diffusion_jax.weights import file_kinds, flax_files, pretrained, torch_files

NAMES = pathlib.Path(__file__).with_name("flax_names.txt")
MODELS = ("sd1", "vae", "clip", "t5")


def entries(model):
    """Return (name in Flax, shape in Flax, name in torch) for each array of a model."""
    rows = [line.split() for line in NAMES.read_text().splitlines()[1:]]
    return [(f, tuple(map(int, s.split("x"))), t) for m, f, s, t in rows if m == model]


def write(path, model, dtype=np.float32):
    """Write random arrays like the library. Return them with the names and layouts of torch."""
    rng = np.random.default_rng(0)
    flat = {name: rng.normal(size=shape).astype(dtype) for name, shape, _ in entries(model)}
    tree = traverse_util.unflatten_dict(flat, sep="/")
    path.write_bytes(serialization.msgpack_serialize(tree))
    in_torch = {}
    for name, shape, torch in entries(model):
        axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(len(shape)) if name.endswith("kernel") else None
        in_torch[torch] = flat[name] if axes is None else np.transpose(flat[name], axes)
    return in_torch


@pytest.mark.parametrize("model", MODELS)
def test_flax_arrays_have_the_names_and_layouts_of_torch(tmp_path, model):
    file = "diffusion_flax_model.msgpack" if model in ("sd1", "vae") else "flax_model.msgpack"
    expected = write(tmp_path / file, model)
    assert file_kinds.kind_of(tmp_path / file) == file_kinds.FLAX
    jax.tree.map(np.testing.assert_array_equal, pretrained.open_weights(tmp_path), expected)
    jax.tree.map(np.testing.assert_array_equal, torch_files.read_state_dict(tmp_path / file), expected)


@pytest.mark.parametrize("model", MODELS[:3])
def test_written_flax_files_equal_those_of_the_flax_model(tmp_path, model):
    state = write(tmp_path / "from.msgpack", model)
    flax_files.write(tmp_path / "to.msgpack", state)
    restored = lambda name: serialization.msgpack_restore((tmp_path / f"{name}.msgpack").read_bytes())
    jax.tree.map(np.testing.assert_array_equal, restored("to"), restored("from"))


def test_bfloat16_arrays_are_read_exactly(tmp_path):
    expected = write(tmp_path / "flax_model.msgpack", "clip", ml_dtypes.bfloat16)
    for name, array in pretrained.open_weights(tmp_path).items():
        assert array.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(array.view(np.uint16), expected[name].view(np.uint16))


def test_shards_of_a_flax_model_are_joined(tmp_path):
    expected = write(tmp_path / "whole", "clip")
    tree = serialization.msgpack_restore((tmp_path / "whole").read_bytes())
    flat, weight_map = traverse_util.flatten_dict(tree, sep="/"), {}
    for n, keys in enumerate((sorted(flat)[::2], sorted(flat)[1::2])):
        name = f"flax_model-0000{n + 1}-of-00002.msgpack"
        part = traverse_util.unflatten_dict({key: flat[key] for key in keys}, sep="/")
        (tmp_path / name).write_bytes(serialization.msgpack_serialize(part))
        weight_map |= dict.fromkeys(keys, name)
    index = tmp_path / "flax_model.msgpack.index.json"
    index.write_text(f'{{"weight_map": {str(weight_map).replace(chr(39), chr(34))}}}')
    jax.tree.map(np.testing.assert_array_equal, pretrained.open_weights(tmp_path), expected)
    (tmp_path / "flax_model-00002-of-00002.msgpack").unlink()
    with pytest.raises(FileNotFoundError, match="lacks flax_model-00002-of-00002"):
        pretrained.open_weights(tmp_path)


def test_safetensors_files_are_preferred_to_flax_files(tmp_path):
    from safetensors.numpy import save_file

    write(tmp_path / "flax_model.msgpack", "clip")
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert list(pretrained.open_weights(tmp_path)) == ["a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda whole: whole[:-40], "download it again"),
        (lambda _: serialization.msgpack_serialize({"a": {"b": "text"}}), "holds a str at a/b"),
        (lambda _: serialization.msgpack_serialize({"step": 3}), "holds a int at step"),
    ],
    ids=["cut", "text", "number"],
)
def test_a_file_that_is_not_a_flax_model_is_an_error(tmp_path, content, message):
    path = tmp_path / "flax_model.msgpack"
    write(path, "clip")
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        pretrained.open_weights(tmp_path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


LEAF = serialization.msgpack_serialize({"a": np.ones(2, np.float32)})[1:]  # Key and value.


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b"\x82" + LEAF + LEAF, "a"),
        (b"\x81\xa1b\x82" + LEAF + LEAF, "a"),
        (serialization.msgpack_serialize({"a": {"kernel": np.ones(2), "scale": np.ones(2)}}), "a.weight"),
        (serialization.msgpack_serialize({"net_0": np.ones(2), "net.0": np.ones(2)}), "net.0"),
    ],
    ids=["at the top", "nested", "one name of torch", "one list"],
)
def test_two_arrays_with_one_name_are_an_error(tmp_path, content, key):
    (tmp_path / "flax_model.msgpack").write_bytes(content)
    with pytest.raises(ValueError, match=f"the key '{key}' occurs twice: keep one"):
        pretrained.open_weights(tmp_path)
