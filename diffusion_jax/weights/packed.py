"""Parameters in one small .safetensors file: whole numbers of 8 bits with a scale a channel.

An item of a checkpoint's folder (see restore) may be such a file in place of Orbax's folder.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int8

from diffusion_jax.task import Params
from diffusion_jax.weights import torch_weights

FILE = "params.safetensors"
_SCALES = ":scales"  # Behind the name of the array that they are of.
_LARGEST = 127


def write(path: pathlib.Path, params: Params) -> None:
    """Writes a tree of float arrays, whole or not at all; ValueError for numbers not finite.

    What has two axes or more is rounded to 8 bits, within 1/254 of the largest of its channel, the
    last axis; biases and norms stay as they are.
    """
    state = {}
    for name, array in _named(params).items():
        array = np.asarray(array, np.float32)
        if not np.isfinite(array).all():
            raise ValueError(f"the weights {name} are not finite")
        state[name] = array
        if array.ndim > 1:
            state[name], state[name + _SCALES] = _rounded(array)
    torch_weights.write(path, state)


def read(path: pathlib.Path, abstract: Params) -> Params:
    """The parameters of a file, in the dtypes and on the devices of jax.ShapeDtypeStructs."""
    state = torch_weights.read(path)

    def whole(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        array = state[name]
        if name + _SCALES in state:
            array = array * state[name + _SCALES]
        return jax.device_put(jnp.asarray(array, leaf.dtype), leaf.sharding)

    placed = {name: whole(name, leaf) for name, leaf in _named(abstract).items()}
    return jax.tree.unflatten(jax.tree.structure(abstract), placed.values())


def shapes(path: pathlib.Path) -> dict[str, Any]:
    """The tree of what a file holds, in float32."""
    tree: dict[str, Any] = {}
    for name, array in torch_weights.read(path).items():
        *groups, last = name.split("/")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        if not name.endswith(_SCALES):
            place[last] = jax.ShapeDtypeStruct(array.shape, jnp.float32)
    return tree


def _rounded(
    array: Float[np.ndarray, "... C"],
) -> tuple[Int8[np.ndarray, "... C"], Float[np.ndarray, "C"]]:
    scales = np.abs(array).max(axis=tuple(range(array.ndim - 1))) / _LARGEST
    scales = np.where(scales == 0, 1, scales).astype(np.float32)
    return np.rint(array / scales).astype(np.int8), scales


def _named(tree: Any) -> dict[str, Any]:
    keys = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {keys(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
