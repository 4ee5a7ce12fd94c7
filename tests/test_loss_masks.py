"""The rehearsal of training with masks of the loss, in both systems."""

import re

import numpy as np
import pytest
from PIL import Image

import imagen_jax.train
import sd_jax.train
from configs import quickstart
from diffusion_jax.devices import sharding
from diffusion_jax.train import rehearse
from imagen_jax import settings as imagen_settings
from tests.sd_jax import tiny

SIDE = 8


@pytest.fixture
def folder(tmp_path):
    """Four pictures, whose left half is transparent."""
    pixels = np.full((SIDE, SIDE, 4), 200, np.uint8)
    pixels[:, : SIDE // 2, 3] = 0
    (tmp_path / "data").mkdir()
    for n in range(4):
        Image.fromarray(pixels).save(tmp_path / "data" / f"{n}.png")
        (tmp_path / "data" / f"{n}.txt").write_text("a gray square")
    return tmp_path / "data"


def rehearsed(folder, kind):
    if kind == "sd":
        tiny.write_vae(folder.parent / "vae.safetensors")
        config, read = tiny.config(folder.parent / "vae.safetensors"), tiny.read_settings
    else:
        config, read = quickstart.get_config(), imagen_settings.read_settings
        config.unet.update(image_size=SIDE, embed_dim=32, head_dim=32, cond_dim=32)
    data = {"source": "folder", "path": str(folder), "threads": 0, "loss_mask": "alpha"}
    config.data = type(config)(data)
    config.optimizer.update(schedule="constant", warmup=1)
    config.update(batch_size=4, steps=2, sample_every=0)
    s, mesh = read(config.to_dict()), sharding.make_mesh(1, 1, 1)
    inputs = (sd_jax if kind == "sd" else imagen_jax).train.prepare(s, mesh)
    with inputs.batches:
        return rehearse.rehearse(inputs, s.run, s.optimizer, mesh, folder.parent / "run")


@pytest.mark.parametrize("kind", ["imagen", "sd"])
def test_training_with_loss_masks_is_rehearsed(folder, kind, caplog):
    report = rehearsed(folder, kind)
    assert re.search(r"image (\d+x\d+)x3, .*loss_mask \1[,;\n]", report)
    assert "data.loss_mask has no effect" not in caplog.text


def test_loss_masks_without_effect_are_reported(folder, caplog):
    for path in folder.glob("*.png"):
        Image.open(path).convert("RGB").save(path)
    rehearsed(folder, "imagen")
    assert "data.loss_mask has no effect on the 4 pictures that were read" in caplog.text
