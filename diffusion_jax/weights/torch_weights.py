"""torch state dicts <-> params, through a table in which every key is used exactly once.

A table is a list of entries, one for each array. A key that is missing, left over or of another
shape is an error, so that a conversion that succeeds has lost nothing.
"""

import json
import os
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from diffusion_jax.machine import files, untrusted
from diffusion_jax.machine.stored import Stored

StateDict = Mapping[str, np.ndarray]
_METADATA = "__metadata__"  # As safetensors calls it; in an .npz an array of one string.


class Layout(NamedTuple):
    """The order of a weight's axes: `to_jax` turns torch's into ours, `to_torch` back."""

    to_jax: Callable[[np.ndarray], np.ndarray]
    to_torch: Callable[[np.ndarray], np.ndarray]


VECTOR = Layout(lambda w: w, lambda w: w)
"""Biases, norms, embeddings: the same on both sides."""
LINEAR = Layout(lambda w: w.T, lambda w: w.T)
"""[out, in] <-> [in, out]"""
CONV1D_1 = Layout(lambda w: w[:, :, 0].T, lambda w: w.T[:, :, None])
"""[out, in, 1] <-> [in, out]"""
CONV2D_1 = Layout(lambda w: w[:, :, 0, 0].T, lambda w: w.T[:, :, None, None])
"""[out, in, 1, 1] <-> [in, out]"""
CONV = Layout(lambda w: w.transpose(2, 3, 1, 0), lambda w: w.transpose(3, 2, 0, 1))
"""[out, in, height, width] <-> [height, width, in, out]"""
CONV_TRANSPOSE = Layout(lambda w: w.transpose(2, 3, 0, 1), lambda w: w.transpose(2, 3, 0, 1))
"""[in, out, height, width] <-> [height, width, in, out]"""


class Entry(NamedTuple):
    """One array: its torch name, its path in params ("mid_attn/q/kernel"), and how it is turned."""

    torch: str
    path: str
    layout: Layout


Rules = Sequence[tuple[str, str]]
"""Regular expressions of whole paths, and torch's names for them; the first that matches holds."""


def rename(path: str, rules: Rules) -> str:
    """Torch's name of a layer or array; a path that no rule matches is a name already."""
    matches = ((re.fullmatch(pattern, path), name) for pattern, name in rules)
    return next((match.expand(name) for match, name in matches if match), path)


def table(
    params: Any,
    name_of: Callable[[str], str],
    layouts: Sequence[tuple[str, Layout]] = (),
) -> list[Entry]:
    """An entry for each leaf of `params`, which may be abstract.

    `name_of` gives torch's name of a layer by its path ("mid_attn/q"), without .weight and .bias,
    and of arrays of any other name ("token_embedding"). `layouts` are regular expressions of the
    paths of layers whose kernels are held in another way than linear layers and convolutions.
    """
    return [_entry(_path(path), leaf, name_of, layouts) for path, leaf in
            jax.tree.leaves_with_path(params)]  # fmt: skip


def to_params(state: StateDict, table: Sequence[Entry], abstract_params: Any) -> Any:
    """Params as float32 arrays in the structure and shapes of `abstract_params`.

    ValueError that names the strays: keys the table lacks, keys the state dict lacks, wrong shapes.
    """
    arrange = lambda array: np.asarray(array, np.float32)
    return _arranged(state, table, abstract_params, arrange)


def to_stored(
    state: StateDict, table: Sequence[Entry], abstract_params: Any, dtype: DTypeLike
) -> Any:
    """Params whose leaves are `Stored`: arrays that stay in the file that they are mapped from."""
    return _arranged(state, table, abstract_params, lambda array: Stored(array, dtype))


