"""The drawing view in a real Chromium, with a model that draws at once: hints, edits, waiting."""

import contextlib
import io
import json
import threading
import time
import types

import numpy as np
import pytest
import uvicorn
from PIL import Image

from configs import quickstart
from diffusion_jax import runs
from diffusion_jax.draw import loaded
from diffusion_jax.text import vocabulary
from diffusion_jax.web import server
from imagen_jax import cascade
from imagen_jax.settings import Sampler
from tests import pages

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
PROMPTS = ["a cat, noto style", "a fox, noto style"]


class Quick(loaded.Loaded):
    """Draws pixels that are the seed, or the picture that it draws over."""

    def __init__(self, workdir):
        s = types.SimpleNamespace(
            sampler=Sampler(), super_resolution=types.SimpleNamespace(aug_sigma=0.1)
        )
        encoder = types.SimpleNamespace(name="hashed")
        stage = types.SimpleNamespace(workdir=str(workdir), step=0, settings=s, encoder=encoder)
        self.stages, self.options, self.values = (stage,), cascade.OPTIONS, ({},)
        self.vocabulary = vocabulary.of([*PROMPTS, "a panda, noto style"])
        self.drawn = []

    def __repr__(self):
        return "quick"

    def draw(self, prompts, *, seeds, progress, image=None, mask=None, **values):
        of_seed = [np.full((8, 8, 3), seed % 256, np.uint8) for seed in seeds]
        images = [np.asarray(image.convert("RGB"))] * len(seeds) if image else of_seed
        self.drawn.append((list(prompts), seeds, mask and np.asarray(mask.convert("L")), values))
        return types.SimpleNamespace(images=np.stack(images), smaller=())


@contextlib.contextmanager
def serving(site):
    """The address of a site, which is served as long as this is open."""
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
    site = server.Site("imagen_jax", {"run": quick}, {"run": [quick.stages[0].workdir]})
    with serving(site) as address, pages.opened(browser, address) as opened:
        yield opened


def test_the_page_starts_with_the_models_prompts_and_lists_what_it_can_draw(page):
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


def test_unknown_words_are_marked_while_typing_and_replaced_by_a_click(page):
    page.fill("#prompts", "a foox, noto style\na kitty")
    expect(page.locator("#unknown mark")).to_have_text(["foox", "kitty"])
    expect(page.locator("#unknown span").first).to_contain_text("I do not know foox; similar: fox")
    page.locator("#unknown button").first.click()
    expect(page.locator("#prompts")).to_have_value("a fox, noto style\na kitty")
    expect(page.locator("#unknown mark")).to_have_text(["kitty"])


def test_a_slider_sets_its_number_and_each_sampler_has_a_line(page):
    slider = page.get_by_label("steps slider")
    assert slider.input_value() == page.locator("#field-steps").input_value()
    slider.fill("7")
    assert page.locator("#field-steps").input_value() == "7"
    assert "changed" in page.locator("#field-steps").get_attribute("class")
    page.locator("#field-steps").fill("31")
    assert slider.input_value() == "31"
    described = page.locator("#field-sampler-names option[value=ddim]").get_attribute("label")
    assert described == "Sample with DDIM (Song et al. 2021, equation 12)."


def test_a_picture_and_a_painted_mask_reach_the_model(page, quick):
    photo = io.BytesIO()
    Image.new("RGB", (60, 40), (200, 30, 30)).save(photo, "png")
    page.click("#edit summary")
    page.set_input_files("#picture", {"name": "a.png", "mimeType": "image/png",
                                      "buffer": photo.getvalue()})  # fmt: skip
    canvas = page.locator("#canvas")
    expect(canvas).to_be_visible()
    assert page.evaluate("[canvas.width, canvas.height]") == [40, 40]  # A square out of the middle.
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
    expect(page.locator("dialog pre")).to_contain_text(
        "--image=image.png --mask=mask.png --strength=0.5"
    )
    page.keyboard.press("Escape")
    page.click("#remove")
    pages.draw(page, "a fox, noto style", count=1)
    (png,) = pages.drawn(page)
    assert (np.asarray(Image.open(io.BytesIO(png))) == 0).all()


def test_a_run_without_a_checkpoint_shows_training_and_draws_later(browser, quick, tmp_path):
    new = write_run(tmp_path / "new", save_every=500)
    site = server.Site("imagen_jax", {}, {"new": [str(new)]}, lambda name: quick)
    with serving(site) as address:
        context = browser.new_context()
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
        context.close()
