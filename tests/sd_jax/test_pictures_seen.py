"""Inpainting UNets and InstructPix2Pix, which see a picture, equal the pipelines of diffusers.

`diffusers_pictures.npz` was written by StableDiffusionInpaintPipeline and
StableDiffusionInstructPix2PixPipeline of diffusers 0.42, for the tiny models that `save` writes.
Their VAE returned the mean of its posterior, as here.
"""

import functools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from diffusion_jax.draw import input_pictures
from sd_jax import drawing
from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import checkpoints
from tests.sd_jax import written_models

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
VALUES = {"sampler": "ddim", "steps": 5, "guidance": 3.0, "negative_prompt": "b"}
CLASSES = {9: "StableDiffusionInpaintPipeline", 8: "StableDiffusionInstructPix2PixPipeline"}


def save(folder, channels, tokenizer):
    """Write a diffusers directory of a tiny model whose UNet reads `channels`, and return it."""
    unet = UNet(32, (1,), 1, (0,), num_heads=8, linear_projections=False, in_channels=channels)
    path, vae = folder / str(channels), VAE(64, (1, 2), 1)
    return written_models.write(path, unet, "eps", tokenizer, vae=vae)


@functools.cache
def saved():
    return dict(np.load(FIXTURES / "diffusers_pictures.npz"))


@pytest.fixture(scope="module")
def folders(published, tmp_path_factory):
    """Return the directories of the two models, by the number of channels."""
    folder = tmp_path_factory.mktemp("seen")
    return {channels: save(folder, channels, published) for channels in CLASSES}


@pytest.fixture
def draw(folders, monkeypatch):
    """Return draw(channels, mask=white, path=None, strength=1.0, ...) -> pixels in [0, 1].

    It draws over the picture of the saved case, from its noise.
    """
    written_models.start_from(jnp.asarray(saved()["noise"].transpose(0, 2, 3, 1)), monkeypatch)

    def drawn(channels, mask=None, path=None, strength=1.0, **values):
        pictures = input_pictures.opened(
            Image.fromarray(saved()["picture"]), None if mask is None else Image.fromarray(mask)
        )
        values = {**VALUES, "height": 16, "width": 24, **values}
        model = drawing.load(path or folders[channels], **values)
        model = model.changed([{}], strengths=[strength])
        ((images,),) = model.batches(["a c d"], [0], [0], pictures=pictures)
        return np.clip((images[0] + 1) / 2, 0, 1)

    return drawn


def test_inpainting_and_instruct_pix2pix_load_equally_from_a_file_and_a_directory(folders):
    for channels, folder in folders.items():
        file = folder.with_name(f"{channels}.npz")
        in_file = checkpoints.load(file, config=file.with_suffix(".yaml"))
        in_folder = checkpoints.load(folder)
        assert checkpoints.equal(in_file, in_folder)
        assert in_file.unet.network.in_channels == channels
        index = json.loads((folder / "model_index.json").read_text())
        assert index["_class_name"] == CLASSES[channels]
        assert index["_diffusers_version"]  # StableDiffusionInpaintPipeline needs it.


def test_instruct_pix2pix_without_a_picture_is_an_error(folders):
    model = drawing.load(folders[8], **VALUES)
    with pytest.raises(ValueError, match="8 is InstructPix2Pix, which edits a picture: give it"):
        model.draw("a")
    assert model.card()["guiding"] == "pix2pix"


def close(ours, theirs):
    error = np.abs(ours - theirs).max()
    print(f"{error:.1e}")
    assert error < 1e-5  # For pixels between 0 and 1. Measured: up to 2e-6.


def test_inpainting_equals_the_pipeline_of_diffusers_where_the_mask_is_white(draw):
    mask = saved()["mask"]
    drawn, white = draw(9, mask, strength=0.6), mask > 0
    close(drawn[white], saved()["inpaint_0.6"][white])
    np.testing.assert_allclose(drawn[~white], saved()["picture"][~white] / 255, atol=1e-6)


def test_instruct_pix2pix_equals_the_pipeline_of_diffusers_with_its_default_image_scale(draw):
    close(draw(8), saved()["pix2pix_1.5"])
