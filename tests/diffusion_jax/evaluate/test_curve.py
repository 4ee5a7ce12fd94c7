"""The curve of a sweep: the numbers and names of its lines, and the figure."""

import io
import re

import pytest
from PIL import Image

from diffusion_jax.evaluate import curve, figures, sweep
from tests import written_sweeps


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A sweep with three points."""
    (read,) = sweep.read_all(written_sweeps.write_run(tmp_path_factory.mktemp("a_run")))
    return read


def with_another_step(one):
    return one._replace(rows=one.rows + [row | {"checkpoint": "7"} for row in one.rows])


def test_the_curve_plots_fid_over_clip_score_in_order_of_guidance(one):
    plot = curve.figure(one)
    (line,) = plot.lines
    assert (plot.x, plot.y) == ("CLIP score", "FID")
    assert (line.x, line.y) == ([0.25, 0.29, 0.31], [20.0, 12.0, 15.5])
    assert (list(line.labels), line.low) == (["1", "2", "4"], [19.0, 11.0, 14.5])
    assert line.high == [21.0, 13.0, 16.5] and line.marked


def test_lines_are_named_by_what_distinguishes_them(one):
    assert [line.name for line in curve.figure(with_another_step(one)).lines] == ["step 2", "step 7"]
    assert [line.name for line in curve.figure(one).lines] == ["step_00000002"]


def test_without_a_frechet_distance_scores_are_plotted_over_guidance(one):
    plot = curve.figure(one._replace(rows=[{k: r[k] for k in r if "fid" not in k} for r in one.rows]))
    (line,) = plot.lines
    assert (plot.x, plot.y, line.x, line.y) == ("guidance", "CLIP score", [1, 2, 4], [0.25, 0.29, 0.31])
    assert not line.labels


def test_seen_and_never_shown_prompts_are_two_lines_of_one_figure(tmp_path):
    (one,) = sweep.read_all(written_sweeps.write_digits(tmp_path))
    plot = curve.figure(one)
    assert plot.x == "share all right (digit, ink, paper)"
    assert plot.y == "Fréchet distance (digits, prompts seen)"
    assert [(line.name, line.x, line.y) for line in plot.lines] == [
        ("all right, prompts seen", [0.9, 0.9], [2, 2]),
        ("all right, prompts never shown", [0.8, 0.8], [2, 2]),
    ]


def test_forty_lines_have_different_colours_and_complete_names():
    lines = [figures.Line(f"line {n} " + "of a long name " * 9, [1, 2], [n, n]) for n in range(40)]
    assert len(set(figures._distinct(40))) == 40
    text = figures.save(figures.Plot(lines, "x", "y"), "svg").decode()
    assert len(set(re.findall(r"stroke: (#[0-9a-f]{6}); stroke-width: 1\.6|(#[0-9a-f]{6})", text))) > 40
    legend = re.findall(r">([^<>]*(?:line \d+|long name)[^<>]*)<", text)
    assert max(map(len, legend)) <= 76 and sum("line" in part for part in legend) == 40


def test_long_names_are_stacked_and_increase_the_height(one):
    (line,) = curve.figure(one).lines

    def height(name, count):
        plot = figures.Plot([line._replace(name=name)] * count, "x", "y")
        with Image.open(io.BytesIO(figures.save(plot, "png"))) as image:
            return image.size[1]

    assert height("short", 4) == height("short", 1) < height("a name of 40 letters" * 2, 4)


def test_saving_a_figure_twice_gives_the_same_bytes(one):
    saved = [figures.save(curve.figure(one), "svg") for _ in range(2)]
    assert saved[0] == saved[1]
    assert figures.save(curve.figure(one), "pdf")[:5] == b"%PDF-"
