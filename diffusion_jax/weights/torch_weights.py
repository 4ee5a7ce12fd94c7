"""Convert torch state dicts to params and back, with a table that uses every key exactly once.

A table has one entry for each array. A missing key, a superfluous key or a wrong shape is an error,
so a successful conversion has lost nothing.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from diffusion_jax import files
from diffusion_jax.devices.lazy_arrays import Stored
from diffusion_jax.files import safetensors_files, untrusted
from diffusion_jax.files.safetensors_files import map_safetensors
from diffusion_jax.weights.file_kinds import NPZ, SAFETENSORS, kind_of

StateDict = Mapping[str, np.ndarray]
_METADATA = "__metadata__"  # As in safetensors. In an .npz it is an array with one string.


class Layout(NamedTuple):
    """A pair of functions that reorder the axes of a weight, from torch to jax and back."""

    to_jax: Callable[[np.ndarray], np.ndarray]
    to_torch: Callable[[np.ndarray], np.ndarray]


VECTOR = Layout(lambda w: w, lambda w: w)
"""For biases, norms and embeddings, whose axes have the same order in torch and jax."""
LINEAR = Layout(lambda w: w.T, lambda w: w.T)
"""For linear layers: torch [out, in] <-> jax [in, out]."""
CONV1D_1 = Layout(lambda w: w[:, :, 0].T, lambda w: w.T[:, :, None])
"""For 1D convolutions of size 1: torch [out, in, 1] <-> jax [in, out]."""
CONV2D_1 = Layout(lambda w: w[:, :, 0, 0].T, lambda w: w.T[:, :, None, None])
"""For 1x1 convolutions: torch [out, in, 1, 1] <-> jax [in, out]."""
CONV = Layout(lambda w: w.transpose(2, 3, 1, 0), lambda w: w.transpose(3, 2, 0, 1))
"""For 2D convolutions: torch [out, in, height, width] <-> jax [height, width, in, out]."""
CONV_TRANSPOSE = Layout(lambda w: w.transpose(2, 3, 0, 1), lambda w: w.transpose(2, 3, 0, 1))
"""For transposed convolutions: torch [in, out, height, width] <-> jax [height, width, in, out]."""


class Entry(NamedTuple):
    """An array's torch name, its path in params ("mid_attn/q/kernel"), and its layout."""

    torch: str
    path: str
    layout: Layout


NameRules = Sequence[tuple[str, str]]
"""Pairs (regular expression for paths, torch name). The first pair that matches applies.

The torch name may refer to groups of the expression."""


def rename(path: str, rules: NameRules) -> str:
    """Return the torch name of the layer or array at `path` in params.

    A path that matches no rule is returned unchanged.
    """
    matches = ((re.fullmatch(pattern, path), name) for pattern, name in rules)
    return next((match.expand(name) for match, name in matches if match), path)


def table(params: Any, name_of: Callable[[str], str], layouts: Sequence[tuple[str, Layout]] = ()) -> list[Entry]:
    """Return a conversion table with an entry for each array of params.

    Args:
        params: The params; leaves may be abstract, such as jax.ShapeDtypeStructs.
        name_of: Maps the path of a layer ("mid_attn/q") to its torch name without .weight or .bias,
            and the path of any other array ("token_embedding") to its full torch name.
        layouts: Exceptions from the default layouts, as pairs (regular expression, layout). The
            expression is matched with the path that `name_of` gets. By default, kernels with two
            axes are LINEAR, other kernels are CONV, and all other arrays are VECTOR.
    """
    return [_entry(path, leaf, name_of, layouts) for path, leaf in named(params).items()]


def to_params(state: StateDict, table: Sequence[Entry], abstract_params: Any) -> Any:
    """Convert a state dict to float32 params with the structure of `abstract_params`.

    Raises:
        ValueError: The state dict has other keys than `table`, other shapes than
            `abstract_params`, or values that are not finite.
    """
    arrange = lambda array: np.asarray(array, np.float32)
    params = _arranged(state, table, abstract_params, arrange)
    check_finite(state)
    return params


def check_finite(state: StateDict) -> None:
    """Raise ValueError if arrays hold NaN or infinite values. The message names the first."""
    bad = [name for name, array in state.items() if not np.isfinite(array).all()]
    if bad:
        raise ValueError(
            f"{len(bad)} of {len(state)} arrays hold NaN or infinite values, such as {bad[0]}: use an undamaged file"
        )


def to_stored(state: StateDict, table: Sequence[Entry], abstract_params: Any, dtype: DTypeLike) -> Any:
    """Convert a state dict to params with leaves of type `Stored`: the arrays stay in their file.

    The structure is that of `abstract_params`. `dtype` is the type to which parts of an array are
    converted when they are read.

    Raises:
        ValueError: The state dict has other keys than `table`, or other shapes than
            `abstract_params`.
    """
    return _arranged(state, table, abstract_params, lambda array: Stored(array, dtype))


