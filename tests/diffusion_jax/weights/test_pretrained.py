"""Files of weights are read exactly in every dtype, in parts, and never twice in memory."""

import json
import tracemalloc
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from diffusion_jax.devices import sharding
from diffusion_jax.devices.lazy_arrays import Stored
from diffusion_jax.weights import pretrained
from tests.diffusion_jax.text import tiny_weights
from tests.diffusion_jax.weights import torch_writer


def test_arrays_written_by_safetensors_are_read_exactly(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "float32": rng.normal(size=(3, 5)).astype(np.float32),
        "float16": rng.normal(size=(7,)).astype(np.float16),
        "int64": rng.integers(-9, 9, (2, 1, 2)),
        "scalar": np.array(2.5, np.float32),
        "uint8": np.arange(3, dtype=np.uint8),  # The next array is not aligned.
        "float64": rng.normal(size=(2, 2)),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    mapped = pretrained.open_weights(tmp_path)
    assert mapped.keys() == arrays.keys()
    for name, array in arrays.items():
        assert mapped[name].dtype == array.dtype
        np.testing.assert_array_equal(mapped[name], array)
        np.testing.assert_array_equal(Stored(mapped[name], array.dtype)[...], array)


def test_bfloat16_is_read_exactly(tmp_path):
    array = jnp.asarray([[1.0, -2.5, 3e38], [1e-3, 0.0, 7.0]], jnp.bfloat16)
    tiny_weights.write_bfloat16(tmp_path / "a.safetensors", {"w": array})
    mapped = pretrained.open_weights(tmp_path)["w"]
    np.testing.assert_array_equal(Stored(mapped, jnp.float32)[...], array.astype(jnp.float32))


class Recorded(np.ndarray):
    """An array in place of a file. `read` holds the size of each part that was read."""

    read: ClassVar[list[int]] = []

    def __getitem__(self, index):
        part = np.asarray(self)[index]
        self.read.append(part.size)
        return part


def test_each_device_reads_only_its_own_part():
    array = np.arange(512 * 256, dtype=np.float32).reshape(512, 256)
    file = array.T.view(Recorded)
    mesh = sharding.make_mesh(1, 8, 1)
    tree = {"layer": {"kernel": Stored(file, jnp.bfloat16)}}
    placed = sharding.place_all(tree, mesh, [("kernel$", sharding.FSDP)])["layer"]["kernel"]
    assert file.read == [array.size // 8] * 8
    assert placed.sharding.spec == sharding.P(None, "fsdp")
    assert placed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(placed, array.T.astype(jnp.bfloat16))


def test_loading_a_model_never_holds_it_in_memory_twice(tmp_path):
    shape, count = (1024, 512), 8  # 2 MB each.
    one = {f"w{i}": np.full(shape, i, np.float32) for i in range(count)}
    tiny_weights.write(tmp_path / "model", one, {})
    del one
    mesh = sharding.make_mesh(1, 8, 1)
    tracemalloc.start()
    mapped = pretrained.open_weights(tmp_path / "model")
    tree = {name: Stored(array, jnp.float32) for name, array in mapped.items()}
    opened = tracemalloc.get_traced_memory()[1]
    placed = sharding.place_all(tree, mesh, [("", sharding.FSDP)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert float(placed["w3"][5, 7]) == 3
    assert opened < 2**20  # Opening reads nothing.
    assert peak < (count + 1) * 2 * 2**20 + 2**20


def sharded(folder):
    """Write two shards and their index."""
    folder.mkdir()
    where = {}
    for i, name in enumerate(("a", "b")):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        safetensors.numpy.save_file({name: np.full(3, i, np.float32)}, folder / file)
        where[name] = file
    (folder / pretrained.INDEX).write_text(json.dumps({"weight_map": where}))
    return folder


def test_shards_are_opened_as_one_model(tmp_path):
    mapped = pretrained.open_weights(sharded(tmp_path / "model"))
    assert {name: array.tolist() for name, array in mapped.items()} == {"a": [0] * 3, "b": [1] * 3}


FIRST, INDEX = "model-00001-of-00002.safetensors", pretrained.INDEX


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / FIRST).unlink(), rf"lacks {FIRST} \(.* lists 2 shards\)"),
        (
            lambda f: (f / INDEX).write_text(f'{{"weight_map": {{"c": "{FIRST}"}}}}'),
            "lists the array c, but none of its s",
        ),
        (lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes()[:-4]), r"ends after \d+ of \d+ bytes: download it"),
        (lambda f: (f / FIRST).write_bytes(b"hello, world"), "holds no weights, but the text"),
        (lambda f: (f / INDEX).unlink(), "holds 2 safetensors files, but none is called model.safetensors"),
        (lambda f: (f / INDEX).write_text("{"), "cannot read .* as JSON"),
        (
            lambda f: [path.unlink() for path in f.iterdir()],
            "holds no weights: it needs model.safetensors or pytorch_m",
        ),
    ],
    ids=["lost shard", "lost array", "cut", "no safetensors", "no index", "no json", "nothing"],
)
def test_missing_or_damaged_shards_are_errors_that_name_them(tmp_path, damage, message):
    folder = sharded(tmp_path / "model")
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){message}"):
        pretrained.open_weights(folder)


