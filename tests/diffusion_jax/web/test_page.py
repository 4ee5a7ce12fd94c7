"""The drawing view in a real Chromium, with a model that returns images immediately."""

import contextlib
import io
import json
import re
import threading
import time
import types
import zipfile

import numpy as np
import pytest
import uvicorn
from PIL import Image

from configs import quickstart
from diffusion_jax import runs
from diffusion_jax.draw import input_pictures
from diffusion_jax.draw import model as draw_model
from diffusion_jax.draw.model import Enlarger
from diffusion_jax.text import vocabulary
from diffusion_jax.web import server
from imagen_jax import cascade
from imagen_jax.settings import Sampler
from tests import pages

pytestmark = pytest.mark.slow

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
PROMPTS = ["a cat, noto style", "a fox, noto style"]
TWO_SAMPLERS = ["ddim", "heun(churn=40, s_min=1)"]


class Quick(draw_model.Model):
    """A model whose pixels equal the seed, or the input picture."""

    def __init__(self, *workdirs):
        s = types.SimpleNamespace(sampler=Sampler(), super_resolution=types.SimpleNamespace(aug_sigma=0.1))
        stage = {"step": 0, "settings": s, "encoder": types.SimpleNamespace(name="hashed")}
        self.stages = tuple(types.SimpleNamespace(workdir=str(workdir), **stage) for workdir in workdirs)
        self.options, self.values = cascade.OPTIONS, ({},) * len(workdirs)
        self.vocabulary = vocabulary.of([*PROMPTS, "a panda, noto style"])
        self.drawn = []

    @property
    def enlarger(self):
        return Enlarger(1, 16) if len(self.stages) > 1 else None

    def __repr__(self):
        return "quick"

    def draw(self, prompts, *, seeds, progress, image=None, mask=None, **values):
        if "?" in prompts[0]:
            raise ValueError("the model does not answer questions")
        input_pictures.opened(image, mask)  # Every model reads them so.
        of_seed = [np.full((8, 8, 3), seed % 256, np.uint8) for seed in seeds]
        images = [np.asarray(image.convert("RGB"))] * len(seeds) if image else of_seed
        self.drawn.append((list(prompts), seeds, mask and np.asarray(mask.convert("L")), values))
        if low_res := values.get("low_res"):
            images = [np.asarray(low_res.convert("RGB").resize((32, 32)))] * len(seeds)
        return types.SimpleNamespace(smaller=(), png=lambda n: draw_model.png(images[n]))


@contextlib.contextmanager
def serving(site):
    """Serve a site while the context is open, and yield its address."""
    app = server.app(site, ("127.0.0.1",))
    listener = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=listener.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 120
    while not listener.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.servers[0].sockets[0].getsockname()[1]}/"
    listener.should_exit = True
    listener.force_exit = True
    thread.join(60)


@contextlib.contextmanager
def opened_page(browser, models, **options):
    """Serve models and yield their page."""
    workdirs = {name: [stage.workdir for stage in model.stages] for name, model in models.items()}
    site = server.Site("imagen_jax", models, workdirs)
    with serving(site) as address, pages.opened(browser, address, **options) as page:
        yield page


def picture():
    """Return a red picture as a file to upload."""
    Image.new("RGB", (60, 40), (200, 30, 30)).save(photo := io.BytesIO(), "png")
    return {"name": "a.png", "mimeType": "image/png", "buffer": photo.getvalue()}


def write_run(folder, **changes):
    folder.mkdir()
    config = quickstart.get_config().to_dict() | {"prompts": PROMPTS} | changes
    (folder / runs.CONFIG).write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("page") / "run")
    (folder / "README.md").write_text("# run\n\nThis model draws\nanimals.\n\n| a |\n")
    return Quick(folder)


@pytest.fixture
def page(browser, quick):
    with opened_page(browser, {"run": quick}) as opened:
        yield opened