def to_state_dict(params: Any, table: Sequence[Entry]) -> dict[str, Float[np.ndarray, "..."]]:
    """Convert params to a torch state dict, in the table's order."""
    arrays = {path: np.asarray(leaf) for path, leaf in named(params).items()}
    _check_table(table, arrays)
    return {e.torch: np.ascontiguousarray(e.layout.to_torch(arrays[e.path])) for e in table}


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read the arrays of an .npz or .safetensors file, whatever its name, without unpickling.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged or has another format.
    """
    kind = kind_of(path)
    if kind not in (NPZ, SAFETENSORS):
        raise ValueError(f"cannot read {path}: it must be an .npz or .safetensors file")
    with untrusted.readable(path):
        if kind == SAFETENSORS:
            return map_safetensors(path)
        # Opened here, since numpy does not close damaged files.
        with open(path, "rb") as file:
            arrays = untrusted.read_archive(file)
            return {name: arrays[name] for name in arrays if name != _METADATA}


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read the metadata of a safetensors file, or of an .npz file written by `write`.

    Other files have no metadata; for them the result is {}.

    Raises:
        ValueError: The file is damaged.
    """
    kind = kind_of(path)
    with untrusted.readable(path):
        if kind == NPZ:
            with open(path, "rb") as file:
                arrays = untrusted.read_archive(file, only=_METADATA)
                return json.loads(str(arrays[_METADATA])) if _METADATA in arrays else {}
        if kind == SAFETENSORS:
            return safetensors_files.read_metadata(path)
    return {}


def write(path: str | os.PathLike[str], state: StateDict, metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays to a .safetensors or .npz file atomically.

    Args:
        path: The file.
        state: The arrays by name.
        metadata: Strings to save with the arrays.

    Raises:
        ValueError: The file name has another suffix.
    """
    path = files.path(path)
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"cannot write {path}: its name must end in .safetensors or .npz")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        import safetensors.numpy  # Only needed for such files.

        # diffusers refuses files without a format.
        extra = {"format": "pt", **(metadata or {})}
        # safetensors copies memory without regard to strides.
        arrays = {name: np.asarray(array, order="C") for name, array in state.items()}
        files.write_whole(path, safetensors.numpy.save(arrays, extra))
        return
    extra = {_METADATA: np.array(json.dumps(metadata))} if metadata else {}
    with files.whole(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **state, **extra)  # pyright: ignore[reportArgumentType]


def some(names: Iterable[str], most: int = 5) -> str:
    """Return a text that lists up to `most` names in alphabetical order, such as "a, b and 3 more".

    If there are no names, return "none".
    """
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else "none"


def _entry(path: str, leaf: Any, name_of: Callable[[str], str], layouts: Sequence[tuple[str, Layout]]) -> Entry:
    layer, _, part = path.removeprefix("params/").rpartition("/")
    if part in ("scale", "bias"):
        return Entry(f"{name_of(layer)}.{'weight' if part == 'scale' else part}", path, VECTOR)
    if part != "kernel":
        full_path = path.removeprefix("params/")
        return Entry(name_of(full_path), path, _layout(full_path, VECTOR, layouts))
    layout = _layout(layer, LINEAR if len(leaf.shape) == 2 else CONV, layouts)
    return Entry(f"{name_of(layer)}.weight", path, layout)


def _layout(path: str, default: Layout, layouts: Sequence[tuple[str, Layout]]) -> Layout:
    matching = (layout for pattern, layout in layouts if re.fullmatch(pattern, path))
    return next(matching, default)


def _arranged(
    state: StateDict, table: Sequence[Entry], abstract_params: Any, convert: Callable[[np.ndarray], Any]
) -> Any:
    """Return params with the arrays of `state`, each transposed and then passed to `convert`.

    Raises ValueError if `table` does not fit the params, or if `state` has other keys or shapes, or
    integers.
    """
    shapes = {path: leaf.shape for path, leaf in named(abstract_params).items()}
    _check_table(table, shapes)
    keys = {e.torch for e in table}
    missing, extra = keys - set(state), set(state) - keys
    if missing or extra:
        raise ValueError(
            f"the state dict does not fit the model: missing keys ({len(missing)}): "
            f"{some(missing)}; keys left over ({len(extra)}): {some(extra)}. "
            "Use weights of this model, or the config that these weights were trained with"
        )
    _check_shapes(state, table, shapes)
    if quantised := [name for name in keys if np.issubdtype(state[name].dtype, np.integer)]:
        raise ValueError(
            f"these arrays hold integers: {some(quantised)}. Quantised weights are not "
            "supported: use those in float32, float16, bfloat16 or float8"
        )
    arrays = {e.path: convert(e.layout.to_jax(state[e.torch])) for e in table}
    return jax.tree.unflatten(jax.tree.structure(abstract_params), [arrays[p] for p in shapes])


def _check_table(table: Sequence[Entry], paths: Iterable[str]) -> None:
    """Raise ValueError unless `table` has one entry for each of `paths`, and no other entries.

    Two entries with the same torch name are an error, too.
    """
    paths = set(paths)
    twice = [
        n
        for e in (Counter(e.torch for e in table), Counter(e.path for e in table))
        for n, count in e.items()
        if count > 1
    ]
    entries = {e.path for e in table}
    if twice or entries != paths:
        raise ValueError(
            f"the table of names does not fit the model: listed twice {some(twice)}; parameters "
            f"without an entry {some(paths - entries)}; entries without a parameter "
            f"{some(entries - paths)}"
        )


def _check_shapes(state: StateDict, table: Sequence[Entry], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if an array of `state` differs in shape from the array of params.

    `shapes` holds the shapes of the params, keyed by path. The shapes are compared in torch's
    layout, because the conversion to our layout may drop axes.
    """
    expected = {e.torch: e.layout.to_torch(np.broadcast_to(np.float32(0), shapes[e.path])).shape for e in table}
    wrong = [
        f"{name} {state[name].shape} where the model has {shape}"
        for name, shape in expected.items()
        if state[name].shape != shape
    ]
    if wrong:
        raise ValueError(
            f"these arrays have shapes that differ from the model's: {some(wrong)}. "
            "Use the config that the weights were trained with"
        )


def named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree, keyed by their paths, such as "params/mid/kernel"."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
