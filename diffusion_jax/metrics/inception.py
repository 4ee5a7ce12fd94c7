"""Compute the features of the Inception v3 that defines FID (TensorFlow's graph of 2015-12-05).

inception_weights.py folds the batch norms into the convolutions. The network differs from
torchvision's Inception v3: average pools do not count padding, Mixed_7c has a max pool, there are
1008 classes, and there is no auxiliary head. Images are [B, 299, 299, 3] in about [-1, 1].
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Conv = Mapping[str, Any]
"""A convolution {"kernel": [h, w, C, D], "bias": [D]} of numpy or jax arrays."""
InceptionParams = Mapping[str, Mapping[str, Conv]]
"""Convolutions, keyed by block and then by branch. The names are those of the public weight file.

"stem" holds the first five convolutions. "fc" holds the classifier as a 1x1 convolution."""

LEVELS = {"64": 64, "192": 192, "768": 768, "2048": 2048, "logits": 1008, "spatial": 2023, "unbiased": 1008}
"""Maps each feature level to its number of features."""
_EXACT = jax.lax.Precision.HIGHEST


class Outputs(NamedTuple):
    """Features of all levels. The first four fields are means over positions at increasing depth.

    Under jit, unused fields are never computed.
    """

    first_max_pool: Float[Array, "B 64"]
    second_max_pool: Float[Array, "B 192"]
    before_7a: Float[Array, "B 768"]
    """The output of Mixed_6e, which is the input of Mixed_7a."""
    final: Float[Array, "B 2048"]
    """The features used by FID."""
    logits: Float[Array, "B 1008"]
    spatial: Float[Array, "B 2023"]
    """Seven channels of Mixed_6d's output at 17x17 positions: the features used by ADM's sFID."""
    unbiased: Float[Array, "B 1008"]
    """The logits without the classifier's bias, used by the Inception Score."""


def apply(params: InceptionParams, x: Float[Array, "B 299 299 3"]) -> Outputs:
    """Run the network on images in about [-1, 1] and return the features of all levels."""
    stem = params["stem"]
    x = _conv(stem["Conv2d_1a_3x3"], x, stride=2, padding="VALID")
    x = _inner(_conv(stem["Conv2d_2a_3x3"], x))
    x = _conv(stem["Conv2d_2b_3x3"], x)
    first = x = _max_pool(x)  # [B, 73, 73, 64]
    x = _conv(stem["Conv2d_3b_1x1"], x)
    x = _inner(_conv(stem["Conv2d_4a_3x3"], x))
    second = x = _max_pool(x)  # [B, 35, 35, 192]
    for name in ("Mixed_5b", "Mixed_5c", "Mixed_5d"):
        x = _block_5(params[name], x)
    x = _block_6a(params["Mixed_6a"], x)  # [B, 17, 17, 768]
    for name in ("Mixed_6b", "Mixed_6c", "Mixed_6d"):
        x = _block_6(params[name], x)
    spatial = x[..., :7].reshape(len(x), -1)
    before_7a = x = _block_6(params["Mixed_6e"], x)
    x = _block_7a(params["Mixed_7a"], x)  # [B, 8, 8, 1280]
    x = _block_7(params["Mixed_7b"], x, max_pool=False)
    x = _block_7(params["Mixed_7c"], x, max_pool=True)  # [B, 8, 8, 2048]
    mean = lambda level: level.mean((1, 2))
    classifier = params["fc"]["fc"]
    (logits,) = _side_by_side([classifier], mean(x))
    levels = mean(first), mean(second), mean(before_7a), mean(x)
    return Outputs(*levels, logits, spatial, logits - classifier["bias"])


def level(outputs: Outputs, name: str) -> Float[Array, "B D"]:
    """Return the features of the named level, a key of LEVELS."""
    return outputs[list(LEVELS).index(name)]


def _block_5(p: Mapping[str, Conv], x: Array) -> Array:
    one, five, three, pooled = _heads(p, x, ("branch1x1", "branch5x5_1", "branch3x3dbl_1"))
    five = _conv(p["branch5x5_2"], five)
    three = _conv(p["branch3x3dbl_3"], _conv(p["branch3x3dbl_2"], three))
    return jnp.concatenate([one, five, three, pooled], -1)


