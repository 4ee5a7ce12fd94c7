"""Random masks against LaMa's procedure, drawn by numpy."""

import jax
import numpy as np
import pytest

from sd_jax import masks

SIDE, COUNT = 64, 1000
KEYS = 400


def near(start, end, width):
    """Return the pixels within width / 2 of a segment, whose points are (y, x)."""
    pixel = np.stack(np.mgrid[:SIDE, :SIDE], -1) + 0.5
    along = end - start
    share = np.clip((pixel - start) @ along / max(along @ along, 1e-6), 0, 1)
    return np.hypot(*np.moveaxis(pixel - start - share[..., None] * along, -1, 0)) <= width / 2


def lamas_strokes(rng):
    """make_random_irregular_mask with max_len 200 and max_width 100 of 256 pixels, max_times 5."""
    mask, unit = np.zeros((SIDE, SIDE), bool), SIDE / 256
    for _ in range(rng.integers(1, 6)):
        at = SIDE * rng.random(2)
        for _ in range(rng.integers(1, 6)):
            angle, length = 2 * np.pi * rng.random(), unit * rng.uniform(10, 210)
            end = np.clip(at + length * np.array([np.sin(angle), np.cos(angle)]), 0, SIDE)
            mask |= near(at, end, unit * rng.uniform(5, 105))
            at = end
    return mask


def lamas_boxes(rng):
    """make_random_rectangle_mask with sides of 30 to 150 of 256 pixels, margin 10, max_times 3."""
    mask, unit = np.zeros((SIDE, SIDE), bool), SIDE / 256
    for _ in range(rng.integers(1, 4)):
        size = unit * rng.uniform(30, 150, 2)
        low = unit * 10 + rng.random(2) * (SIDE - 20 * unit - size)
        y, x = (np.mgrid[:SIDE, :SIDE][i] + 0.5 for i in range(2))
        mask |= (low[0] <= y) & (y <= low[0] + size[0]) & (low[1] <= x) & (x <= low[1] + size[1])
    return mask


@pytest.mark.parametrize("kind", ["strokes", "boxes"])
def test_the_covered_share_of_strokes_and_boxes_is_distributed_as_lamas(kind):
    draw, lama = getattr(masks, f"_{kind}"), globals()[f"lamas_{kind}"]
    keys = jax.random.split(jax.random.key(0), KEYS)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: draw(key, SIDE, SIDE)))(keys))
    rng = np.random.default_rng(0)
    shares = [drawn.mean((1, 2)), np.array([lama(rng).mean() for _ in range(KEYS)])]
    standard_error = (sum(share.var() for share in shares) / KEYS) ** 0.5
    assert abs(shares[0].mean() - shares[1].mean()) < 4 * standard_error
    # The largest distance of two cumulative distributions; by chance, 1 in 1000 exceeds this.
    points = np.sort(np.concatenate(shares))
    below = [np.searchsorted(np.sort(share), points, side="right") / KEYS for share in shares]
    assert np.abs(below[0] - below[1]).max() < 1.95 * (2 / KEYS) ** 0.5


def test_a_quarter_of_the_masks_cover_the_whole_picture_and_each_depends_on_its_key():
    keys = jax.random.split(jax.random.key(1), COUNT)
    draw = jax.jit(masks.random_masks, static_argnums=(1, 2))
    drawn = np.asarray(draw(keys, 16, 24))
    assert drawn.shape == (COUNT, 16, 24) and drawn.dtype == bool
    whole = drawn.all((1, 2)).mean()
    assert abs(whole - 0.25) < 4 * (0.25 * 0.75 / COUNT) ** 0.5 + 0.01  # Strokes may cover all.
    np.testing.assert_array_equal(draw(keys[5:8], 16, 24), drawn[5:8])
    assert len({mask.tobytes() for mask in drawn}) > COUNT / 2
