"""Read and write the weights of diffusers' and transformers' former Flax models (*.msgpack).

Both libraries saved a Flax model as nested dictionaries of arrays in one msgpack file. Here, its
arrays have the names and layouts of the torch model, so all readers of torch weights read it.
"""

import mmap
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
import numpy as np
from flax import serialization, traverse_util

from diffusion_jax import files
from diffusion_jax.files import untrusted

_LIST = re.compile(
    r"\b(down_blocks|up_blocks|resnets|attentions|transformer_blocks|downsamplers|upsamplers|"
    r"to_out|net)[._](?=\d)"
)
"""The lists of modules that diffusers numbers as resnets_0 in Flax and as resnets.0 in torch."""
_OBJECTS = 200_000  # The most objects of a file. A model has one for each array, and a few more.
_SIZES = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), (0, 0)),
    **{0xC4 + i: (2**i, 0) for i in range(3)},  # Bytes, with a length of 1, 2 or 4 bytes.
    0xCA: (0, 4),
    0xCB: (0, 8),
    **{first + i: (0, 2**i) for first in (0xCC, 0xD0) for i in range(4)},  # Whole numbers.
    **{0xD9 + i: (2**i, 0) for i in range(3)},  # Texts.
    **dict.fromkeys((0xDC, 0xDE), (0, 2)),
    **dict.fromkeys((0xDD, 0xDF), (0, 4)),
}
"""Maps the first byte of an object to the bytes of its length, and its other bytes.

The content of arrays and maps follows as objects, and so does that of an extension (an array of
NumPy), whose own bytes are its length and its type."""
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4, **dict.fromkeys(range(0xD4, 0xD9), 0)}
_EMBEDDINGS = ("token_embedding", "position_embedding", "shared", "relative_attention_bias")
_OF_VAE = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""The layers of the VAE's attention: names in Flax, and in torch."""


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read the arrays of a Flax model, with the names and layouts of the torch model.

    A kernel of a linear layer [in, out] becomes [out, in], and a kernel of a convolution
    [height, width, in, out] becomes [out, in, height, width].

    Raises:
        ValueError: The file is damaged, or holds anything but nested dictionaries of arrays.
    """
    _check_objects(pathlib.Path(path))
    try:
        content = pathlib.Path(path).read_bytes()
        # Flax itself would take the last of several equal keys.
        msgpack.unpackb(content, object_pairs_hook=untrusted.once, ext_hook=lambda *_: None)
        tree = serialization.msgpack_restore(content)
    except MemoryError:
        raise
    except Exception as error:  # msgpack and NumPy raise many types for damaged files.
        raise ValueError(
            f"cannot read {path}: {type(error).__name__}: {str(error)[:200]}: download it again"
        ) from error
    arrays = []
    for name, leaf in _leaves(tree):
        if not isinstance(leaf, np.ndarray):
            raise ValueError(
                f"cannot read {path}: it holds a {type(leaf).__name__} at {name or 'the top'} "
                "instead of an array, so it is not a Flax model of diffusers or transformers"
            )
        if name.endswith("/kernel"):
            leaf = leaf.transpose(3, 2, 0, 1) if leaf.ndim == 4 else leaf.T
        arrays.append((torch_name(name), leaf))
    with untrusted.naming(f"cannot read {path}"):
        return untrusted.once(arrays)


def write(path: pathlib.Path, state: Mapping[str, np.ndarray]) -> None:
    """Write a torch model's arrays as a file of diffusers' or transformers' Flax model.

    It is the inverse of `read` for Stable Diffusion's UNet, VAE and text encoder.
    """
    tree = {}
    for name, array in state.items():
        name = _rename_vae(name, {torch: flax for flax, torch in _OF_VAE.items()})
        *modules, leaf = _LIST.sub(r"\1_", name).split(".")
        if leaf == "weight":
            kernel = "embedding" if modules[-1] in _EMBEDDINGS else "kernel"
            leaf = "scale" if array.ndim == 1 else kernel
        if leaf == "kernel":
            array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
        tree[*modules, leaf] = np.ascontiguousarray(array)
    content = serialization.msgpack_serialize(traverse_util.unflatten_dict(tree))
    files.write_whole(path, content)


def torch_name(name: str) -> str:
    """Convert a name such as "resnets_0/conv1/kernel" to torch's "resnets.0.conv1.weight"."""
    name = _rename_vae(_LIST.sub(r"\1.", name.replace("/", ".")), _OF_VAE)
    return re.sub(r"\.(kernel|scale|embedding)$", ".weight", name)


def _rename_vae(name: str, names: Mapping[str, str]) -> str:
    layers = "|".join(map(re.escape, names))
    pattern = rf"(coder\.mid_block\.attentions\.0\.)({layers})\b"
    return re.sub(pattern, lambda match: match[1] + names[match[2]], name)


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield name, tree
        return
    for key, branch in tree.items():
        yield from _leaves(branch, f"{name}/{key}" if name else str(key))


def _check_objects(path: pathlib.Path) -> None:
    """Raise ValueError if a file of msgpack holds so many objects that they could fill memory."""
    size, at, count = path.stat().st_size, 0, 0
    if not size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        while at < size:
            kind, at, count = content[at], at + 1, count + 1
            if count > _OBJECTS:
                raise ValueError(
                    f"{path} holds more than {_OBJECTS:,} objects, so it is not a Flax model of "
                    "diffusers or transformers"
                )
            if kind in _EXTENSIONS:
                at += _EXTENSIONS[kind] + 1
            elif 0xA0 <= kind < 0xC0:
                at += kind & 31
            elif kind in _SIZES:
                length, others = _SIZES[kind]
                at += length + others + int.from_bytes(content[at : at + length])
