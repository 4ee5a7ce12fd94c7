"""Tables from torch's names and layouts to ours: exact conversion both ways, and errors."""

import re
import zipfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from diffusion_jax.weights import torch_weights
from diffusion_jax.weights.torch_weights import CONV, CONV1D_1, CONV2D_1, CONV_TRANSPOSE, LINEAR, VECTOR, Entry
from tests.diffusion_jax.weights import torch_writer

TABLE = [
    Entry("block.0.weight", "params/dense/kernel", LINEAR),
    Entry("block.0.bias", "params/dense/bias", VECTOR),
    Entry("block.1.weight", "params/pointwise/kernel", CONV1D_1),
    Entry("block.1.bias", "params/pointwise/bias", VECTOR),
    Entry("block.2.weight", "params/norm/scale", VECTOR),
    Entry("block.2.bias", "params/norm/bias", VECTOR),
]
SHAPES = {"dense": {"kernel": (2, 3), "bias": (3,)}, "pointwise": {"kernel": (2, 4), "bias": (4,)}}
SHAPES |= {"norm": {"scale": (5,), "bias": (5,)}}
ABSTRACT_ZEROS = {"params": {name: {k: np.zeros(s, np.float32) for k, s in of.items()} for name, of in SHAPES.items()}}
ABSTRACT = jax.eval_shape(lambda: ABSTRACT_ZEROS)


def state_dict(dtype=np.float32):
    shapes, rng = [(3, 2), (3,), (4, 2, 1), (4,), (5,), (5,)], np.random.default_rng(0)
    return {of.torch: rng.normal(size=shape).astype(dtype) for of, shape in zip(TABLE, shapes, strict=True)}


@pytest.mark.parametrize(
    ("layout", "torch_axes", "jax_axes"),
    [
        (VECTOR, "c", "c"),
        (LINEAR, "oi", "io"),
        (CONV1D_1, "oi1", "io"),
        (CONV2D_1, "oi11", "io"),
        (CONV, "oihw", "hwio"),
        (CONV_TRANSPOSE, "iohw", "hwio"),
    ],
)
def test_layouts_convert_axes_in_both_directions(layout, torch_axes, jax_axes):
    sizes = dict(c=5, i=2, o=3, h=4, w=6)
    weight = np.random.default_rng(0).normal(size=[sizes.get(a, 1) for a in torch_axes])
    letters = torch_axes.replace("1", "")
    expected = np.einsum(f"{letters}->{jax_axes}", weight.reshape([sizes[a] for a in letters]))
    np.testing.assert_array_equal(layout.to_jax(weight), expected)
    np.testing.assert_array_equal(layout.to_torch(expected), weight)


def test_a_table_is_built_from_rules_for_names_and_layouts():
    """The first rule that matches a component of the path renames it."""
    params = {"params": ABSTRACT["params"] | {"table": jax.ShapeDtypeStruct((3, 2), jnp.float32)}}
    rules = [("dense", "block.0"), ("pointwise", "block.1"), ("(norm|dense)", r"block.2"), ("table", "embedding")]
    name_of = lambda path: torch_weights.rename(path, rules)
    table = torch_weights.table(params, name_of, [("pointwise", CONV1D_1)])
    assert {*table} == {*TABLE, Entry("embedding", "params/table", VECTOR)}
    assert torch_weights.rename("normal", rules) == "normal"


def test_converting_weights_to_params_and_back_is_exact():
    state = state_dict()
    params = torch_weights.to_params(state, TABLE, ABSTRACT)
    assert jax.tree.structure(params) == jax.tree.structure(ABSTRACT)
    np.testing.assert_array_equal(params["params"]["dense"]["kernel"], state["block.0.weight"].T)
    np.testing.assert_array_equal(params["params"]["norm"]["scale"], state["block.2.weight"])
    back = torch_weights.to_state_dict(params, TABLE)
    assert list(back) == [entry.torch for entry in TABLE]
    for name, array in back.items():
        np.testing.assert_array_equal(array, state[name], strict=True)
        assert array.flags.c_contiguous


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_params_are_float32_for_every_saved_dtype(dtype):
    state = state_dict(dtype)
    params = torch_weights.to_params(state, TABLE, ABSTRACT)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(params["params"]["norm"]["bias"], state["block.2.bias"].astype(np.float32))