@pytest.fixture
def both(tmp_path):
    """A cascade of two runs."""
    return Quick(write_run(tmp_path / "base"), write_run(tmp_path / "sr"))


@pytest.mark.gate
def test_the_page_shows_example_prompts_and_the_readme_of_the_model(page):
    expect(page.locator("#prompts")).to_have_value(PROMPTS[0])
    own = ["a cat, noto style", "a fox, noto style", "a panda, noto style"]
    assert page.locator("#chips button").all_inner_texts() == own
    page.locator("#chips button").nth(1).click()
    expect(page.locator("#prompts")).to_have_value(PROMPTS[1])
    page.click("#learned summary")
    expect(page.locator("#card")).to_have_text("This model draws animals.")
    page.fill("#search", "style PAN")
    expect(page.locator("#found button")).to_have_text(["a panda, noto style"])
    page.click("#surprise")
    assert page.input_value("#prompts") in own


@pytest.mark.gate
def test_unknown_words_are_marked_while_typing_and_a_click_replaces_them(page):
    page.fill("#prompts", "a foox, noto style\na kitty")
    expect(page.locator("#unknown mark")).to_have_text(["foox", "kitty"])
    expect(page.locator("#unknown span").first).to_contain_text("I do not know foox; similar: fox")
    page.locator("#unknown button").first.click()
    expect(page.locator("#prompts")).to_have_value("a fox, noto style\na kitty")
    expect(page.locator("#unknown mark")).to_have_text(["kitty"])


@pytest.mark.gate
def test_a_slider_sets_its_number_and_samplers_have_descriptions(page):
    slider = page.get_by_label("steps slider")
    assert slider.input_value() == page.locator("#field-steps").input_value()
    slider.fill("7")
    assert page.locator("#field-steps").input_value() == "7"
    assert "changed" in page.locator("#field-steps").get_attribute("class")
    page.locator("#field-steps").fill("31")
    assert slider.input_value() == "31"
    described = page.locator("#field-sampler-names option[value=ddim]").get_attribute("label")
    assert described == "Sample with DDIM (Song et al. 2021, equation 12)."


@pytest.mark.gate
def test_a_picture_and_a_painted_mask_reach_the_model(page, quick):
    page.click("#edit summary")
    page.set_input_files("#picture", picture())
    canvas = page.locator("#canvas")
    expect(canvas).to_be_visible()
    # A square cut from the middle.
    assert page.evaluate("[canvas.width, canvas.height]") == [40, 40]
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 + 2, box["y"] + box["height"] / 2)
    page.mouse.up()
    page.fill("#strength", "0.5")
    pages.draw(page, "a fox, noto style", count=1)
    (png,) = pages.drawn(page)
    assert (np.asarray(Image.open(io.BytesIO(png))) == (200, 30, 30)).all()
    _, _, mask, values = quick.drawn[-1]
    assert values["strength"] == 0.5 and mask.shape == (40, 40)
    assert mask[20, 20] == 255 and mask[0, 0] == 0
    page.locator(".picture").click()
    expect(page.locator("dialog pre")).to_contain_text("--image=image.png --mask=mask.png --strength=0.5")
    page.keyboard.press("Escape")
    page.click("#remove")
    pages.draw(page, "a fox, noto style", count=1)
    (png,) = pages.drawn(page)
    assert (np.asarray(Image.open(io.BytesIO(png))) == 0).all()


