"""The page as one file, which a real browser shows without a server."""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.evaluate import sweep
from diffusion_jax.evaluate.mlperf import rcp
from diffusion_jax.files import sheets
from diffusion_jax.logs import run_log
from diffusion_jax.web import frozen, results
from tests import pages, written_sweeps

SHARE = "share all right (digit, ink, paper)"
DISTANCE = "Fréchet distance (digits, prompts seen)"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return written_sweeps.write_run(tmp_path_factory.mktemp("runs") / "a_run")


@pytest.fixture
def show(browser, tmp_path):
    """Return show(html), which opens a page as a file, and checks that it requests nothing else."""
    urls, errors = [], []
    opened = browser.new_page(viewport={"width": 1200, "height": 900})
    opened.set_default_timeout(pages.PATIENCE)
    opened.on("request", lambda request: urls.append(request.url))
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text))

    def show(html, view="sweeps"):
        page = tmp_path / f"page_{len(list(tmp_path.glob('page_*')))}.html"
        page.write_text(html)
        opened.goto(f"{page.as_uri()}#{view}")
        opened.locator(f"#view-{view} figure").first.wait_for()
        return opened

    yield show
    opened.close()
    assert errors == []
    own_urls = ("data:", f"{tmp_path.as_uri()}/page_")
    assert [url for url in urls if not url.startswith(own_urls)] == []


def embedded(html):
    """Return {path: JSON} that the page contains, instead of the responses of a server."""
    (text,) = re.findall('<script type="application/json" id="kept">(.*)</script>', html)
    return json.loads(text)


def captions(page):
    return page.locator(".figures figcaption").all_inner_texts()


def test_a_browser_shows_the_plots_of_a_sweep_its_points_and_their_pictures(run, show):
    page = show(frozen.page([run]))
    assert (page.title(), page.locator("#tab-draw, form").count()) == ("a_run", 0)
    assert captions(page)[:3] == ["FID over CLIP score", "FID", "CLIP score"]
    figure = page.locator(".figures figure").first
    points = figure.locator(".hit").evaluate_all("all => all.map(one => one.ariaLabel)")
    scores = ((1, 20), (2, 12), (4, 15.5))
    assert points == [f"step 2, ema, guidance {g}: FID {fid} ({fid - 1} to {fid + 1})" for g, fid in scores]
    ends = lambda name: figure.locator(".dot").evaluate_all(f"all => all.map(e => +e.getAttribute('{name}'))")
    (a, b, c), (d, e, f) = ends("cx"), ends("cy")
    assert (b - a) / (c - a) == pytest.approx(0.04 / 0.06) and (f - d) / (e - d) == pytest.approx(4.5 / 8)
    assert figure.locator("g:not(.axis) > text").all_text_contents() == ["1", "2", "4"]
    page.get_by_role("button", name="2", exact=True).click()
    assert page.locator("#point h2").inner_text() == "a_run, step 2, ema, guidance 2"
    assert "12 (11 to 13)" in page.locator("#point").inner_text()
    assert page.locator("#point button").count() == 0  # There is no server to sample.
    for n, colour in enumerate(((0, 200, 0), (200, 0, 200))):
        shot = page.locator("#point img").nth(n).screenshot()
        middle = np.asarray(Image.open(io.BytesIO(shot)).convert("RGB"))[20:-20, 20:-20]
        assert (middle == colour).all()
    page.locator("#point summary").click()
    assert "a <stand-in>" in page.locator("#point").inner_text()


def test_a_browser_shows_the_training_curves(run, show):
    page = show(frozen.page([run]), "training")
    assert captions(page) == ["Loss", "Images per second"]
    assert page.locator("#curves .note").all_inner_texts() == ["Median: 1", "Median: 100"]
    assert page.locator("#runs").inner_text().endswith("finished")
    page.focus("#tab-training")
    page.keyboard.press("ArrowLeft")
    page.locator("#view-sweeps .hit").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#point h2").inner_text().endswith("guidance 1")