ARRAYS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.bias": np.array([0.5, -2], np.float16),
    "b": jnp.asarray([1.5, -3], jnp.bfloat16).__array__(),
}


def saved(path, arrays):
    """Write a .bin or .safetensors file."""
    if path.suffix == ".bin":
        torch_writer.save(path, arrays)
    else:
        path.write_bytes(safetensors.numpy.save(arrays))


def saved_whole(folder, name, shards=1):
    """Save a model like save_pretrained, as one file or as shards with an index."""
    folder.mkdir(exist_ok=True)
    if shards == 1:
        return saved(folder / name, ARRAYS)
    where, (stem, kind) = {}, name.rsplit(".", 1)
    for i, (key, array) in enumerate(ARRAYS.items()):
        where[key] = f"{stem}-{i + 1:05}-of-{shards:05}.{kind}"
        saved(folder / where[key], {key: array})
    stem, _, variant = stem.partition(".")
    index = f"{stem}.{kind}.index{'.' * bool(variant)}{variant}.json"
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("variant", ["", ".fp16"])
@pytest.mark.parametrize(
    "name",
    ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin", "model.safetensors", "pytorch_model.bin"],
)
def test_every_layout_of_save_pretrained_can_be_opened(tmp_path, name, variant, shards):
    saved_whole(tmp_path, name.replace(".", f"{variant}.", 1), shards)
    mapped = pretrained.open_weights(tmp_path)
    assert mapped.keys() == ARRAYS.keys()
    for key, array in ARRAYS.items():
        assert mapped[key].dtype == array.dtype and not mapped[key].flags.owndata
        np.testing.assert_array_equal(mapped[key], array)


def test_plain_files_are_preferred_to_variants_and_safetensors_files_to_pickles(tmp_path):
    saved_whole(tmp_path, "diffusion_pytorch_model.fp16.bin")
    saved_whole(tmp_path, "diffusion_pytorch_model.non_ema.safetensors", 3)
    with pytest.raises(ValueError, match="holds only the variants fp16, non_ema: remove the files"):
        pretrained.open_weights(tmp_path)
    one = {"of": np.ones(1, np.float32)}
    for name in ("diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"):
        saved(tmp_path / name, {**one, name: one["of"]})
        assert pretrained.open_weights(tmp_path).keys() == {"of", name}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_model.safetensors", b"", "holds an adapter, adapter_model.safetensors, without"),
        ("pytorch_lora_weights.bin", b"", "holds an adapter, pytorch_lora_weights.bin"),
        ("diffusion_pytorch_model.flashpack", b"", "the format of diffusion_pytorch_model.flashpack is not supported"),
        ("tf_model.h5", b"", "the format of tf_model.h5 is not supported"),
        ("config.json", b'{"quantization_config": {"quant_method": "torchao"}}', "by torchao"),
    ],
)
def test_unsupported_files_of_weights_are_errors(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        pretrained.open_weights(tmp_path)


def test_float8_is_read_exactly(tmp_path):
    header = {"w": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}
    text, values = json.dumps(header).encode(), jnp.asarray([0.5, -448], jnp.float8_e4m3fn)
    content = len(text).to_bytes(8, "little") + text + np.asarray(values).tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    assert pretrained.open_weights(tmp_path)["w"].astype(np.float32).tolist() == [0.5, -448]


def test_a_missing_folder_of_weights_is_an_error():
    with pytest.raises(FileNotFoundError, match="no folder /nowhere/t5: choose a folder with"):
        pretrained.locate("/nowhere/t5")
    with pytest.raises(ValueError, match=r"text\.weights is empty: set it to a folder"):
        pretrained.locate("")


def test_a_hugging_face_name_is_downloaded_and_a_failure_is_an_error(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def download(name, allow_patterns):
        asked.append(name)
        if name == "owner/nothing":
            raise OSError("no network")
        kind = "bin" if any(pattern.endswith(".bin") for pattern in allow_patterns) else "st"
        asked.append(kind)
        assert ("model.safetensors" in allow_patterns) is (kind == "st")
        if name == "google-t5/t5-small" or kind == "bin":
            (tmp_path / name.rpartition("/")[2]).mkdir()
            (tmp_path / name.rpartition("/")[2] / "model.safetensors").touch()
        return str(tmp_path / name.rpartition("/")[2])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert pretrained.locate("google-t5/t5-small") == tmp_path / "t5-small"
    assert pretrained.locate("t5-11b") == tmp_path / "t5-11b"  # A repository with pickles only.
    with pytest.raises(FileNotFoundError, match=r"'owner/nothing' is not a local folder.*no network"):
        pretrained.locate("owner/nothing")
    assert asked == ["google-t5/t5-small", "st", "t5-11b", "st", "t5-11b", "bin", "owner/nothing"]


def test_a_stored_array_is_a_pytree_leaf_with_shape_and_dtype():
    stored = Stored(np.zeros((2, 3)), jnp.bfloat16)
    assert jax.tree.leaves({"a": stored}) == [stored]
    assert (stored.shape, stored.size, stored.dtype) == ((2, 3), 6, jnp.bfloat16)
