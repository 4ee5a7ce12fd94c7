"""The web page in a real Chromium, compared with the commands."""

import io
import json
import re
import shutil
import urllib.request

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.evaluate import sweep
from diffusion_jax.files import sheets
from diffusion_jax.web import jobs
from tests import pages
from tests.imagen_jax import commands, test_cascade
from tests.pages import draw, drawn

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow
expect = playwright.expect
expect.set_options(timeout=pages.PATIENCE)
enlarger = test_cascade.enlarger


@pytest.fixture(scope="module")
def trained(trained, tmp_path_factory):
    """The run without evaluations of other tests."""
    others = shutil.ignore_patterns("evaluation", "report.html")
    return shutil.copytree(trained, tmp_path_factory.mktemp("of_web") / "run", ignore=others)


@pytest.fixture(scope="module")
def address(trained, tmp_path_factory):
    """The address of the page for a run with a sweep of two averages at two scales."""
    folder = trained / "evaluation" / "both"
    folder.mkdir(parents=True)
    rows = [
        {"guidance": g, "checkpoint": 3, "ema": ema, "fid": 9 + g, "fid_low": 8, "fid_high": 12}
        for ema in ("ema", "raw")
        for g in (1.0, 3.0)
    ]
    sweep.write_table(folder / sweep.TABLE, rows)
    for n, row in enumerate(rows):
        pixels = np.full((8, 8, 3), 40 * n, np.uint8)
        sheets.write_png(folder / sweep.sheet_name(row, several=True), pixels)
    with pages.served("imagen_jax.web", trained, folder=tmp_path_factory.mktemp("web")) as found:
        yield found


@pytest.fixture
def page(browser, address):
    with pages.opened(browser, address) as opened:
        yield opened


@pytest.mark.gate
def test_the_page_and_its_links_draw_the_same_bytes_as_the_command(page, trained, tmp_path):
    draw(page, "a <b>red</b> seven", guidance=3, steps=3)
    images = drawn(page)
    assert page.locator("#pictures b").count() == 0  # The prompt is shown as text, not as HTML.
    prompted = ("--prompt=a <b>red</b> seven", "--num_images=2", "--guidance=3", "--steps=3")
    commands.succeed("sample", f"--workdir={trained}", *prompted, f"--out={tmp_path}")
    assert images == [(tmp_path / f"seed_{n:06}.png").read_bytes() for n in (0, 1)]
    page.reload()
    assert drawn(page) == images
    page.locator(".picture").nth(1).click()
    expect(page.locator("dialog pre")).to_contain_text("imagen_jax.sample")
    link = page.locator("dialog a").first.get_attribute("href")
    other = page.context.new_page()
    other.goto(link)
    assert drawn(other) == images[1:]
    other.close()


def test_a_tab_waits_for_another_tabs_job_until_it_is_cancelled(page, address):
    draw(page, count=jobs.PICTURES, steps=1000)  # Would take minutes, but is cancelled.
    other = page.context.new_page()
    other.goto(address)
    expect(other.locator("#field-steps")).to_be_visible()
    draw(other, count=1, steps=3)
    expect(other.locator("#status")).to_have_text("Waiting for 1 earlier job")
    expect(page.locator("#status")).to_have_text(re.compile("noise level"))
    look = page.locator("#pictures img").first
    assert look.get_attribute("src").startswith("data:image/png")
    page.click("#cancel")
    expect(page.locator("#status")).to_have_text(re.compile("^Cancelled"))
    assert len(drawn(other)) == 1
    other.close()


def test_clicking_a_point_of_a_sweep_shows_its_pictures_and_sets_the_form(page, address):
    page.click("#tab-sweeps")
    expect(page.locator("svg .hit")).to_have_count(4)
    assert page.locator(".legend li").all_inner_texts() == ["ema", "raw"]
    page.locator("svg .hit").nth(3).click()
    expect(page.locator("#point h2")).to_have_text("run, step 3, raw, guidance 3")
    expect(page.locator("#point")).to_contain_text("12 (8 to 12)")
    source = page.locator("#point img").evaluate("image => image.src")
    sheet = np.asarray(Image.open(io.BytesIO(urllib.request.urlopen(source).read())))
    assert (sheet == 120).all()
    page.click("#point button")
    expect(page.locator("#field-guidance")).to_have_value("3.0")
    assert page.input_value("#ema") == "raw"


def test_the_training_tab_shows_newly_logged_steps(page, trained):
    page.click("#tab-training")
    expect(page.locator("#curves figcaption").first).to_have_text("Loss")
    before = page.locator("#runs span").first.inner_text()
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    with (trained / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(last | {"step": last["step"] + 7}) + "\n")
    expect(page.locator("#runs span").first).not_to_have_text(before)
    expect(page.locator("#runs span").first).to_contain_text(f"step {last['step'] + 7} of")


