"""Fine-tuning on ten pictures of a new word: prior, LoRA, drawing, editing."""

import contextlib
import json
import pathlib
import re

import numpy as np
import pytest

from diffusion_jax import runs
from diffusion_jax.weights import finetune, restore
from tests.imagen_jax import commands
from tests.imagen_jax.conftest import TINY

pytestmark = pytest.mark.slow
GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "finetuning.md"


def draw(out, *arguments):
    return commands.draw("sample", out, "--num_images=2", "--prompt=a pink seven on gray paper", *arguments)[:2]


@pytest.fixture(scope="module")
def adapting(trained, tmp_path_factory):
    """A LoRA run on `trained`, with pictures drawn by `trained` as prior, in two starts."""
    folder = tmp_path_factory.mktemp("finetuning")
    (code,) = re.findall(r"```python\n((?:(?!```).)*ten_pink.*?)```", GUIDE.read_text(), re.S)
    with contextlib.chdir(folder):
        exec(code)
    draw(folder / "before", f"--workdir={trained}")
    arguments = (
        *TINY,
        f"--config.unet.weights={trained}",
        "--config.data.source=folder",
        f"--config.data.path={folder / 'ten_pink'}",
        f"--config.data.prior={folder / 'before'}",
        "--config.lora.rank=2",
        f"--workdir={folder / 'run'}",
        "--config.save_every=2",
    )
    printed = commands.succeed("train", *arguments, "--config.steps=2").out
    commands.succeed("train", *arguments, "--config.steps=4")
    return folder / "run", printed


def test_rehearsal_and_checkpoints_of_a_lora_contain_only_its_factors(adapting, trained):
    workdir, printed = adapting
    assert "parameters     640 trained" in printed and " frozen" in printed
    assert restore.steps(workdir / runs.CHECKPOINTS)[-1] == 4
    size = lambda run, step: sum(file.stat().st_size for file in (run / runs.CHECKPOINTS / step).rglob("*"))
    assert size(workdir, "4") < 0.5 * size(trained, str(restore.steps(trained / runs.CHECKPOINTS)[-1]))


def test_lora_scale_0_draws_like_the_base_model(adapting, trained, tmp_path):
    _, base = draw(tmp_path / "base", f"--workdir={trained}")
    lines, without = draw(tmp_path / "0", f"--workdir={adapting[0]}", "--lora_scale=0")
    _, with_it = draw(tmp_path / "100", f"--workdir={adapting[0]}", "--lora_scale=100")
    np.testing.assert_array_equal(without, base)
    (stage,) = lines[0]["stages"]
    assert np.abs(with_it - base).max() > 0 and stage["checkpoint"] == 4
    fingerprint = json.loads((adapting[0] / finetune.BASE).read_text())["fingerprint"]
    # Stored features of a sweep depend on them.
    assert (stage["lora_scale"], stage["base"]) == (0, fingerprint)


def test_the_weights_that_a_lora_adapts_can_be_moved(adapting):
    config = runs.load(adapting[0])
    config["unet"]["weights"] = "elsewhere"
    runs.claim(adapting[0], config, write=False)
    config["lora"]["rank"] = 3
    with pytest.raises(ValueError, match="made with another config"):
        runs.claim(adapting[0], config, write=False)
