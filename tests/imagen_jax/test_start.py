"""From a folder of pictures to drawn ones: the commands that start prints, as it prints them."""

import re
import shlex
from types import SimpleNamespace

import pytest
from PIL import Image

from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.start import stages
from imagen_jax import start
from tests.imagen_jax import commands

QUICK = ("--config.steps=2", "--config.sample_every=2", "--config.save_every=2")


def follow(line, *more):
    """Runs a command that was printed."""
    python, minus_m, module, *arguments = shlex.split(line)
    assert (python, minus_m) == ("python", "-m")
    ended = commands.run(module, *arguments, *more, devices=1)
    assert ended.code == 0, ended.err
    return ended


GFLOP = {"base32_8m": 1.7, "base32_19m": 3.8, "sr64_3m": 1.5, "base64_47m": 39, "sr256_18m": 59}


@pytest.mark.parametrize(
    ("side", "hours", "speed", "bases"),
    [
        (64, 2, 65, ["base32_8m", "sr64_3m"]),  # Two CPU cores.
        (64, 0.5, 65, ["base32_8m"]),
        (32, 2, 65, ["base32_8m"]),
        (300, 100, 65, ["base32_8m", "sr64_3m"]),
        (48, 2, 5_000, ["base32_19m"]),  # A GPU.
        (200, 8, 5_000, ["base64_47m"]),
        (300, 24, 5_000, ["base64_47m", "sr256_18m"]),
    ],
)
def test_what_is_chosen_for_a_machine_a_set_and_a_time(side, hours, speed, bases):
    opened = lambda stage: SimpleNamespace(
        fits=True, traced=SimpleNamespace(flops=1e9 * GFLOP[stage.base])
    )
    measured = lambda stage: SimpleNamespace(images_per_second=speed, opened=opened(stage))
    chosen = stages.choose(start.candidates(), float(side), 3600.0 * hours, opened, measured)
    assert [stage.base for stage in chosen.stages] == bases


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "captioned"),
    [
        pytest.param("imagen_jax", True, marks=pytest.mark.gate),
        ("imagen_jax", False),
        ("sd_jax", True),
    ],
)
def test_a_folder_becomes_a_config_that_trains_and_draws(tmp_path, package, captioned):
    data, out = digits.write_examples(tmp_path / "set", 80, size=64), tmp_path / "mine.py"
    for text in data.glob("*.txt"):
        if not captioned:
            text.unlink()
    given = ("--data=" + str(data), "--hours=3", f"--out={out}")
    told = commands.run(f"{package}.start", *given, devices=1)
    assert told.code == 0, told.err
    assert re.search(r"data +folder:\S+::txt: 80 pictures\n", told.out), told.out
    assert ("captions       none" in told.out) == (not captioned)
    with Image.open(tmp_path / "mine.png") as sheet:
        assert sheet.width == 4 + 8 * 132
    again = commands.run(f"{package}.start", *given, devices=1)
    assert again.code == 2 and "exists already" in again.err
    after = told.out.partition("next:\n")[2].replace("runs/", f"{tmp_path}/runs/").splitlines()
    for config in tmp_path.glob("mine*.py"):  # Where it says that the autoencoder will be.
        config.write_text(config.read_text().replace("runs/", f"{tmp_path}/runs/"))
    trained = [line for line in after if ".train" in line and "--config=" in line]
    assert len(trained) == 2 if package == "sd_jax" else len(trained) in (1, 2)
    for line in trained:
        assert "rehearsed" in follow(line, *QUICK, "--config.optimizer.warmup=0").out
    drawn = next(line for line in after if f"{package}.sample" in line)
    assert ("--prompt=''" in drawn) == (not captioned)
    follow(drawn.replace("pictures/", f"{tmp_path}/pictures/"), "--num_images=2")
    with Image.open(tmp_path / "pictures/mine/seed_000001.png") as picture:
        assert picture.size in ((32, 32), (64, 64))