def test_the_page_can_be_used_with_the_keyboard(page):
    page.focus("#prompts")
    page.keyboard.press("Control+A")
    page.keyboard.type("a blue one on black paper")
    page.fill("#count", "1")
    page.focus("#prompts")
    page.keyboard.press("Control+Enter")
    drawn(page)
    page.focus(".picture")
    page.keyboard.press("Enter")
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).not_to_be_visible()
    page.focus("#tab-draw")
    page.keyboard.press("ArrowRight")
    expect(page.locator("svg .hit")).to_have_count(4)
    page.locator("svg .hit").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#point h2")).to_contain_text("guidance 1")


def test_the_page_fits_the_width_of_a_phone(page):
    page.set_viewport_size({"width": 390, "height": 844})
    draw(page, count=3)
    drawn(page)
    for tab, selector in (("draw", ".picture"), ("sweeps", "svg .hit"), ("training", "#curves svg")):
        page.click(f"#tab-{tab}")
        expect(page.locator(selector).first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390, tab
    page.click("#tab-draw")
    for top in ("0", "document.documentElement.scrollHeight"):  # Draw stays in view.
        page.evaluate(f"window.scrollTo(0, {top})")
        box = page.locator("#draw").bounding_box()
        assert box and box["y"] > 700 and box["y"] + box["height"] <= 844


def test_the_page_of_a_cascade_draws_like_the_sample_command(browser, trained, enlarger, tmp_path):
    stages = f"{trained},{enlarger}"
    with (
        pages.served("imagen_jax.web", stages, folder=tmp_path / "web") as address,
        pages.opened(browser, address) as page,
    ):
        expect(page.locator("#checkpoint")).to_be_hidden()  # Each stage has its own field.
        for name, values in {"steps": (2, 3), "guidance": (3, 1.5)}.items():
            for stage, value in zip((trained, enlarger), values, strict=True):
                field = page.get_by_label(f"{name} of {stage.name}", exact=True)
                field.fill(str(value))
        draw(page)
        larger = drawn(page)
        page.locator(".picture").first.click()
        expect(page.locator("dialog img")).to_have_count(2)
        both = pages.files(page, "dialog img")
        of_command = pages.of_command(page, tmp_path / "two", "--all_sizes", "--num_images=2")
        alone = pages.of_command(page, tmp_path / "alone")["seed_000000.png"]
        page.keyboard.press("Escape")
        page.click("#tab-training")
        names = page.locator("#runs strong")
        expect(names).to_have_text(["run", enlarger.name])
        page.click("#tab-sweeps")
        expect(page.locator("#sweep-plots")).to_contain_text("There are no sweeps yet")
    assert both == [of_command["seed_000000_16.png"], of_command["seed_000000.png"]]
    assert larger == [both[1], of_command["seed_000001.png"]]
    first, second, alone = (np.int16(Image.open(io.BytesIO(png))) for png in (*larger, alone))
    # The difference in grey levels.
    assert np.abs(alone - first).max() <= 1 < np.abs(first - second).max()
    assert [Image.open(io.BytesIO(png)).size for png in both] == [(16, 16), (64, 64)]


def test_pictures_edited_on_the_page_have_the_same_bytes_as_with_the_command(browser, trained, enlarger, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    with (
        pages.served("imagen_jax.web", f"{trained},{enlarger}", folder=tmp_path / "web") as address,
        pages.opened(browser, address) as page,
    ):
        page.click("#edit summary")
        page.set_input_files("#picture", tmp_path / "photo.png")
        page.locator("#canvas").scroll_into_view_if_needed()
        page.locator("#canvas").click()  # This paints a dot in the middle.
        drawings = {}
        for use, flags in (
            ("over", "--mask=mask.png --strength=0.5"),
            ("enlarge", "--low_res="),
            ("over again", "--mask=mask.png --strength=0.5"),
        ):
            page.select_option("#use", use.partition(" ")[0])
            if use == "over":
                page.fill("#strength", "0.5")
            draw(page, count=1)
            (png,) = drawn(page)
            page.locator(".picture").click()
            expect(page.locator("dialog pre")).to_contain_text(flags)
            assert pages.of_command(page, tmp_path / use) == {"seed_000000.png": png}
            page.keyboard.press("Escape")
            drawings[use] = np.asarray(Image.open(io.BytesIO(png)))
    same = (drawings["over"] == pixels).all(-1)
    assert same[:8].all() and not same[30:34, 30:34].any()  # Only the painted dot is redrawn.
    assert drawings["enlarge"].shape == (64, 64, 3)
    assert (drawings["over again"] == drawings["over"]).all()  # The paint is still there.
