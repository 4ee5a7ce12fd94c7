"""The page of Stable Diffusion in a real Chromium, for a model trained by the commands."""

import io

import pytest
from PIL import Image

from tests import pages
from tests.imagen_jax import commands
from tests.sd_jax import tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train an autoencoder for three steps, and a latent diffusion model for three."""
    folder = tmp_path_factory.mktemp("sd")
    vae, run = folder / "vae", folder / "run"
    of_vae = f"--config.vae.weights={vae}"
    for name, arguments in (
        ("train_vae", (*tiny.VAE_FLAGS, f"--workdir={vae}")),
        ("train", (*tiny.FLAGS, of_vae, f"--workdir={run}", "--config.sample_every=3")),
    ):
        commands.succeed(f"sd_jax.{name}", *arguments)
    return run


def test_pictures_of_the_page_equal_the_commands_and_reloading_shows_them_again(browser, trained, tmp_path):
    with (
        pages.served("sd_jax.web", trained, folder=tmp_path / "web") as address,
        pages.opened(browser, address) as page,
    ):
        pages.draw(page, steps=3, guidance=3, sampler="ddim")
        images = pages.drawn(page)
        page.reload()
        assert pages.drawn(page) == images
        page.locator(".picture").first.click()
        of_command = pages.of_command(page, tmp_path / "out", "--num_images=2")
        page.keyboard.press("Escape")
        page.click("#tab-sweeps")
        page.get_by_text("There are no sweeps yet. Run the command `evaluate` to make one.").wait_for()
        assert page.locator("#view-sweeps select:visible").count() == 0
        page.click("#tab-training")
        page.locator("#curves figure").first.wait_for()
        assert "finished" in page.locator("#runs").inner_text()
        (sheet,) = pages.files(page, "#over-time img")
    assert [of_command[f"seed_00000{n}.png"] for n in (0, 1)] == images and images[0] != images[1]
    assert Image.open(io.BytesIO(images[0])).size == (16, 16)
    assert sheet == (trained / "samples" / "step_00000003.png").read_bytes()
