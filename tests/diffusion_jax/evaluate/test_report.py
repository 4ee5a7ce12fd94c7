"""The page: its figures' numbers, and how a real browser shows it."""

import io
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.evaluate import figures, report, sweep
from diffusion_jax.machine import sheets
from diffusion_jax.metrics.cards import Scored

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run with three points of a sweep, a sheet of green pictures, and two training steps."""
    path = tmp_path_factory.mktemp("a_run")
    lines = [{"step": s, "loss": 1.0 / s, "images_per_second": 100.0} for s in (1, 2)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = path / "evaluation" / "step_00000002"
    folder.mkdir(parents=True)
    rows = [
        {"guidance": g, "checkpoint": 2, "ema": "ema", "fid": fid, "fid_low": fid - 1,
         "fid_high": fid + 1, "clip_score": clip}
        for g, fid, clip in ((4.0, 15.5, 0.31), (1.0, 20.0, 0.25), (2.0, 12.0, 0.29))
    ]  # fmt: skip
    sweep.write_table(folder / sweep.TABLE, rows)
    for row in rows:
        card = {"extractor": "a <stand-in>", "n": 30, "guidance": row["guidance"]}
        point = f"guidance_{row['guidance']:g}"
        sweep.write_scored(folder / sweep.SCORED, point, {"fid": Scored({"fid": row["fid"]}, card)})
    green = np.zeros((64, 64, 3), np.uint8) + np.array([0, 200, 0], np.uint8)
    sheets.write_png(folder / sweep.sheet_name({"guidance": 2.0}), green)
    return path


def test_the_trade_off_goes_through_the_points_by_guidance(workdir):
    (line,) = report.trade_off([report.read_run(workdir)], "clip_score", "fid")
    assert (line.x, line.y) == ([0.25, 0.29, 0.31], [20.0, 12.0, 15.5])
    assert (list(line.labels), line.low) == (["1", "2", "4"], [19.0, 11.0, 14.5])
    assert line.hover[1] == "guidance 2\nFID 12 (11 to 13)\nCLIP score 0.29"


def test_points_of_several_checkpoints_are_lines_of_their_own(workdir):
    run = report.read_run(workdir)
    (evaluation,) = run.evaluations
    more = [row | {"checkpoint": "7"} for row in evaluation.rows]
    run = run._replace(evaluations=[evaluation._replace(rows=evaluation.rows + more)])
    names = [line.name for line in report.trade_off([run], "clip_score", "fid")]
    assert names == ["step_00000002, step 2, ema", "step_00000002, step 7, ema"]


def digit_sweep(name, **card):
    """A sweep of two points as the quick start's, and its card."""
    row = {"checkpoint": "2", "ema": "ema", "features_share_of_time": "0.02"}
    scores = {"fd_digits": "2", "seen_prompt_accuracy": "0.9", "heldout_prompt_accuracy": "0.8"}
    rows = [row | scores | {"guidance": guidance} for guidance in ("1", "3")]
    scored = Scored({}, {"extractor": "digits", "n": 40, **card})
    sweeps = [report.SweepResult("step_2", rows, {"guidance_1_digits": scored}, {})]
    return report.RunResult(name, [], sweeps)


def test_names_in_a_figure_say_what_tells_its_lines_apart(workdir):
    run = report.read_run(workdir)
    (evaluation,) = run.evaluations
    more = [row | {"checkpoint": "7"} for row in evaluation.rows]
    run = run._replace(evaluations=[evaluation._replace(rows=evaluation.rows + more)])
    plot = report.main_figure(run, evaluation.name)
    assert [line.name for line in plot.lines] == ["step 2", "step 7"]
    alone = report.main_figure(report.read_run(workdir), evaluation.name)
    assert [line.name for line in alone.lines] == ["step_00000002"]


def test_rows_of_a_sweep_of_settings_are_told_apart(tmp_path):
    """Checkpoint, average and each axis are columns, and each point keeps its pictures."""
    folder = tmp_path / "evaluation" / "both"
    folder.mkdir(parents=True)
    rows = [
        {"guidance": 2.0, "checkpoint": step, "ema": "raw", "sampler.steps": steps, "fid": 9.0}
        for step in (2, 4) for steps in ("10", "20")
    ]  # fmt: skip
    sweep.write_table(folder / sweep.TABLE, rows)
    for n, row in enumerate(rows):
        pixel = np.full((1, 1, 3), n, np.uint8)
        sheets.write_png(folder / sweep.sheet_name(row, several=True), pixel)
    run = report.read_run(tmp_path)
    kept = {
        name: np.asarray(Image.open(p))[0, 0, 0] for name, p in run.evaluations[0].sheets.items()
    }
    assert kept == {f"2, step {s}, raw, steps {n}": i
                    for i, (s, n) in enumerate([(2, 10), (2, 20), (4, 10), (4, 20)])}  # fmt: skip
    made = report._table("both", run.evaluations[0].rows)
    assert made["labels"] == ["guidance", "checkpoint", "average", "steps", "FID"]
    assert [cell["value"] for cell in made["rows"][3]] == ["2", "4", "raw", "20", "9"]
    assert len(report.plots([run])[0].lines) == 4


