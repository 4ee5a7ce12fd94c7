"""Map the FID Inception's public weights to parameters, fold batch norms, and hash weights.

The public file pt_inception-2015-12-05-6726825d.pth is a pickle in an old format, which torch_files
reads without torch and without executing code.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from diffusion_jax.metrics import inception
from diffusion_jax.weights import torch_weights
from diffusion_jax.weights.torch_weights import CONV, VECTOR, Entry

_EPS = 1e-3  # Epsilon of the batch norms.
_NORM = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "variance"}
_STEM = {
    "Conv2d_1a_3x3": (3, 32, 3, 3),
    "Conv2d_2a_3x3": (32, 32, 3, 3),
    "Conv2d_2b_3x3": (32, 64, 3, 3),
    "Conv2d_3b_1x1": (64, 80, 1, 1),
    "Conv2d_4a_3x3": (80, 192, 3, 3),
}
Sizes = dict[str, tuple[int, int, int, int]]
"""Maps a convolution's name within its block to (channels in, channels out, height, width)."""


def to_params(state: torch_weights.StateDict) -> inception.InceptionParams:
    """Return the network's params (float32, numpy) from a state dict with the public names.

    Raises:
        ValueError: arrays are missing, unexpected or of another shape. This is the case, for
            example, for torchvision's Inception, which has another classifier and an auxiliary
            head.
    """
    counters = ".num_batches_tracked"
    state = {name: array for name, array in state.items() if not name.endswith(counters)}
    raw = torch_weights.to_params(state, _table(), _abstract())
    folded: dict[str, Any] = {
        block: {name: _fold(conv) for name, conv in convs.items()} for block, convs in raw.items() if block != "fc"
    }
    return folded | {"fc": raw["fc"]}


def digest(state: torch_weights.StateDict) -> str:
    """Return the SHA-256 of array names and float32 values, in hexadecimal.

    It does not depend on the format of the weight file.
    """
    result = hashlib.sha256()
    for name in sorted(state):
        if not name.endswith(".num_batches_tracked"):
            result.update(name.encode())
            result.update(np.ascontiguousarray(state[name], np.float32).tobytes())
    return result.hexdigest()


def blocks() -> dict[str, Sizes]:
    """Return the sizes of the network's 94 convolutions, keyed by block."""
    return {
        "stem": dict(_STEM),
        "Mixed_5b": _block_5(192, 32),
        "Mixed_5c": _block_5(256, 64),
        "Mixed_5d": _block_5(288, 64),
        "Mixed_6a": {"branch3x3": (288, 384, 3, 3), **_chain("branch3x3dbl", 288, (64, 1, 1), (96, 3, 3), (96, 3, 3))},
        "Mixed_6b": _block_6(128),
        "Mixed_6c": _block_6(160),
        "Mixed_6d": _block_6(160),
        "Mixed_6e": _block_6(192),
        "Mixed_7a": {
            **_chain("branch3x3", 768, (192, 1, 1), (320, 3, 3)),
            **_chain("branch7x7x3", 768, (192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)),
        },
        "Mixed_7b": _block_7(1280),
        "Mixed_7c": _block_7(2048),
    }


def random_state() -> dict[str, np.ndarray]:
    """Return random weights that keep the scale of activations, keyed by the public names.

    Use them to check that two programs compute the same features. Scores of a network with these
    weights have no meaning.
    """
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    state: dict[str, Any] = {"fc.weight": normal(1008, 2048) / 45, "fc.bias": normal(1008)}
    for block, convs in blocks().items():
        for name, (channels, out, height, width) in convs.items():
            name = name if block == "stem" else f"{block}.{name}"
            gain = (2 / (channels * height * width)) ** 0.5
            state[f"{name}.conv.weight"] = np.float32(gain) * normal(out, channels, height, width)
            state[f"{name}.bn.weight"] = rng.uniform(0.8, 1.2, out).astype(np.float32)
            state[f"{name}.bn.running_var"] = rng.uniform(0.8, 1.2, out).astype(np.float32)
            state[f"{name}.bn.bias"] = np.float32(0.1) * normal(out)
            state[f"{name}.bn.running_mean"] = np.float32(0.1) * normal(out)
            state[f"{name}.bn.num_batches_tracked"] = np.array(0)
    return state


def _chain(name: str, channels: int, *layers: tuple[int, int, int]) -> Sizes:
    sizes = {}
    for i, (out, height, width) in enumerate(layers):
        sizes[f"{name}_{i + 1}"] = (channels, out, height, width)
        channels = out
    return sizes


def _block_5(channels: int, pool: int) -> Sizes:
    return {
        "branch1x1": (channels, 64, 1, 1),
        **_chain("branch5x5", channels, (48, 1, 1), (64, 5, 5)),
        **_chain("branch3x3dbl", channels, (64, 1, 1), (96, 3, 3), (96, 3, 3)),
        "branch_pool": (channels, pool, 1, 1),
    }


def _block_6(c: int) -> Sizes:
    double = ((c, 1, 1), (c, 7, 1), (c, 1, 7), (c, 7, 1), (192, 1, 7))
    return {
        "branch1x1": (768, 192, 1, 1),
        **_chain("branch7x7", 768, (c, 1, 1), (c, 1, 7), (192, 7, 1)),
        **_chain("branch7x7dbl", 768, *double),
        "branch_pool": (768, 192, 1, 1),
    }


def _block_7(channels: int) -> Sizes:
    return {
        "branch1x1": (channels, 320, 1, 1),
        "branch3x3_1": (channels, 384, 1, 1),
        "branch3x3_2a": (384, 384, 1, 3),
        "branch3x3_2b": (384, 384, 3, 1),
        **_chain("branch3x3dbl", channels, (448, 1, 1), (384, 3, 3)),
        "branch3x3dbl_3a": (384, 384, 1, 3),
        "branch3x3dbl_3b": (384, 384, 3, 1),
        "branch_pool": (channels, 192, 1, 1),
    }


def _table() -> list[Entry]:
    entries = []
    for block, convs in blocks().items():
        for name in convs:
            torch = name if block == "stem" else f"{block}.{name}"
            path = f"{block}/{name}"
            entries.append(Entry(f"{torch}.conv.weight", f"{path}/kernel", CONV))
            entries += [Entry(f"{torch}.bn.{n}", f"{path}/{p}", VECTOR) for n, p in _NORM.items()]
    return [*entries, Entry("fc.weight", "fc/fc/kernel", _CLASSIFIER), Entry("fc.bias", "fc/fc/bias", VECTOR)]


_CLASSIFIER = torch_weights.Layout(lambda w: w.T[None, None], lambda w: w[0, 0].T)


def _abstract() -> dict[str, dict[str, dict[str, jax.ShapeDtypeStruct]]]:
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, np.float32)
    tree = {
        block: {
            name: {"kernel": shape(h, w, c, d), **{n: shape(d) for n in _NORM.values()}}
            for name, (c, d, h, w) in convs.items()
        }
        for block, convs in blocks().items()
    }
    return {**tree, "fc": {"fc": {"kernel": shape(1, 1, 2048, 1008), "bias": shape(1008)}}}


def _fold(conv: Mapping[str, Any]) -> dict[str, Float[np.ndarray, "..."]]:
    """Fold a batch norm into the kernel and bias of its convolution, in float64."""
    scale = conv["scale"] / np.sqrt(conv["variance"].astype(np.float64) + _EPS)
    bias = conv["bias"] - conv["mean"] * scale
    return {"kernel": (conv["kernel"] * scale).astype(np.float32), "bias": bias.astype(np.float32)}