def to_state_dict(params: Any, table: Sequence[Entry]) -> dict[str, Float[np.ndarray, "..."]]:
    """The inverse of `to_params`, in the table's order."""
    arrays = {_path(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(params)}
    _check_table(table, arrays)
    return {e.torch: np.ascontiguousarray(e.layout.to_torch(arrays[e.path])) for e in table}


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of an .npz or .safetensors file. Nothing is ever unpickled.

    FileNotFoundError, or ValueError for another or a damaged format.
    """
    suffix = pathlib.Path(path).suffix
    if suffix not in (".npz", ".safetensors"):
        raise ValueError(f"cannot read {path}: it must be an .npz or .safetensors file")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no file {path}")
    try:
        if suffix == ".npz":
            # Opened here, since numpy does not close a file that it finds damaged.
            with open(path, "rb") as file:
                arrays = untrusted.read_archive(file)
                return {name: arrays[name] for name in arrays if name != _METADATA}
        import safetensors.numpy  # Only where such a file is read.

        return safetensors.numpy.load_file(path)
    except Exception as error:  # Damaged files fail in many ways of their own.
        raise ValueError(f"cannot read {path}: {type(error).__name__}: {error}") from error


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The words beside the arrays of a file that `write` or another program wrote; {} for others.

    ValueError for a damaged file.
    """
    suffix = pathlib.Path(path).suffix
    try:
        if suffix == ".npz":
            with open(path, "rb") as file:
                untrusted.check_archive(file)
                arrays = np.load(file, allow_pickle=False)
                return json.loads(str(arrays[_METADATA])) if _METADATA in arrays else {}
        if suffix == ".safetensors":
            import safetensors  # Only where such a file is read.

            with safetensors.safe_open(path, "np") as opened:
                return opened.metadata() or {}
    except Exception as error:  # Damaged files fail in many ways of their own.
        raise ValueError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    return {}


def write(
    path: str | os.PathLike[str], state: StateDict, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes arrays as .safetensors or .npz, whole or not at all; ValueError for another name.

    `metadata` are words that go beside them.
    """
    path = files.path(path)
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"cannot write {path}: its name must end in .safetensors or .npz")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        import safetensors.numpy  # Only where such a file is written.

        # diffusers refuses files that do not say whose tensors they are.
        beside = {"format": "pt", **(metadata or {})}
        # It copies memory as it lies, in whatever order.
        arrays = {name: np.asarray(array, order="C") for name, array in state.items()}
        files.write_whole(path, safetensors.numpy.save(arrays, beside))
        return
    beside = {_METADATA: np.array(json.dumps(metadata))} if metadata else {}
    with files.whole(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **state, **beside)  # pyright: ignore[reportArgumentType]


def some(names: Iterable[str], most: int = 5) -> str:
    """A few of the names, and how many more there are: for messages."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else "none"


def _entry(
    path: str, leaf: Any, name_of: Callable[[str], str], layouts: Sequence[tuple[str, Layout]]
) -> Entry:
    layer, _, part = path.removeprefix("params/").rpartition("/")
    if part in ("scale", "bias"):
        return Entry(f"{name_of(layer)}.{'weight' if part == 'scale' else part}", path, VECTOR)
    if part != "kernel":
        whole = path.removeprefix("params/")
        return Entry(name_of(whole), path, _layout(whole, VECTOR, layouts))
    layout = _layout(layer, LINEAR if len(leaf.shape) == 2 else CONV, layouts)
    return Entry(f"{name_of(layer)}.weight", path, layout)


def _layout(path: str, default: Layout, layouts: Sequence[tuple[str, Layout]]) -> Layout:
    matching = (layout for pattern, layout in layouts if re.fullmatch(pattern, path))
    return next(matching, default)


def _arranged(
    state: StateDict,
    table: Sequence[Entry],
    abstract_params: Any,
    convert: Callable[[np.ndarray], Any],
) -> Any:
    """Checks everything, then turns and converts each array into its place."""
    shapes = {_path(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(abstract_params)}
    _check_table(table, shapes)
    _check_keys(state, table)
    _check_shapes(state, table, shapes)
    arrays = {e.path: convert(e.layout.to_jax(state[e.torch])) for e in table}
    return jax.tree.map_with_path(lambda path, _: arrays[_path(path)], abstract_params)


def _check_table(table: Sequence[Entry], paths: Iterable[str]) -> None:
    """The table names every parameter once, and no key twice: otherwise it is itself wrong."""
    paths = set(paths)
    twice = [n for e in (Counter(e.torch for e in table), Counter(e.path for e in table))
             for n, count in e.items() if count > 1]  # fmt: skip
    named = {e.path for e in table}
    if twice or named != paths:
        raise ValueError(
            f"the table of names does not fit the model: twice {some(twice)}; parameters without "
            f"an entry {some(paths - named)}; entries without a parameter {some(named - paths)}"
        )


def _check_keys(state: StateDict, table: Sequence[Entry]) -> None:
    known = {e.torch for e in table}
    missing, stray = known - set(state), set(state) - known
    if missing or stray:
        raise ValueError(
            f"the state dict does not fit the model: {len(missing)} keys are missing: "
            f"{some(missing)}; {len(stray)} keys are left over: {some(stray)}"
        )


def _check_shapes(
    state: StateDict, table: Sequence[Entry], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Compares in torch's axes, before a layout could drop any."""
    expected = {
        e.torch: e.layout.to_torch(np.broadcast_to(np.float32(0), shapes[e.path])).shape
        for e in table
    }
    wrong = [
        f"{name} {state[name].shape} where the model has {shape}"
        for name, shape in expected.items()
        if state[name].shape != shape
    ]
    if wrong:
        raise ValueError(
            f"{len(wrong)} arrays have other shapes than the model: {some(wrong)}. "
            "Is this the config that the weights were trained with?"
        )


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
