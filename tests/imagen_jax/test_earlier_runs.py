"""Workdirs trained by earlier commits of this repository still work.

tests/fixtures/earlier_runs holds the config.json and the checkpoint of step 2 of each, named by
commit. sd_vae, from commit 603860d, is the autoencoder of both Stable Diffusion runs. The trained
numbers are replaced by a pattern that compresses well.
"""

import json
import pathlib
import shutil
import tarfile

import jax
import numpy as np
import pytest

from diffusion_jax import runs
from diffusion_jax.config import versions
from diffusion_jax.text import hashed
from diffusion_jax.train import checkpoint, optimizer
from diffusion_jax.train.state import init_state
from diffusion_jax.weights import restore
from imagen_jax import settings as imagen_settings
from imagen_jax import task as imagen_task
from sd_jax import settings as sd_settings
from sd_jax import task as sd_task
from tests.imagen_jax import commands

PACKED = pathlib.Path(__file__).parents[1] / "fixtures" / "earlier_runs"
# Some of the fields that were added after each commit.
LATER = {
    "imagen_a87890b": ("text.weights", "super_resolution.factor", "unet.kind", "step_timeout"),
    "imagen_de86e1f": ("step_timeout",),
    "imagen_cc541fd": (),
    "sd_603860d": ("step_timeout",),
    "sd_cc541fd": (),
}
CONFIG = """
from ml_collections import ConfigDict
from diffusion_jax import runs

def get_config():
    return ConfigDict(runs.load({workdir!r}))
"""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """The folder of all runs, with a config file NAME.py that matches each run."""
    folder = tmp_path_factory.mktemp("earlier")
    for packed in PACKED.iterdir():
        with tarfile.open(packed) as tar:
            tar.extractall(folder, filter="data")
        name = packed.name.partition(".")[0]
        (folder / f"{name}.py").write_text(CONFIG.format(workdir=str(folder / name)))
    for run in folder.glob("sd_*/config.json"):  # The earlier commands ran in this folder.
        config = json.loads(run.read_text())
        if config["vae"]["weights"]:
            config["vae"]["weights"] = str(folder / config["vae"]["weights"])
        run.write_text(json.dumps(config))
    return folder


def gate(*values):
    """Return a parameter with the mark `gate`, for the oldest run of each system."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.gate])


def slow(*values):
    """Return a parameter with the mark `slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def system_of(name):
    return name.partition("_")[0] + "_jax"


@pytest.mark.parametrize("name", LATER)
def test_fields_added_since_an_earlier_run_are_named_when_it_goes_on(earlier, name, caplog, tmp_path):
    shutil.copy(earlier / name / "config.json", tmp_path)
    with caplog.at_level("INFO", logger="absl"):
        config = runs.load(earlier / name, system_of(name))
        assert not caplog.records  # Drawing needs no such line.
        runs.claim(tmp_path, config)
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if "using defaults for" in line]
    assert all(field in line for field in LATER[name])
    assert ("step_timeout" in line) == ("step_timeout" in LATER[name])
    assert config["step_timeout"] == 1800


@pytest.mark.parametrize("name", [*LATER, "imagen_sr_8374cec"])
def test_the_checkpoint_of_an_earlier_run_restores_as_a_current_train_state(earlier, name):
    """It contains parameters, averages and the optimizer, which drawing and training read."""
    config = runs.load(earlier / name, system_of(name))
    if system_of(name) == "imagen_jax":
        s = imagen_settings.read_settings(config)
        task = imagen_task.make_task(s, hashed.encoder(s.text.width, s.text.max_tokens))
    else:
        s = sd_settings.read_settings(config)
        task = sd_task.make_task(s, hashed.encoder(s.text.width, s.text.max_tokens), None)
    tx = optimizer.make_optimizer(s.optimizer, s.run.steps)
    start = lambda key: init_state(task.init(key), tx, s.optimizer.ema_decays)
    state = jax.eval_shape(start, jax.random.key(0))
    root = earlier / name / runs.CHECKPOINTS
    checkpoint.check(root, 2, state)
    for which in ("raw", "ema"):
        leaves = jax.tree.leaves(restore.load_params(root, state.params, which, 2))
        assert all(np.isfinite(leaf).all() for leaf in leaves)
        assert np.std(np.concatenate([np.ravel(leaf) for leaf in leaves])) > 0


@pytest.mark.parametrize(
    "name", [gate("imagen_a87890b"), slow("imagen_cc541fd"), gate("sd_603860d"), slow("sd_cc541fd")]
)
def test_sample_draws_from_an_earlier_run(earlier, name, tmp_path):
    drawn = ("--prompt=a red seven", "--num_images=2", f"--out={tmp_path}")
    ended = commands.succeed(f"{system_of(name)}.sample", f"--workdir={earlier / name}", *drawn)
    assert len(list(tmp_path.glob("*.png"))) >= 2, ended.err


@pytest.mark.parametrize("name", [gate("imagen_a87890b"), slow("sd_603860d")])
def test_evaluate_scores_a_run_of_an_earlier_version(earlier, name):
    small = ("--guidance=2", "--steps=1", "--num_heldout=1", "--batch_size=64")
    commands.succeed(f"{system_of(name)}.evaluate", f"--workdir={earlier / name}", *small)
    assert (earlier / name / runs.EVALUATION / "step_00000002" / "sweep.csv").is_file()


@pytest.mark.parametrize(
    ("name", "module"),
    [
        gate("imagen_a87890b", "imagen_jax.train"),
        slow("imagen_sr_8374cec", "imagen_jax.train"),
        slow("imagen_cc541fd", "imagen_jax.train"),
        slow("sd_vae", "sd_jax.train_vae"),
        gate("sd_603860d", "sd_jax.train"),
    ],
)
def test_train_continues_an_earlier_run(earlier, name, module):
    workdir = earlier / name
    flags = f"--config={earlier / name}.py", f"--workdir={workdir}", "--config.steps=3", "--config.save_every=1"
    commands.succeed(module, *flags, before=commands.skip_rehearsal)
    assert restore.steps(workdir / runs.CHECKPOINTS) == [2, 3]
    config = json.loads((workdir / runs.CONFIG).read_text())
    assert (config["version"], config["system"][:2]) == (versions.VERSION, name[:2])