def test_no_two_lines_share_a_colour_and_long_names_are_whole():
    lines = [figures.Line(f"line {n} " + "of a long name " * 9, [1, 2], [n, n]) for n in range(40)]
    assert len(set(figures._distinct(40))) == 40
    text = figures.svg(figures.Plot(lines, "x", "y"))
    assert (
        len(set(re.findall(r"stroke: (#[0-9a-f]{6}); stroke-width: 1\.6|(#[0-9a-f]{6})", text)))
        > 40
    )
    legend = re.findall(r">([^<>]*(?:line \d+|long name)[^<>]*)<", text)
    assert max(map(len, legend)) <= 76 and sum("line" in part for part in legend) == 40


def test_long_names_stand_below_each_other_and_add_to_the_height(workdir):
    (line,) = report.trade_off([report.read_run(workdir)], "clip_score", "fid")

    def height(name, count):
        plot = figures.Plot([line._replace(name=name)] * count, "x", "y")
        with Image.open(io.BytesIO(figures.save(plot, "png"))) as image:
            return image.size[1]

    assert height("short", 4) == height("short", 1) < height("a name of 40 letters" * 2, 4)


def test_prompts_seen_and_never_shown_share_figures():
    runs = [digit_sweep("a")]
    plots = report.plots(runs)
    share = "share all right (digit, ink, paper)"
    distance = "Fréchet distance (digits, prompts seen)"
    axes = [(share, distance), ("guidance", share), ("guidance", distance)]
    assert sorted((p.x, p.y) for p in plots) == sorted(axes)
    seen, held_out = plots[0].lines
    assert (seen.name, held_out.name) == (
        "all right, prompts seen",
        "all right, prompts never shown",
    )
    assert (seen.x, held_out.x, seen.y) == ([0.9, 0.9], [0.8, 0.8], [2, 2])
    two = report.plots([digit_sweep("a"), digit_sweep("b")])
    assert [line.name for line in two[0].lines][2:] == [
        "a step_2, all right, prompts never shown", "b step_2, all right, prompts never shown",
    ]  # fmt: skip


def test_the_page_says_which_scores_cannot_be_compared():
    one, other = digit_sweep("a"), digit_sweep("b", n=50)
    assert "Not comparable. digits: n differs (40, 50)" in report.page([one, other])
    alike = report.page([one, digit_sweep("b", seed=3)])
    assert "Not comparable" not in alike and "Scoring took 2 % of the time at most." in alike


def test_training_curves_are_means_of_neighbours():
    training = [{"step": s, "loss": float(s % 2)} for s in range(1, 601)] + [{"step": 601}]
    (line,) = [report.training_line(report.RunResult("a", training, []), "loss")]
    assert len(line.x) == 300 and set(line.y) == {0.5} and line.x[0] == 1.5


def test_the_reference_band_holds_the_lowest_and_highest_fid_of_each_clip_score(tmp_path):
    lines = "config,clip,fid\na,0.101,200\na,0.104,180\nb,0.151,90.5\n"
    (tmp_path / "rcp.csv").write_text(lines)
    band = report.read_rcp(tmp_path / "rcp.csv")
    assert (band.x, band.low, band.high) == ([0.1, 0.15], [180, 90.5], [200, 90.5])


def test_the_package_holds_mlperfs_reference_points():
    """They all pass FID 90, MLPerf's target, at CLIP scores from 0.15 to 0.18."""
    assert len(report.RCP.read_text().splitlines()) == 1 + 439
    band = report.read_rcp()
    assert band.low[band.x.index(0.15)] > 90 > band.high[band.x.index(0.18)]


def test_a_figure_is_the_same_bytes_each_time_and_says_its_points(workdir):
    lines = report.trade_off([report.read_run(workdir)], "clip_score", "fid")
    made = [figures.svg(figures.Plot(lines, "CLIP", "FID")) for _ in range(2)]
    assert made[0] == made[1]
    titles = re.findall(r"<title>(.*?)</title>", made[0], re.DOTALL)
    assert titles == list(lines[0].hover)
    assert figures.save(figures.Plot(lines, "x", "y"), "pdf")[:5] == b"%PDF-"


def test_the_page_needs_no_network_and_hides_nothing_it_was_given(workdir):
    text = report.page([report.read_run(workdir)])
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    assert "a &lt;stand-in&gt;" in text and "<stand-in>" not in text
    assert text.count('<td>12 <span class="note">(11 to 13)</span></td>') == 1
    assert "<td>guidance</td><td>1, 2, 4</td>" in text


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds neither metrics\.jsonl nor evaluation"):
        report.read_run(tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt install chromium")
def test_a_browser_shows_curve_text_and_pictures(workdir, tmp_path):
    """The page's own pixels: the curve's blue, the sheet's green, dark text on white."""
    page, shot = tmp_path / "page.html", tmp_path / "shot.png"
    page.write_text(report.page([report.read_run(workdir)]))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,2400",
               f"--screenshot={shot}", page.as_uri()]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    near = lambda colour: (np.abs(pixels - colour).max(-1) < 12).sum()
    assert near((0x2F, 0x6F, 0xB0)) > 1500
    assert near((0, 200, 0)) == 64 * 64
    assert near((0x1C, 0x27, 0x33)) > 500
    assert near((255, 255, 255)) > 0.6 * 1200 * 2400
