"""The page in a real Chromium: what people do with it, from the command to a picture's bytes."""

import io
import json
import re
import shutil
import time
import urllib.request

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.evaluate import sweep
from diffusion_jax.machine import sheets
from tests.imagen_jax import commands

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt install chromium"),
]
PROMPT = "a red seven on gray paper"
expect = playwright.expect
expect.set_options(timeout=120_000)


@pytest.fixture(scope="module")
def address(trained, tmp_path_factory):
    """The page's, of a run with a sweep of two averages at two scales."""
    folder = trained / "evaluation" / "both"
    folder.mkdir(parents=True)
    rows = [
        {"guidance": g, "checkpoint": 3, "ema": ema, "fid": 9 + g, "fid_low": 8, "fid_high": 12}
        for ema in ("ema", "raw") for g in (1.0, 3.0)
    ]  # fmt: skip
    sweep.write_table(folder / sweep.TABLE, rows)
    for n, row in enumerate(rows):
        pixels = np.full((8, 8, 3), 40 * n, np.uint8)
        sheets.write_png(folder / sweep.sheet_name(row, several=True), pixels)
    out = tmp_path_factory.mktemp("web")
    process = commands.start(
        "web", f"--workdir={trained}", "--port=0", devices=1, outputs=(out / "out", out / "err")
    )
    for _ in range(1200):
        said = (out / "out").read_text() if (out / "out").exists() else ""
        found = re.search(r"open (http://\S+)", said)
        if found or not process.is_alive():
            break
        time.sleep(0.1)
    assert found, (out / "err").read_text()
    yield found[1]
    process.terminate()
    process.join()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, address):
    errors = []
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    opened = context.new_page()
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda request: errors.append(request.url) if not (
        request.url.startswith((address, "data:"))) else None)  # fmt: skip
    opened.goto(address)
    expect(opened.locator("#field-steps")).to_be_visible()
    yield opened
    context.close()
    assert errors == []


def draw(page, prompt=PROMPT, count=2, **fields):
    page.fill("#prompts", prompt)
    page.fill("#count", str(count))
    for name, value in fields.items():
        page.fill(f"#field-{name}", str(value))
    page.click("#draw")


def drawn(page):
    """The bytes of the pictures, once all are there."""
    expect(page.locator("#status")).to_have_text(re.compile(r"^\d+ pictures?$"))
    sources = page.locator("#pictures img").evaluate_all("images => images.map(i => i.src)")
    return [urllib.request.urlopen(source).read() for source in sources]


def test_the_pages_pictures_are_the_commands_bytes_and_a_link_draws_them_again(
    page, trained, tmp_path, browser, address
):
    draw(page, "a <b>red</b> seven", guidance=3, steps=3)
    images = drawn(page)
    assert page.locator("#pictures b").count() == 0  # A prompt is text.
    ended = commands.run("sample", f"--workdir={trained}", "--prompt=a <b>red</b> seven",
                         "--num_images=2", "--guidance=3", "--steps=3", f"--out={tmp_path}",
                         devices=1)  # fmt: skip
    assert ended.code == 0, ended.err
    assert images == [(tmp_path / f"seed_{n:06}.png").read_bytes() for n in (0, 1)]
    page.reload()
    assert drawn(page) == images
    page.locator(".picture").nth(1).click()
    expect(page.locator("dialog pre")).to_contain_text("imagen_jax.sample")
    link = page.locator("dialog a").first.get_attribute("href")
    other = browser.new_page()
    other.goto(link)
    assert drawn(other) == images[1:]
    other.close()


def test_two_tabs_wait_for_each_other_and_one_cancels(page, browser, address):
    draw(page, count=40, steps=1000)
    other = browser.new_page()
    other.goto(address)
    expect(other.locator("#field-steps")).to_be_visible()
    draw(other, count=1, steps=3)
    expect(other.locator("#status")).to_have_text("Waiting: 1 before this")
    expect(page.locator("#status")).to_have_text(re.compile("noise level"))
    look = page.locator("#pictures img").first
    assert look.get_attribute("src").startswith("data:image/png")
    page.click("#cancel")
    expect(page.locator("#status")).to_have_text(re.compile("^Cancelled"))
    assert len(drawn(other)) == 1
    other.close()


def test_a_grid_has_the_pictures_of_its_settings(page):
    page.click("#grid summary")
    for axis, name, values in (("x", "guidance", "1; 4"), ("y", "steps", "2; 3")):
        page.select_option(f"#{axis}", name)
        page.fill(f"#{axis}-values", values)
    draw(page, count=1)
    grid = drawn(page)
    assert len(set(grid)) == 4
    assert page.locator("thead th").all_inner_texts() == ["guidance 1", "guidance 4"]
    assert page.locator("tbody th").all_inner_texts() == ["steps 2", "steps 3"]
    page.select_option("#x", "")
    page.select_option("#y", "")
    draw(page, count=1, guidance=4, steps=2)
    assert drawn(page) == [grid[1]]


def test_a_sweeps_point_shows_its_pictures_and_draws_like_it(page, address):
    page.click("#tab-sweeps")
    expect(page.locator("svg .hit")).to_have_count(4)
    assert page.locator(".legend li").all_inner_texts() == ["step 3, ema", "step 3, raw"]
    page.locator("svg .hit").nth(3).click()
    expect(page.locator("#point h2")).to_have_text("run, step 3, raw, guidance 3")
    expect(page.locator("#point")).to_contain_text("12 (8 to 12)")
    source = page.locator("#point img").evaluate("image => image.src")
    sheet = np.asarray(Image.open(io.BytesIO(urllib.request.urlopen(source).read())))
    assert (sheet == 120).all()
    page.click("#point button")
    expect(page.locator("#field-guidance")).to_have_value("3.0")
    assert page.input_value("#ema") == "raw"


def test_a_running_training_shows_its_next_lines(page, trained):
    page.click("#tab-training")
    expect(page.locator("#curves figcaption").first).to_have_text("Loss")
    before = page.locator("#runs span").first.inner_text()
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    with (trained / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(last | {"step": last["step"] + 7}) + "\n")
    expect(page.locator("#runs span").first).not_to_have_text(before)
    expect(page.locator("#runs span").first).to_contain_text(f"step {last['step'] + 7} of")


def test_everything_is_reached_by_the_keyboard(page):
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


def test_a_phone_shows_all_of_it_without_scrolling_sideways(page):
    page.set_viewport_size({"width": 390, "height": 844})
    draw(page, count=3)
    drawn(page)
    for tab, there in (("draw", ".picture"), ("sweeps", "svg .hit"), ("training", "#curves svg")):
        page.click(f"#tab-{tab}")
        expect(page.locator(there).first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390, tab


def test_a_mistake_is_said(page):
    draw(page, sampler="huen")
    expect(page.locator("#status")).to_have_text("sampler.name is 'huen': did you mean 'heun'?")
    draw(page, sampler="ddim", steps=2000)
    expect(page.locator("#status")).to_have_text("steps is 2000: here it is 1,000 at most")