def _block_6a(p: Mapping[str, Conv], x: Array) -> Array:
    one = _conv(p["branch3x3"], x, stride=2, padding="VALID")
    two = _conv(p["branch3x3dbl_2"], _conv(p["branch3x3dbl_1"], x))
    two = _conv(p["branch3x3dbl_3"], two, stride=2, padding="VALID")
    return jnp.concatenate([one, two, _max_pool(x)], -1)


def _block_6(p: Mapping[str, Conv], x: Array) -> Array:
    one, seven, double, pooled = _heads(p, x, ("branch1x1", "branch7x7_1", "branch7x7dbl_1"))
    seven = _conv(p["branch7x7_3"], _conv(p["branch7x7_2"], seven))
    for i in (2, 3, 4, 5):
        double = _conv(p[f"branch7x7dbl_{i}"], double)
    return jnp.concatenate([one, seven, double, pooled], -1)


def _block_7a(p: Mapping[str, Conv], x: Array) -> Array:
    three, seven = _side_by_side([p["branch3x3_1"], p["branch7x7x3_1"]], x)
    three = _conv(p["branch3x3_2"], jax.nn.relu(three), stride=2, padding="VALID")
    seven = _conv(p["branch7x7x3_3"], _conv(p["branch7x7x3_2"], jax.nn.relu(seven)))
    seven = _conv(p["branch7x7x3_4"], seven, stride=2, padding="VALID")
    return jnp.concatenate([three, seven, _max_pool(x)], -1)


def _block_7(p: Mapping[str, Conv], x: Array, *, max_pool: bool) -> Array:
    names = ("branch1x1", "branch3x3_1", "branch3x3dbl_1")
    if max_pool:
        one, three, double = map(jax.nn.relu, _side_by_side([p[name] for name in names], x))
        same = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        pooled = _conv(p["branch_pool"], same)
    else:
        one, three, double, pooled = _heads(p, x, names)
    double = _conv(p["branch3x3dbl_2"], double)
    split = lambda a, b, y: [_conv(p[a], y), _conv(p[b], y)]
    three = split("branch3x3_2a", "branch3x3_2b", three)
    double = split("branch3x3dbl_3a", "branch3x3dbl_3b", double)
    return jnp.concatenate([one, *three, *double, pooled], -1)


def _heads(p: Mapping[str, Conv], x: Array, names: Sequence[str]) -> list[Array]:
    """Compute all 1x1 convolutions of a block's input as one matrix product.

    The result has one array for each of `names`, then one for the pooling branch. In the original
    network, this branch pools before its 1x1 convolution. Both operations are linear and commute.
    Pooling after the convolution is cheaper, because there are fewer channels.
    """
    *heads, pooled = _side_by_side([p[name] for name in (*names, "branch_pool")], x)
    return [*map(jax.nn.relu, heads), jax.nn.relu(_average_pool(pooled))]


def _side_by_side(convs: Sequence[Conv], x: Array) -> list[Array]:
    """Apply several 1x1 convolutions to the same input, without ReLU. Return one array for each."""
    kernel = jnp.concatenate([conv["kernel"][0, 0] for conv in convs], 1)
    bias = jnp.concatenate([conv["bias"] for conv in convs])
    y = jnp.matmul(x, kernel, precision=_EXACT) + bias
    ends = np.cumsum([len(conv["bias"]) for conv in convs])[:-1]
    return jnp.split(y, ends.tolist(), -1)


def _conv(conv: Conv, x: Array, *, stride: int = 1, padding: str = "SAME") -> Array:
    kernel = conv["kernel"]
    if kernel.shape[:2] == (1, 1):
        return jax.nn.relu(_side_by_side([conv], x)[0])
    y = jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=_EXACT
    )
    return jax.nn.relu(y + conv["bias"])


def _inner(x: Array) -> Array:
    """Crop the output of a padded 3x3 convolution to the output of the unpadded convolution.

    Two layers of the network have no padding. They are computed with padding and then cropped,
    because XLA's fast convolution on CPUs requires padding. Without it, these two layers would take
    half of the network's time on CPUs.
    """
    return x[:, 1:-1, 1:-1]


def _max_pool(x: Array) -> Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")


def _average_pool(x: Array) -> Array:
    """Average over 3x3 pixels. Padding does not count towards the average."""
    window = ((1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    total = jax.lax.reduce_window(x, 0.0, jax.lax.add, *window)
    number = jax.lax.reduce_window(jnp.ones((1, *x.shape[1:3], 1)), 0.0, jax.lax.add, *window)
    return total / number