def test_legends_name_the_differing_settings_and_the_reference_band(tmp_path, show):
    run = written_sweeps.write_run(tmp_path / "run", (2, 7))
    page = show(frozen.page([run], [rcp.read_band()]))
    legends = [figure.locator(".legend li").all_inner_texts() for figure in page.locator(".figures figure").all()]
    assert legends == [["step 2", "step 7", "MLPerf reference runs"], *[["step 2", "step 7"]] * 2]
    assert page.locator("svg .band").count() == 2  # One in the plot, one in the legend.
    page.select_option("#sweep-y", "CLIP score")
    assert captions(page)[:1] == ["CLIP score"] and page.locator("#sweep-plots figure").count() == 1


def test_a_sweep_over_settings_has_a_column_for_each_axis(tmp_path, show):
    """Checkpoint, average and each axis are columns, and each point has its own pictures."""
    folder = tmp_path / "evaluation" / "both"
    folder.mkdir(parents=True)
    row = {"guidance": 2.0, "ema": "raw", "fid": 9.0}
    rows = [{**row, "checkpoint": step, "sampler.steps": steps} for step in (2, 4) for steps in ("10", "20")]
    sweep.write_table(folder / sweep.TABLE, rows)
    for n, row in enumerate(rows):
        pixel = np.full((1, 1, 3), n, np.uint8)
        sheets.write_png(folder / sweep.sheet_name(row, several=True), pixel)
    (one,) = results.sweeps([("a", one) for one in sweep.read_all(tmp_path)], str)["sweeps"]
    pictures = {point["label"]: np.asarray(Image.open(point["sheet"]))[0, 0, 0] for point in one["points"]}
    assert pictures == {f"step {s}, raw, steps {n}": i for i, (s, n) in enumerate([(2, 10), (2, 20), (4, 10), (4, 20)])}
    page = show(frozen.page([tmp_path]))
    head = page.locator("#tables thead th").all_inner_texts()
    assert head == ["guidance", "checkpoint", "average", "steps", "FID"]
    last = page.locator("#tables tbody tr").last.locator("th, td").all_inner_texts()
    assert last == ["2", "4", "raw", "20", "9"]
    assert page.locator(".legend li").all_inner_texts() == [f"step {s}, steps {n}" for s in (2, 4) for n in (10, 20)]


def test_scores_of_seen_and_held_out_prompts_share_plots(tmp_path, show):
    runs = [written_sweeps.write_digits(tmp_path / name) for name in "ab"]
    page = show(frozen.page(runs[:1]))
    assert captions(page)[:3] == [f"{DISTANCE} over {SHARE}", DISTANCE, SHARE]
    names = ["all right, prompts seen", "all right, prompts never shown"]
    assert page.locator("figure").first.locator(".legend li").all_inner_texts() == names
    assert "Scoring took at most 2 % of the time." in page.locator("#tables").inner_text()
    names = [f"{run}: step_2, {name}" for name in names for run in "ab"]
    assert show(frozen.page(runs)).locator("figure").first.locator(".legend li").all_inner_texts() == names


def test_the_page_lists_scores_that_cannot_be_compared(tmp_path, show):
    cards = {"a": {}, "b": {"n": 50}, "c": {"seed": 3}}
    one, other, alike = (written_sweeps.write_digits(tmp_path / name, **card) for name, card in cards.items())
    page = show(frozen.page([one, other]))
    assert page.locator("#unlike").inner_text() == "Not comparable. digits: n differs (40, 50)"
    page.select_option("#sweep", "a: step_2")
    assert page.locator("#unlike").inner_text() == ""
    assert embedded(frozen.page([one, alike]))["/api/sweeps"]["unlike"] == []


