"""Seeded weights in place of Inception's public ones, and pictures computed by a formula.

The reference runs that wrote fixtures/inception.npz used the same weights. Numpy's
PCG64, seeded with a tensor's name, draws its values. Their scale keeps activations from vanishing.
"""

import hashlib

import numpy as np

from diffusion_jax.metrics import inception_weights

DIGEST = "35e65934b382a68e8a281008f2845b2d448c20b0ae14d7ec5907be117b0068d1"


def picture(height, width):
    """Return chirps [height, width, 3], which every resize kernel changes differently."""
    y, x = np.mgrid[:height, :width]
    channels = [(x * x * (c + 1) // 97 + y * y * 3 // (89 + c) + x * y // 61) % 256 for c in range(3)]
    return np.stack(channels, -1).astype(np.uint8)


def state():
    """Return a state dict with the public file's names."""
    shapes = {"fc.weight": (1008, 2048), "fc.bias": (1008,)}
    for block, convs in inception_weights.blocks().items():
        for name, (channels, out, height, width) in convs.items():
            torch = name if block == "stem" else f"{block}.{name}"
            shapes[f"{torch}.conv.weight"] = (out, channels, height, width)
            for vector in ("weight", "bias", "running_mean", "running_var"):
                shapes[f"{torch}.bn.{vector}"] = (out,)
    return {name: _tensor(name, shape) for name, shape in shapes.items()}


def _tensor(name, shape):
    seed = hashlib.sha256(f"0:{name}".encode()).digest()[:8]
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(seed, "little")))
    if name.endswith(("bn.weight", "running_var")):
        return rng.uniform(0.8, 1.2, shape).astype(np.float32)
    scale = 0.1
    if name.endswith("conv.weight"):
        scale = np.sqrt(2 / np.prod(shape[1:]))
    elif name == "fc.weight":
        scale = 1 / np.sqrt(shape[1])
    return (scale * rng.standard_normal(shape)).astype(np.float32)
