"""The changes of a weight by LoRA, DoRA, LoHa and LoKr, in torch's layout, as in peft and LyCORIS.

Letters in shapes: O output channels, I input channels, R rank, K height * width of a convolution's
kernel (1 for a linear layer).
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

Arrays = Mapping[str, np.ndarray]


class Layer(NamedTuple):
    """The change of one layer: its factors, which `changed` applies to the layer's weight."""

    name: str
    """The layer's name in the file."""
    arrays: Arrays
    """The factors, keyed by LyCORIS's names (LoRA's: "down", "mid", "up"), and a DoRA's magnitudes,
    keyed "dora_scale" or "lora_magnitude_vector"."""
    scale: float
    """The number that multiplies the product of the factors: alpha / rank, as a rule."""


def product_of(kinds: Mapping[str, object]) -> Callable[[Arrays], np.ndarray] | None:
    """Return the function that multiplies factors with these names, [O, I, ...] or [O, I K].

    Return None if the factors are incomplete, or of several kinds.
    """
    names = " ".join(sorted(kinds.keys() - {"alpha", "name", *_MAGNITUDES}))
    return next((f for pattern, f in _PRODUCTS.items() if re.fullmatch(pattern, names)), None)


def rank(arrays: Arrays) -> int | None:
    """Return the rank of a layer's factors, or None for a LoKr of two whole matrices."""
    firsts = ("down", "hada_w1_b", "lokr_w1_b", "lokr_w2_b")
    return next((len(arrays[name]) for name in firsts if name in arrays), None)


def changed(layer: Layer, weight: np.ndarray, strength: float) -> np.ndarray:
    """Return the weight [O, I, ...] plus `strength` times its change by a layer.

    A DoRA also gives the changed weight its magnitudes (Liu et al. 2024, equation 5). Its change is
    multiplied by the strength as a whole, as in ComfyUI.

    Raises:
        ValueError: The factors are incomplete, or do not have the sizes of the weight.
    """
    if not (multiply := product_of(layer.arrays)):
        raise ValueError(f"the factors of {layer.name} are incomplete, or of several kinds")
    try:
        change = multiply(layer.arrays)
        if _squeezed(change.shape) not in (_squeezed(weight.shape), _flat(weight).shape):
            raise ValueError(f"their product has the shape {list(change.shape)}")
        change = (np.float32(layer.scale) * change).reshape(weight.shape)
        for name in _MAGNITUDES & layer.arrays.keys():
            change = _with_magnitudes(weight + change, layer.arrays[name], name) - weight
    except ValueError as error:
        shapes = " and ".join(str(list(x.shape)) for x in layer.arrays.values() if x.ndim)
        raise ValueError(
            f"the factors of {layer.name} have the shapes {shapes}, but the model's weight has the "
            f"shape {list(weight.shape)}"
        ) from error
    return weight + strength * change


_MAGNITUDES = {"dora_scale", "lora_magnitude_vector"}  # Of LyCORIS and of peft.


def _with_magnitudes(weight: np.ndarray, magnitudes: np.ndarray, name: str) -> np.ndarray:
    """Return the weight with its norms per output channel, or per input channel, replaced."""
    # LyCORIS's option wd_on_out=False stores the norms of input channels as [1, I, ...].
    is_of_inputs = name == "dora_scale" and magnitudes.ndim > 1 and len(magnitudes) < len(weight)
    vectors = weight.swapaxes(0, 1) if is_of_inputs else weight  # [O, I, ...] or [I, O, ...]
    norms = np.linalg.norm(_flat(vectors), axis=1) + np.finfo(np.float32).eps
    ratios = (magnitudes.reshape(norms.shape) / norms).reshape(-1, *[1] * (weight.ndim - 1))
    return (vectors * ratios).swapaxes(0, 1) if is_of_inputs else vectors * ratios


def _lora(a: Arrays) -> np.ndarray:
    down, up = a["down"], a["up"]
    if "mid" in a:
        down = np.einsum("rshw,si->rihw", a["mid"], _flat(down))
    return (_flat(up) @ _flat(down)).reshape(len(up), *down.shape[1:])  # [O, I, ...]


def _loha(a: Arrays) -> np.ndarray:
    """Multiply two products element by element (Hyeon-Woo et al. 2022, equation 4)."""
    return _matrix(a, "hada_w1") * _matrix(a, "hada_w2")  # [O, I K]


def _lokr(a: Arrays) -> np.ndarray:
    """Return the Kronecker product of two matrices (Yeh et al. 2024)."""
    return np.kron(_matrix(a, "lokr_w1"), _matrix(a, "lokr_w2"))  # [O, I K]


def _matrix(a: Arrays, name: str) -> np.ndarray:
    """Return a matrix that is stored whole, as two factors, or as three, of which one is a core."""
    if name in a:
        return _flat(a[name])
    left, right, core = a[f"{name}_a"], a[f"{name}_b"], name.replace("w", "t")
    if core in a:  # [R, R, height, width]
        return _flat(np.einsum("rshw,ro,si->oihw", a[core], left, right))
    return left @ _flat(right)


def _flat(array: np.ndarray) -> np.ndarray:
    if array.ndim < 2:
        raise ValueError(f"a factor has the shape {list(array.shape)}")
    return array.reshape(len(array), -1)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a linear layer for a 1x1 convolution, and other shapes unchanged."""
    return shape[:2] if shape[2:] == (1, 1) else shape


_PRODUCTS: dict[str, Callable[[Arrays], np.ndarray]] = {
    "down (mid )?up": _lora,
    "(hada_t1 hada_t2 )?hada_w1_a hada_w1_b hada_w2_a hada_w2_b": _loha,
    r"lokr_w1(_a lokr_w1_b)? lokr_w2": _lokr,
    r"(lokr_t2 )?lokr_w1(_a lokr_w1_b)? lokr_w2_a lokr_w2_b": _lokr,
}
"""Functions by the sorted names of the factors that they multiply."""