def test_a_browser_shows_how_each_start_used_its_time_and_which_run_it_continues(tmp_path, show):
    entry = {"start": "2026-01-01T00:00:00+00:00", "first_step": 0, "config": {"batch_size": 8}}
    first = {**entry, "seconds": {"compiling": 20.0, "saving": 10.0}}
    second = {"start": "2026-01-01T01:01:30+00:00", "first_step": 10, "seconds": {"compiling": 20.0, "repeated": 30.0}}
    entries = [first, entry | second]
    lineage = {"run": "runs/a", "step": 10, "fingerprint": ""}
    manifest = json.dumps({"continued_from": lineage, "runs": entries})
    (tmp_path / run_log.MANIFEST).write_text(manifest)
    lines = [run_log.metrics_line(step, {"loss": 1.0, "images_per_second": 2.0}) for step in (5, 10, 15)]
    (tmp_path / run_log.METRICS).write_text("".join(lines))
    page = show(frozen.page([tmp_path]), "training")
    assert "continues runs/a@10" in page.locator("#runs").inner_text()
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#times tr").all()]
    assert rows == [
        ["start (UTC)", "after step", "goodput", "steps", "compiling", "saving", "repeated", "not running"],
        ["2026-01-01 00:00", "0 to 10", "57.1 %", "40.0 s", "20.0 s", "10.0 s", "", ""],
        ["2026-01-01 01:01", "10 to 15", "28.6 %", "20.0 s", "20.0 s", "", "30.0 s", "0:59:50"],
        ["total", "", "42.9 %", "0:01:00", "40.0 s", "10.0 s", "30.0 s", "0:59:50"],
    ]
    page.set_viewport_size({"width": 390, "height": 800})
    heights = {cell.bounding_box()["height"] for cell in page.locator("#times th, #times td").all()}
    assert len(heights) <= 2 and max(heights) < 50  # Every cell is one line; the table scrolls.


def test_long_training_curves_are_averaged_over_neighbouring_steps(tmp_path):
    lines = [run_log.metrics_line(s, {"loss": float(s % 2)}) for s in range(1, 601)]
    (tmp_path / run_log.METRICS).write_text("".join(lines) + run_log.metrics_line(601, {}))
    (run,) = embedded(frozen.page([tmp_path]))["/api/training"]["runs"]
    steps, losses = zip(*run["curves"]["loss"], strict=True)
    assert len(steps) == 300 and set(losses) == {0.5} and steps[0] == 1.5


def test_of_many_sample_sheets_a_subset_from_first_to_last_is_included(tmp_path):
    (tmp_path / run_log.METRICS).write_text(run_log.metrics_line(40, {"loss": 1.0}))
    for step in range(1, 41):
        path = tmp_path / "samples" / f"step_{step:08}.png"
        path.parent.mkdir(exist_ok=True)
        sheets.write_png(path, np.full((1, 1, 3), step, np.uint8))
    (run,) = embedded(frozen.page([tmp_path]))["/api/training"]["runs"]
    assert [step for step, _ in run["samples"]] == [*range(1, 41, 4), 40]
    live = results.training({"a": [str(tmp_path)]}, str)["runs"][0]["samples"]
    assert [step for step, _ in live] == list(range(1, 41))


def test_pictures_too_large_for_the_page_become_small_copies_that_link_to_their_files(tmp_path, show, monkeypatch):
    run = tmp_path / "a run#1"
    path = run / "samples" / "step_00000040.png"
    path.parent.mkdir(parents=True)
    (run / run_log.METRICS).write_text(run_log.metrics_line(40, {"loss": 1.0}))
    noise = np.random.default_rng(0).integers(0, 256, (500, 2000, 3), np.uint8)
    sheets.write_png(path, noise)
    (path.parent / "step_00000020.png").write_bytes(b"damaged")
    whole = frozen.page([run], folder=tmp_path)
    monkeypatch.setattr(frozen, "_MAX_BYTES", 2**20)
    page = frozen.page([run], folder=tmp_path)
    assert len(whole) > 3e6 and len(page) < 2**18
    (one,) = embedded(page)["/api/training"]["runs"]
    copy, _, name = one["samples"][1][1].partition("#")
    content = base64.b64decode(copy.removeprefix("data:image/jpeg;base64,"))
    small = Image.open(io.BytesIO(content))
    assert (small.size, name) == ((640, 160), "a%20run%231/samples/step_00000040.png")
    assert abs(np.asarray(small).mean() - noise.mean()) < 2  # JPEG rounds by a few grey levels.
    link = show(page, "training").locator("#over-time a")
    assert link.evaluate("a => a.href") == path.as_uri()
    image = link.locator("img")
    assert image.evaluate("i => [i.naturalWidth, i.naturalHeight]") == [640, 160]


def test_the_file_has_no_links_and_escapes_html(run):
    text = frozen.page([run])
    assert not re.search(r"(src|href)=\"(?!data:|#)", text) and "import " not in text
    assert r"a \u003cstand-in>" in text and "<stand-in>" not in text
