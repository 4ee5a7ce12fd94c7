"""Random masks for training inpainting models: wide strokes, boxes, or the whole picture."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, PRNGKeyArray

WHOLE = 0.25
"""The share of masks that cover the whole picture, as in the training of RunwayML's model."""
_STREAM = 6  # Separates the masks from the noise, which is drawn from the same keys.
_STROKES, _SEGMENTS, _BOXES = 5, 5, 3
# Lengths in pixels of a picture with sides of 256, as in LaMa's configs.
_LENGTH, _WIDTH, _BOX, _MARGIN = (10, 210), (5, 105), (30, 150), 10


def random_masks(keys: Key[Array, "B"], height: int, width: int) -> Bool[Array, "B H W"]:
    """Draw a mask from each key, True at the pixels to redraw.

    A quarter of the masks cover the whole picture. Of the others, one half are 1 to 5 strokes of 1
    to 5 segments, and one half are 1 to 3 boxes, in the sizes of LaMa's wide masks (Suvorov et al.
    2022) relative to the shorter side.
    """
    return jax.vmap(lambda key: _mask(jax.random.fold_in(key, _STREAM), height, width))(keys)


def _strokes(key: PRNGKeyArray, height: int, width: int) -> Bool[Array, "H W"]:
    """Draw 1 to 5 strokes: chains of 1 to 5 segments in random directions, with round ends."""
    keys = jax.random.split(key, 6)
    shape, unit = (_STROKES, _SEGMENTS), min(height, width) / 256
    sides = jnp.array([height, width], jnp.float32)
    start = sides * jax.random.uniform(keys[0], (_STROKES, 2))
    angle = 2 * jnp.pi * jax.random.uniform(keys[1], shape)
    length = unit * jax.random.uniform(keys[2], shape, minval=_LENGTH[0], maxval=_LENGTH[1])
    step = length[..., None] * jnp.stack([jnp.sin(angle), jnp.cos(angle)], -1)
    radius = unit * jax.random.uniform(keys[3], shape, minval=_WIDTH[0], maxval=_WIDTH[1]) / 2
    points = [start]
    for i in range(_SEGMENTS):
        points.append(jnp.clip(points[-1] + step[:, i], 0, sides))
    starts, ends = jnp.stack(points[:-1]), jnp.stack(points[1:])  # [segments, strokes, 2]
    drawn = jnp.arange(_STROKES) < jax.random.randint(keys[4], (), 1, _STROKES + 1)
    counts = jax.random.randint(keys[5], (_STROKES,), 1, _SEGMENTS + 1)
    drawn = drawn & (jnp.arange(_SEGMENTS)[:, None] < counts)  # [segments, strokes]
    near = lambda a, b, r: _distance(a, b, height, width) <= r
    covered = jax.vmap(jax.vmap(near))(starts, ends, jnp.where(drawn, radius.T, -1))
    return covered.any((0, 1))


def _boxes(key: PRNGKeyArray, height: int, width: int) -> Bool[Array, "H W"]:
    """Draw 1 to 3 boxes, which keep a margin to the edges."""
    keys, unit = jax.random.split(key, 3), min(height, width) / 256
    sides = jnp.array([height, width], jnp.float32)
    size = unit * jax.random.uniform(keys[0], (_BOXES, 2), minval=_BOX[0], maxval=_BOX[1])
    margin = unit * _MARGIN
    low = margin + jax.random.uniform(keys[1], size.shape) * (sides - 2 * margin - size)
    drawn = jnp.arange(_BOXES) < jax.random.randint(keys[2], (), 1, _BOXES + 1)
    pixel = _pixels(height, width)[:, :, None]  # [H, W, 1, 2]
    inside = ((low <= pixel) & (pixel <= low + size)).all(-1)  # [H, W, boxes]
    return (inside & drawn).any(-1)


def _mask(key: PRNGKeyArray, height: int, width: int) -> Bool[Array, "H W"]:
    key_kind, key_strokes, key_boxes = jax.random.split(key, 3)
    strokes, boxes = _strokes(key_strokes, height, width), _boxes(key_boxes, height, width)
    kind = jax.random.uniform(key_kind)
    return jnp.where(kind < (1 + WHOLE) / 2, strokes, boxes) | (kind < WHOLE)


def _distance(start: Float[Array, "2"], end: Float[Array, "2"], height: int, width: int) -> Float[Array, "H W"]:
    """Return the distance of each pixel from the segment between two points, each (y, x)."""
    along, pixel = end - start, _pixels(height, width) - start
    at = jnp.clip((pixel @ along) / jnp.maximum(along @ along, 1e-6), 0, 1)  # [H, W]
    return jnp.linalg.norm(pixel - at[..., None] * along, axis=-1)


def _pixels(height: int, width: int) -> Float[Array, "H W 2"]:
    return jnp.stack(jnp.mgrid[:height, :width], -1).astype(jnp.float32) + 0.5