@pytest.mark.gate
@pytest.mark.parametrize("separator", [", ", "; "])
def test_values_to_compare_may_be_separated_by_commas_or_semicolons(page, quick, separator):
    page.click("#grid summary")
    for axis, name, shown in (("x", "guidance", ["1", "2"]), ("y", "sampler", TWO_SAMPLERS)):
        page.select_option(f"#{axis}", name)
        page.fill(f"#{axis}-values", separator.join(shown))
    pages.draw(page, "a cat, noto style", count=1)
    assert len(pages.drawn(page)) == 4
    assert page.locator("thead th").all_inner_texts() == ["guidance 1", "guidance 2"]
    assert page.locator("tbody th").all_inner_texts() == [f"sampler {n}" for n in TWO_SAMPLERS]
    drawn = {(v["guidance"], v["sampler"]) for *_, v in quick.drawn[-4:]}
    assert drawn == {(float(g), sampler) for g in "12" for sampler in TWO_SAMPLERS}
    page.locator(".picture").first.click()  # Empty settings are left out.
    note = page.locator("dialog .note").first.inner_text()
    assert note.startswith("seed 0, ") and "negative prompt" not in note


@pytest.mark.gate
def test_after_a_refusal_the_page_shows_the_reason_and_no_empty_frames(page):
    pages.draw(page, "a fox?", count=4)
    expect(page.locator("#status")).to_have_text("the model does not answer questions")
    expect(page.locator("#pictures")).to_be_empty()
    expect(page.locator("#cancel")).to_be_disabled()


@pytest.mark.gate
def test_on_a_phone_the_first_pictures_are_in_view_while_they_are_drawn(browser, quick):
    with opened_page(browser, {"run": quick}, width=390, height=844) as page:
        expect(page.locator(".keys")).to_be_hidden()  # A phone has no Ctrl.
        pages.draw(page, PROMPTS[0], count=4)
        pages.drawn(page)
        box, above = (page.locator(name).bounding_box() for name in (".picture >> nth=0", "#draw"))
        assert box["y"] > 0 and box["y"] + box["height"] < above["y"]
        page.click("#grid summary")
        page.select_option("#x", "guidance")
        page.fill("#x-values", "1, 2")
        pages.draw(page, PROMPTS[0], count=1)
        pages.drawn(page)
        widths = page.locator(".picture img").evaluate_all("all => all.map(one => one.width)")
        assert len(widths) == 2 and max(widths) < 120  # Each picture fills its cell, not the page.


@pytest.mark.gate
def test_an_empty_prompt_is_drawn_and_all_pictures_can_be_downloaded_together(page, quick):
    pages.draw(page, "", count=2)
    pages.drawn(page)
    assert quick.drawn[-1][0] == ["", ""]
    expect(page.locator("#pictures h2")).to_have_text("Without a prompt")
    with page.expect_download() as download:
        page.click("#download")
    with zipfile.ZipFile(download.value.path()) as archive:
        assert archive.namelist() == ["000__0.png", "001__1.png", "commands.txt"]
        second = np.asarray(Image.open(io.BytesIO(archive.read("001__1.png"))))
        assert (second == 1).all()
        assert "--prompt= --seed=1" in archive.read("commands.txt").decode().replace("''", "")


@pytest.mark.gate
def test_earlier_pictures_are_listed_after_reloading_and_can_be_sampled_again(page, quick):
    for prompt, first in (("a cat, noto style", "5"), ("a fox, noto style", "9")):
        page.fill("#seed", first)
        pages.draw(page, prompt, count=1)
        pages.drawn(page)
        expect(page.locator("#earlier span").first).to_have_text(prompt)
    page.goto(page.url.partition("#")[0])
    page.reload()
    page.click("#history summary")
    expect(page.locator("#earlier span")).to_have_text(["a fox, noto style", "a cat, noto style"])
    page.locator("#earlier a").nth(1).click()
    (png,) = pages.drawn(page)
    assert (np.asarray(Image.open(io.BytesIO(png))) == 5).all()
    assert page.input_value("#prompts") == "a cat, noto style"
    page.click("#forget")
    expect(page.locator("#history")).to_be_hidden()


