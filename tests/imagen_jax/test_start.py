"""`start`: from a folder of pictures to drawn ones, with the commands that it prints."""

import re
import shlex
import threading

import pytest
from PIL import Image

from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.start import stages, start_command
from diffusion_jax.start.changes import full_config
from diffusion_jax.train import memory
from imagen_jax import start
from imagen_jax.settings import read_settings
from tests.imagen_jax import commands

QUICK = ("--config.steps=2", "--config.sample_every=2", "--config.save_every=2")


def follow(line, *more):
    """Run a printed command."""
    python, minus_m, module, *arguments = shlex.split(line)
    assert (python, minus_m) == ("python", "-m")
    return commands.succeed(module, *arguments, *more)


@pytest.mark.parametrize(
    ("side", "hours", "speed", "bases"),
    [
        (64, 2, 65, ["base32_8m", "sr64_3m"]),  # The speed of two CPU cores.
        (64, 0.5, 65, ["base32_8m"]),
        (32, 2, 65, ["base32_8m"]),
        (300, 100, 65, ["base32_8m", "sr64_3m"]),
        (48, 2, 5_000, ["base32_19m"]),  # The speed of a GPU.
        (200, 8, 5_000, ["base64_47m"]),
        (300, 24, 5_000, ["base64_47m", "sr256_18m"]),
    ],
)
def test_start_selects_models_by_picture_size_time_and_speed(side, hours, speed, bases):
    candidates = start.candidates()
    rate = speed * candidates[0].stages[0].gflop
    chosen = stages.allowed(candidates, float(side), 3600.0 * hours, rate)[-1]
    assert [stage.base for stage in chosen.stages] == bases


STAGES = [stage for candidate in start.candidates() for stage in candidate.stages]


@pytest.mark.slow
@pytest.mark.parametrize("stage", {s.base: s for s in STAGES}.values(), ids=lambda s: s.base)
def test_gflop_of_a_stage_is_that_of_its_training_step(tmp_path, stage):
    digits.write_examples(tmp_path, 2, size=256)
    own = {"data.source": ("folder", ""), "data.path": (str(tmp_path), "")}
    s, _, inputs = stages._open(full_config(stage.base, own))
    with inputs.batches:
        state = memory.new_state(inputs.task, s.optimizer, s.run.steps)
        traced = memory.trace(inputs.task, state, inputs.batches.example())
    assert f"{traced.flops / 1e9:.2g}" == f"{stage.gflop:g}"


def test_a_time_that_is_shown_as_equal_to_hours_is_not_called_longer():
    """A least number of steps may take 200 s, which is shown as 3 minutes, with --hours=0.05."""
    minutes = (200.0, 180.0), (240.0, 180.0), (100.0, 180.0)
    assert [start_command._is_longer(*pair) for pair in minutes] == [False, True, False]


def measure_for_too_long():
    """Replace the measurement by one that ends with an error long after its time."""

    def measure(*_):
        threading.Event().wait(200)
        raise AssertionError("start waited for the measurement")

    stages.measure, start_command._LIMIT = measure, 1.0


@pytest.mark.gate
@pytest.mark.slow
def test_start_writes_a_config_with_an_assumed_speed_if_measuring_takes_too_long(tmp_path):
    data, out = digits.write_examples(tmp_path / "set", 8, size=40), tmp_path / "mine.py"
    arguments = (f"--data={data}", "--hours=0.001", f"--out={out}")
    ended = commands.succeed("start", *arguments, before=measure_for_too_long)
    assert "Assumed instead: base32_8m trains on 58.8" in ended.out, ended.out
    assert "python -m imagen_jax.train --config=" in ended.out.partition("next:\n")[2]
    assert "c.steps = 20  # --hours allows 0; fewer than 20 are not" in out.read_text()
    names = {}
    exec(out.read_text(), names)
    s = read_settings(names["get_config"]().to_dict())
    assert s.run.steps == 20 and s.data.path == str(data)
    assert out.with_suffix(".png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "captioned", "hours"),
    [pytest.param("imagen_jax", True, 0.5, marks=pytest.mark.gate), ("imagen_jax", False, 3), ("sd_jax", True, 3)],
)
def test_start_writes_a_config_that_trains_and_draws(tmp_path, package, captioned, hours):
    data, out = digits.write_examples(tmp_path / "set", 80, size=64), tmp_path / "mine.py"
    for text in data.glob("*.txt"):
        if not captioned:
            text.unlink()
    ended = commands.succeed(f"{package}.start", f"--data={data}", f"--hours={hours}", f"--out={out}")
    assert re.search(r"data +folder:\S+::txt: 80 pictures\n", ended.out), ended.out
    assert ("captions       none" in ended.out) == (not captioned)
    with Image.open(tmp_path / "mine.png") as sheet:
        assert sheet.width == 4 + 8 * 132
    assert "A new model memorises so few pictures" in ended.out.replace("\n", " ")
    after = ended.out.partition("next:\n")[2].replace("runs/", f"{tmp_path}/runs/").splitlines()
    # The config refers to the autoencoder that is trained first.
    for config in tmp_path.glob("mine*.py"):
        config.write_text(config.read_text().replace("runs/", f"{tmp_path}/runs/"))
    trained = [line for line in after if ".train" in line and "--config=" in line]
    assert len(trained) == 2 if package == "sd_jax" else len(trained) in (1, 2)
    for line in trained:
        assert "rehearsed" in follow(line, *QUICK, "--config.optimizer.warmup=0").out
    drawn = next(line for line in after if f"{package}.sample" in line)
    assert ("--prompt=''" in drawn) == (not captioned)
    follow(drawn.replace("pictures/", f"{tmp_path}/pictures/"), "--num_images=2")
    commands_after = [line.split()[2] for line in after]
    page, report = (f"--workdir={tmp_path}/runs/mine", f"{tmp_path}/runs/mine")
    assert [line.split()[3].partition(",")[0] for line in after[-2:]] == [page, report]
    assert commands_after[-2:] == [f"{package}.web", "diffusion_jax.report"]
    said = follow(next(line for line in after if "diffusion_jax.verdict" in line)).out
    assert re.search(r"loss +\S+ on \d+ held-out pictures, against \S+ on \d+ training", said), said
    assert len(list(tmp_path.glob("runs/mine*/verdict.png"))) == 1
    with Image.open(tmp_path / "pictures/mine/seed_000001.png") as picture:
        assert picture.size in ((32, 32), (64, 64))