def nan(dtype):
    return {"block.1.bias": np.full(4, np.nan, dtype), "block.2.bias": np.full(5, np.nan, dtype)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nan(np.float32), "2 of 6 arrays hold NaN or infinite values, such as block.1.bias: use"),
        (nan(ml_dtypes.bfloat16), "2 of 6 arrays hold NaN or infinite values, such as block.1.bias: use"),
        (nan(ml_dtypes.float8_e4m3fn), "2 of 6 arrays hold NaN or infinite values, such as block.1.bias: use"),
        ({"block.1.bias": np.ones(4, np.int8)}, "these arrays hold integers: block.1.bias. Quantised"),
        ({"block.1.bias": None, "extra": np.ones(4)}, "missing keys (1): block.1.bias; keys left over (1): extra"),
        (
            dict.fromkeys(state_dict()) | {f"layer.{i}": np.zeros(1) for i in range(7)},
            "missing keys (6): block.0.bias, block.0.weight, block.1.bias, block.1.weight, block.2.bias and 1 more; "
            "keys left over (7): layer.0, layer.1, layer.2, layer.3, layer.4 and 2 more",
        ),
        # A transposed matrix, a kernel that would lose two taps, and an axis too few.
        ({"block.0.weight": np.zeros((2, 3))}, "block.0.weight (2, 3) where the model has (3, 2)"),
        ({"block.1.weight": np.zeros((4, 2, 3))}, "block.1.weight (4, 2, 3) where the model has (4, 2, 1)"),
        ({"block.1.weight": np.zeros((4, 2))}, "block.1.weight (4, 2) where the model has (4, 2, 1)"),
    ],
)
def test_arrays_that_do_not_fit_the_model_are_an_error_that_names_them(change, message):
    state = {name: array for name, array in (state_dict() | change).items() if array is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        torch_weights.to_params(state, TABLE, ABSTRACT)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TABLE[:-1], "parameters without an entry params/norm/bias; entries without"),
        ([*TABLE, Entry("a", "params/b", VECTOR)], "entries without a parameter params/b"),
        ([*TABLE, TABLE[0]], "listed twice block.0.weight, params/dense/kernel; parameters"),
    ],
)
def test_a_table_that_does_not_fit_the_model_is_an_error(table, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        torch_weights.to_params(state_dict(), table, ABSTRACT)
    with pytest.raises(ValueError, match=re.escape(message)):
        torch_weights.to_state_dict(ABSTRACT_ZEROS, table)


def test_missing_damaged_and_pickled_files_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*missing\.npz"):
        torch_weights.read(tmp_path / "missing.npz")
    with pytest.raises(ValueError, match=r"it must be an \.npz or \.safetensors file"):
        torch_writer.save(tmp_path / "w.npz", {"a": np.zeros(1, np.float32)})
        torch_weights.read(tmp_path / "w.npz")
    for file in ("cut.npz", "cut.safetensors"):
        (tmp_path / file).write_bytes(b"PK\x03\x04 no more")
        with pytest.raises(ValueError, match=rf"cannot read .*{file}: "):
            torch_weights.read(tmp_path / file)
    np.savez(tmp_path / "pickle.npz", w=np.array([{}], object))
    with pytest.raises(ValueError, match=r"cannot read .*pickle"):
        torch_weights.read(tmp_path / "pickle.npz")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_arrays_of_an_npz_file_with_one_name_are_an_error(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.zeros(2), b=np.ones(2))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("a.npy", archive.read("b.npy"))
    with pytest.raises(ValueError, match="the key 'a' occurs twice: keep one"):
        torch_weights.read(tmp_path / "a.npz")