@pytest.mark.gate
def test_each_stage_of_a_cascade_has_its_own_guidance(browser, both):
    with opened_page(browser, {"base + sr": both}) as page:
        page.get_by_label("guidance of base", exact=True).fill("4")
        page.get_by_label("steps of sr slider").fill("9")
        expect(page.locator("#words")).to_have_text("quick. Changed: steps 30, 9, guidance 4, 7.5")
        pages.draw(page, PROMPTS[0], count=1)
        pages.drawn(page)
        values = both.drawn[-1][-1]
        assert values == {"guidance": (4.0, 7.5), "steps": (30, 9)}
        page.reload()
        expect(page.get_by_label("guidance of base", exact=True)).to_have_value("4")
        expect(page.get_by_label("steps of sr slider")).to_have_value("9")


@pytest.mark.gate
def test_the_second_stage_of_a_cascade_can_enlarge_a_picture(browser, both, tmp_path):
    with opened_page(browser, {"base + sr": both}) as page:
        page.get_by_label("guidance of sr", exact=True).fill("4")
        page.click("#edit summary")
        expect(page.locator("#strength")).to_be_visible()
        page.select_option("#use", "enlarge")
        expect(page.locator("#strength")).to_be_hidden()
        page.set_input_files("#picture", picture())
        expect(page.locator("#editing")).to_contain_text("shrunk to 16x16 pixels")
        pages.draw(page, PROMPTS[0], count=1)
        (png,) = pages.drawn(page)
        assert Image.open(io.BytesIO(png)).size == (32, 32)
        values = both.drawn[-1][-1]
        assert values["low_res"].size == (16, 16) and "strength" not in values
        page.locator(".picture").click()
        command = page.locator("dialog pre").inner_text()
        assert f"--workdir={tmp_path}/sr" in command and f"{tmp_path}/base" not in command
        assert "--guidance=4.0 --low_res=image.png" in command
        # The picture of the second stage is shown.
        expect(page.locator("dialog img")).to_have_count(1)
        page.reload()
        expect(page.locator("#use")).to_have_value("enlarge")
        pages.drawn(page)
        assert both.drawn[-1][-1]["low_res"].size == (16, 16)


@pytest.mark.gate
def test_runs_can_be_hidden_in_the_comparison_of_configs(browser, tmp_path):
    long = tuple(f"a prompt of the number {n}" for n in range(9))
    changes = {"one": {"steps": 7, "prompts": long}, "two": {"steps": 8}, "three": {"steps": 7}}
    models = {name: Quick(write_run(tmp_path / name, **changed)) for name, changed in changes.items()}
    with opened_page(browser, models) as page:
        page.click("#tab-training")
        rows = page.locator("#differing tbody th")
        expect(rows).to_have_text(["prompts", "steps"])
        summary = page.locator("#differing summary")
        expect(summary).to_have_count(1)  # A long value is folded.
        expect(summary).to_have_text(re.compile(r"^a prompt of the number 0; .{50,80} \.\.\.$"))
        page.get_by_label("show two").uncheck()
        expect(page.locator("#differing thead th")).to_have_text(["field", "one", "three"])
        expect(rows).to_have_text(["prompts"])  # Both have 7 steps.
        page.get_by_label("show one").uncheck()
        expect(page.locator("#differing")).to_be_empty()


@pytest.mark.gate
def test_a_run_without_checkpoint_shows_its_training_and_can_be_sampled_later(browser, quick, tmp_path):
    new = write_run(tmp_path / "new", save_every=500)
    site = server.Site("imagen_jax", {}, {"new": [str(new)]}, lambda name: quick)
    with serving(site) as address, browser.new_context() as context:
        page = context.new_page()
        page.goto(address)
        expect(page.locator("#runs")).to_contain_text("new")
        page.click("#tab-draw")
        expect(page.locator("#draw")).to_be_disabled()
        expect(page.locator("#waiting")).to_contain_text("later, at step 500")
        (new / runs.CHECKPOINTS / "500").mkdir(parents=True)
        (new / runs.CHECKPOINTS / "500" / "commit_success.txt").touch()
        expect(page.locator("#draw")).to_be_enabled(timeout=pages.PATIENCE)
        expect(page.locator("#waiting")).to_be_empty()
