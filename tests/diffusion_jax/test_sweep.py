"""Scores over guidance: the table's text and the curve's picture."""

import numpy as np
import pytest
from PIL import Image

from diffusion_jax import sweep

ROWS = [
    {"guidance": 1.5, "seen": 0.25, "held_out": 0.125, "ema": "0.999"},
    {"guidance": 1.0, "seen": 0.75, "held_out": 0.5, "ema": "a, b"},
]


def test_a_table_has_the_first_rows_keys_and_quotes_what_needs_it(tmp_path):
    sweep.write_table(tmp_path / "sweep.csv", ROWS)
    assert (tmp_path / "sweep.csv").read_bytes() == (
        b'guidance,seen,held_out,ema\n1.5,0.25,0.125,0.999\n1.0,0.75,0.5,"a, b"\n'
    )


def test_a_row_with_another_column_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="extra"):
        sweep.write_table(tmp_path / "sweep.csv", [ROWS[0], ROWS[1] | {"extra": 1}])
    assert list(tmp_path.iterdir()) == []


def test_the_curve_shows_each_line_in_a_colour_of_its_own(tmp_path):
    sweep.write_curve(tmp_path / "one.png", ROWS, "guidance", ["seen"])
    sweep.write_curve(tmp_path / "two.png", ROWS, "guidance", ["seen", "held_out"])
    pixels = [np.asarray(Image.open(tmp_path / f"{n}.png").convert("RGB")) for n in ("one", "two")]
    assert pixels[0].shape == (525, 750, 3)  # 3.5 x 5 inches at 150 dots.
    blue, orange = (31, 119, 180), (255, 127, 14)  # Matplotlib's first two colours.
    found = [[(p == colour).all(-1).sum() > 200 for colour in (blue, orange)] for p in pixels]
    assert found == [[True, False], [True, True]]


def test_the_order_of_the_rows_does_not_change_the_curve(tmp_path):
    sweep.write_curve(tmp_path / "a.png", ROWS, "guidance", ["seen"])
    sweep.write_curve(tmp_path / "b.png", ROWS[::-1], "guidance", ["seen"])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
