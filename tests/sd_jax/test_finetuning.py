"""The commands train a LoRA of a Stable Diffusion run, sample with it, and convert it."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from diffusion_jax import runs
from tests.imagen_jax import commands
from tests.sd_jax import tiny

pytestmark = pytest.mark.slow
CONFIG = """from tests.sd_jax import tiny


def get_config():
    return tiny.config({vae!r}, optimizer__lr=0.03, optimizer__ema_decays=(0.5,))
"""


def run(name, *arguments):
    commands.succeed(f"sd_jax.{name}", *arguments, before=commands.skip_rehearsal)


def draw(out, *arguments):
    return commands.draw("sd_jax.sample", out, "--prompt=a red seven", "--steps=2", *arguments)[:2]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The runs `base` and `lora` of two steps, and `moved`, a copy of lora without its base."""
    root = tmp_path_factory.mktemp("finetuning")
    vae = tiny.write_vae(root / "vae.safetensors")
    (root / "config.py").write_text(CONFIG.format(vae=str(vae)))
    train = lambda name, *more: run("train", f"--config={root / 'config.py'}", f"--workdir={root / name}", *more)
    train("base")
    targets = "--config.lora.targets=attn|_res"
    lora = ("--config.lora.rank=2", "--config.lora.alpha=64", targets, "--config.seed=3")
    train("lora", f"--config.unet.weights={root / 'base'}", *lora)
    shutil.copytree(root / "lora", root / "moved")
    config = root / "moved" / runs.CONFIG
    config.write_text(config.read_text().replace(str(root / "base"), str(root / "gone")))
    return root


def test_a_lora_changes_pictures_and_can_be_merged_also_if_its_base_moved(root, tmp_path):
    _, base = draw(tmp_path / "base", f"--workdir={root / 'base'}")
    _, without = draw(tmp_path / "without", f"--workdir={root / 'lora'}", "--lora_scale=0")
    np.testing.assert_array_equal(without, base)
    lines, with_lora = draw(tmp_path / "apart", f"--workdir={root / 'lora'}")
    assert np.abs(with_lora.astype(int) - base).max() > 3 and lines[0]["checkpoint"] == 2
    refused = commands.run(
        "sd_jax.weights", "convert", f"--from={root / 'moved'}", f"--to={tmp_path / 'a.npz'}", devices=1
    )
    assert refused.code == 2 and "gone" in refused.err
    moved = (f"--from={root / 'moved'}", f"--unet_weights={root / 'base'}")
    run("weights", "convert", *moved, f"--to={tmp_path / 'a.safetensors'}")
    run("weights", "convert", f"--from={root / 'lora'}", f"--to={tmp_path / 'b.safetensors'}")
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in "ab")
    assert one.keys() == other.keys() and all((one[k] == other[k]).all() for k in one)


def test_the_held_out_loss_of_a_lora_differs_from_its_base(root):
    measure = lambda name, *more: commands.run(
        "diffusion_jax.heldout",
        f"--workdir={root / name}",
        "--share=0.02",
        "--records=8",
        "--ema=raw",
        *more,
        devices=1,
    )
    refused = measure("moved")
    assert refused.code == 2 and "gone" in refused.err
    ended = [measure("base"), measure("lora"), measure("moved", f"--unet_weights={root / 'base'}")]
    base, lora, moved = (json.loads(e.out)["loss"] for e in ended)
    assert lora == moved != base


def test_an_inpainting_model_is_trained_from_a_plain_one_and_keeps_what_the_mask_does_not_cover(root, tmp_path):
    config, base = root / "config.py", root / "base"
    run(
        "train",
        f"--config={config}",
        f"--workdir={tmp_path / 'run'}",
        f"--config.unet.weights={base}",
        "--config.unet.in_channels=9",
        "--config.prompts=('a red one',)",
        "--config.sample_every=2",
        "--config.data.heldout=0.02",
        "--config.heldout.every=2",
    )
    assert list((tmp_path / "run" / "samples").iterdir())  # Drawn without a picture.
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    mask = np.zeros((8, 8), np.uint8)
    mask[2:6, 3:7] = 255
    Image.fromarray(mask).save(tmp_path / "m.png")
    flags = f"--workdir={tmp_path / 'run'}", f"--image={tmp_path / 'a.png'}"
    _, (drawn,) = draw(tmp_path / "out", *flags, f"--mask={tmp_path / 'm.png'}")
    np.testing.assert_array_equal(drawn[mask == 0], pixels[mask == 0])
    assert np.abs(drawn.astype(int) - pixels)[mask > 0].max() > 3
