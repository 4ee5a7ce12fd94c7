"""Pack parameters into one small .safetensors file: 8-bit integers with one scale per channel.

In a checkpoint's folder, a packed file can replace the folder of parameters that Orbax writes.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from diffusion_jax.task import Params
from diffusion_jax.weights import torch_weights

FILE = "params.safetensors"
_SCALES = ":scales"  # An array's name with this suffix names its scales.
_LARGEST = 127


def write(path: pathlib.Path, params: Params) -> None:
    """Write a tree of float arrays to a packed file atomically.

    Arrays with two or more axes are rounded to 8 bits. Their last axis holds the channels. The
    rounding error is at most 1/254 of the largest absolute value in the channel. Arrays with one
    axis (biases and norms) are stored as float32.

    Raises:
        ValueError: An array is not finite.
    """
    state = {}
    for name, array in torch_weights.named(params).items():
        array = np.asarray(array, np.float32)
        if not np.isfinite(array).all():
            raise ValueError(f"the weights {name} are not finite: choose an earlier checkpoint")
        state[name] = array
        if array.ndim > 1:
            scales = np.abs(array).max(axis=tuple(range(array.ndim - 1))) / _LARGEST
            scales = np.where(scales == 0, 1, scales).astype(np.float32)
            state[name], state[name + _SCALES] = np.rint(array / scales).astype(np.int8), scales
    torch_weights.write(path, state)


def read(path: pathlib.Path, abstract: Params) -> Params:
    """Read parameters from a packed file, and place them on devices.

    `abstract` is a tree of jax.ShapeDtypeStructs that sets the types and shardings.
    """
    state = torch_weights.read(path)

    def unpacked(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        array = state[name]
        if name + _SCALES in state:
            array = array * state[name + _SCALES]
        return jax.device_put(jnp.asarray(array, leaf.dtype), leaf.sharding)

    arrays = {name: unpacked(name, leaf) for name, leaf in torch_weights.named(abstract).items()}
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays.values())


def shapes(path: pathlib.Path) -> dict[str, Any]:
    """Return the shapes of packed parameters as a tree of float32 jax.ShapeDtypeStructs."""
    arrays = {name: array for name, array in torch_weights.read(path).items() if not name.endswith(_SCALES)}
    shape_of = {name: jax.ShapeDtypeStruct(array.shape, jnp.float32) for name, array in arrays.items()}
    return traverse_util.unflatten_dict(shape_of, sep="/")
