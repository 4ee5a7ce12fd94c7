"""Resize and normalise images for feature extractors. Scores depend on the exact resize kernels.

Kernels are separable and linear, so images are resized by one matrix for the rows and one for the
columns. Input images are [B, H, W, 3] in 0..255, either uint8 or float32. Float images need not be
rounded.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

Images = Num[Array, "B H W 3"]
Prepare = Callable[[Images], Float[Array, "B S S 3"]]

INCEPTION_SIZE = 299
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def pytorch(images: Images) -> Float[Array, "B 299 299 3"]:
    """Preprocess images for Inception like pytorch-fid and MLPerf.

    The resize is bilinear with half-pixel centres, without antialiasing. The output range is
    [-1, 1].
    """
    return _to_inception(images, _bilinear_centres) * (2 / 255) - 1


def tf(images: Images) -> Float[Array, "B 299 299 3"]:
    """Preprocess images for Inception like TensorFlow's Inception graph of 2015 and torch-fidelity.

    The resize is bilinear without half-pixel centres, as in TensorFlow 1. The output
    (x - 128) / 128 has the range [-1, 0.992].
    """
    return (_to_inception(images, _bilinear_corner) - 128) / 128


def clean(images: Images) -> Float[Array, "B 299 299 3"]:
    """Preprocess images for Inception like clean-fid 0.1.35.

    The resize is Pillow's antialiased bicubic on floats. The resized values are clipped to 0..255
    but not rounded. The output (x - 128) / 128 has the range [-1, 0.992]. Source: Parmar,
    Zhang, Zhu 2022, "On aliased resizing and surprising subtleties in GAN evaluation".
    """
    return (jnp.clip(_to_inception(images, _pillow_bicubic), 0, 255) - 128) / 128


def nemo(images: Images) -> Float[Array, "B 299 299 3"]:
    """Preprocess images for Inception like NeMo.

    The resize is torch's bicubic with aligned corners, without antialiasing. The output is
    2 x / 255 - 1. It is not clipped, so it may exceed [-1, 1] a little next to sharp edges.
    """
    return _to_inception(images, _bicubic_corners) * (2 / 255) - 1


INCEPTION: dict[str, Prepare] = {"pytorch": pytorch, "tf": tf, "clean": clean, "nemo": nemo}

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def open_clip(size: int) -> Prepare:
    """Return OpenCLIP's preprocessing: resize the shorter side to `size`, then crop the centre.

    The resize is Pillow's 8-bit bicubic. The output is normalised with CLIP's mean and standard
    deviation.
    """

    def prepare(images: Images) -> Float[Array, "B S S 3"]:
        sides = images.shape[1:3]
        rows, columns = (int(size * side / min(sides)) for side in sides)
        x = _pillow_8_bits(images, rows, columns)
        # round() rounds halves to even, as in torchvision's centre crop.
        top, left = round((rows - size) / 2), round((columns - size) / 2)
        return _normalise_clip(x[:, top : top + size, left : left + size])

    return prepare


def squash(size: int) -> Prepare:
    """Return CMMD's preprocessing: an antialiased bicubic resize to a square, without rounding.

    The output is normalised with CLIP's mean and standard deviation.
    """

    return lambda images: _normalise_clip(bicubic_square(size)(images))


def pad(size: int) -> Prepare:
    """Return HPSv2's preprocessing: resize the longer side to `size`, then pad with black.

    The resize is an antialiased bicubic on floats, as torchvision's of tensors since version 0.17,
    without rounding. The output is normalised with CLIP's mean and standard deviation.
    """

    def prepare(images: Images) -> Float[Array, "B S S 3"]:
        sides = images.shape[1:3]
        new = [round(side * size / max(sides)) for side in sides]
        x = _resample(images, *map(_pillow_bicubic, sides, new))
        before = [(size - side) // 2 for side in new]
        after = [size - side - left for side, left in zip(new, before, strict=True)]
        return _normalise_clip(jnp.pad(x, ((0, 0), *zip(before, after, strict=True), (0, 0))))

    return prepare


def bicubic_square(size: int) -> Prepare:
    """Return a function that resizes to a square with Pillow's antialiased bicubic on floats.

    The input is in 0..255. The output is neither rounded nor clipped, so it may exceed 0..255 a
    little next to sharp edges.
    """

    def prepare(images: Images) -> Float[Array, "B S S 3"]:
        rows, columns = (_pillow_bicubic(side, size) for side in images.shape[1:3])
        return _resample(images, rows, columns)

    return prepare


def dgm_eval(images: Images) -> Float[Array, "B 224 224 3"]:
    """Preprocess images for DINOv2 like dgm-eval (Stein et al. 2023).

    The resize is Pillow's 8-bit bicubic to a square. The output is normalised with ImageNet's mean
    and standard deviation.
    """
    x = _pillow_8_bits(images, 224, 224) / 255
    return (x - jnp.array(_IMAGENET_MEAN)) / jnp.array(_IMAGENET_STD)


def _to_inception(images: Images, matrix: Callable[[int, int], np.ndarray]) -> Array:
    rows, columns = (matrix(side, INCEPTION_SIZE) for side in images.shape[1:3])
    return _resample(images, rows, columns)


def _resample(
    images: Images, rows: Float[np.ndarray, "O H"], columns: Float[np.ndarray, "P W"]
) -> Float[Array, "B O P 3"]:
    x = images.astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    if rows.shape[0] != rows.shape[1] or (rows != np.eye(len(rows))).any():
        x = jnp.einsum("oh,bhwc->bowc", rows.astype(np.float32), x, precision=exact)
    if columns.shape[0] != columns.shape[1] or (columns != np.eye(len(columns))).any():
        x = jnp.einsum("pw,bowc->bopc", columns.astype(np.float32), x, precision=exact)
    return x


def _pillow_8_bits(images: Images, rows: int, columns: int) -> Float[Array, "B O P 3"]:
    """Resize like the 8-bit bicubic of Pillow 12, which rounds and clips after each of two passes.

    The first pass resizes the width, as in all versions of Pillow up to 12. The scores in papers
    were computed with these versions. Pillow 13 resizes the height first where this is cheaper, for
    example when tall images become square. On images of noise, its pixels differ from those of
    earlier versions by up to 23 grey levels.
    """
    h, w = images.shape[1:3]
    along_rows = lambda x, matrix: _resample(x, np.eye(h), matrix)
    along_columns = lambda x, matrix: _resample(x, matrix, np.eye(columns))
    x = _pillow_pass(along_rows, images.astype(jnp.float32), _pillow_bicubic(w, columns))
    return _pillow_pass(along_columns, x, _pillow_bicubic(h, rows))


def _pillow_pass(resample: Callable[[Array, np.ndarray], Array], x: Array, weights: Float[np.ndarray, "O I"]) -> Array:
    """Resample along one axis and round exactly as Pillow does.

    Pillow's weights are multiples of 2^-22 and ties are common, so the sum must be exact. It needs
    30 bits, but float32 has 24. The code therefore splits the weights into coarse and fine parts
    and sums each part without rounding. The fine sum only affects the final floor.
    """
    fixed = np.trunc(weights * 2**22 + np.copysign(0.5, weights)) / 2**22
    coarse = np.round(fixed * 2**11) / 2**11
    total = resample(x, coarse) + 0.5
    whole = jnp.floor(total)
    return jnp.clip(whole + jnp.floor(total - whole + resample(x, fixed - coarse)), 0, 255)


def _normalise_clip(x: Float[Array, "B S S 3"]) -> Float[Array, "B S S 3"]:
    return (x / 255 - jnp.array(_CLIP_MEAN)) / jnp.array(_CLIP_STD)


def _bilinear_centres(size_in: int, size_out: int) -> Float[np.ndarray, "O I"]:
    centres = np.maximum((np.arange(size_out) + 0.5) * size_in / size_out - 0.5, 0)
    return _gather(centres, size_in, (0, 1), lambda d: 1 - d)


def _bilinear_corner(size_in: int, size_out: int) -> Float[np.ndarray, "O I"]:
    return _gather(np.arange(size_out) * size_in / size_out, size_in, (0, 1), lambda d: 1 - d)


def bicubic(size_in: int, size_out: int, *, antialias: bool, offset: float = 0.0) -> Float[np.ndarray, "O I"]:
    """Return the matrix [O, I] of torch's bicubic resize.

    Args:
        size_in: the input size I in pixels.
        size_out: the output size O in pixels.
        antialias: whether to antialias, as Pillow does.
        offset: without antialiasing, the scale is (O + offset) / I instead of O / I. DINOv2 without
            registers uses 0.1.
    """
    if antialias:
        return _pillow_bicubic(size_in, size_out)
    centres = (np.arange(size_out) + 0.5) * size_in / (size_out + offset) - 0.5
    return _gather(centres, size_in, (-1, 0, 1, 2), lambda d: cubic(d, -0.75))


def _bicubic_corners(size_in: int, size_out: int) -> Float[np.ndarray, "O I"]:
    centres = np.arange(size_out) * (size_in - 1) / (size_out - 1)
    return _gather(centres, size_in, (-1, 0, 1, 2), lambda d: cubic(d, -0.75))


def _gather(
    centres: Float[np.ndarray, "O"], size_in: int, taps: Sequence[int], kernel: Callable[[np.ndarray], np.ndarray]
) -> Float[np.ndarray, "O I"]:
    """Return a resize matrix. Output pixel o is a weighted sum of input pixels near centres[o].

    For each of `taps`, the input pixel at floor(centre) + tap has the weight kernel(d), where d is
    its distance to the centre. Outside the image, the pixels at the border are repeated.
    """
    first = np.floor(centres).astype(int)
    weights = np.zeros((len(centres), size_in))
    for tap in taps:
        index = np.clip(first + tap, 0, size_in - 1)
        np.add.at(weights, (np.arange(len(centres)), index), kernel(abs(centres - first - tap)))
    return weights


def _pillow_bicubic(size_in: int, size_out: int) -> Float[np.ndarray, "O I"]:
    """Return the matrix [O, I] of Pillow's bicubic resize.

    If the image shrinks, the kernel is wider by the same factor, which avoids aliasing. The weights
    of each output pixel are normalised over the pixels inside the image.
    """
    if size_in == size_out:
        return np.eye(size_in)
    step = size_in / size_out
    scale = max(step, 1)
    centres = (np.arange(size_out)[:, None] + 0.5) * step
    first = np.maximum((centres - 2 * scale + 0.5).astype(int), 0)
    end = np.minimum((centres + 2 * scale + 0.5).astype(int), size_in)
    pixels = np.arange(size_in)
    weights = cubic(abs(pixels + 0.5 - centres) / scale, -0.5)
    weights = np.where((pixels >= first) & (pixels < end), weights, 0)
    return weights / weights.sum(1, keepdims=True)


def cubic(d: Float[np.ndarray, "*N"], a: float) -> Float[np.ndarray, "*N"]:
    """Return the values of Keys' cubic kernel (1981) at distances d >= 0, in pixels.

    The parameter `a` is -0.75 in torch, and -0.5 in Pillow and jax.
    """
    near = (a + 2) * d**3 - (a + 3) * d**2 + 1
    far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))
