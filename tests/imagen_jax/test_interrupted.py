"""The training command: killed and resumed bit for bit."""

import json
import re
import shutil

import jax
import numpy as np
import pytest

from diffusion_jax import runs
from diffusion_jax.logs import events, run_log
from diffusion_jax.precache import lookup
from diffusion_jax.train import checkpoint, optimizer
from diffusion_jax.train.state import init_state
from imagen_jax import task
from imagen_jax.settings import read_settings
from tests.diffusion_jax.event_files import hparams, points
from tests.imagen_jax import commands
from tests.imagen_jax.conftest import SAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.gate]


class Position:
    """A data iterator that only has a position."""

    def get_state(self):
        raise NotImplementedError

    def set_state(self, state):
        self.state = json.loads(state)


def last_state(workdir):
    """Return the state and the data position of the last checkpoint."""
    s = read_settings(runs.load(workdir))
    tx = optimizer.make_optimizer(s.optimizer, s.run.steps)
    imagen = task.make_task(s, lookup.open_encoder(s.text))
    create = lambda key: init_state(imagen.init(key), tx, s.optimizer.ema_decays)
    position = Position()
    checkpoints = checkpoint.Checkpointer(workdir / runs.CHECKPOINTS, keep_last=2)
    state = checkpoints.restore(jax.eval_shape(create, jax.random.key(0)), position)
    checkpoints.close()
    return state, position.state


def test_a_run_of_4_steps_ends_with_a_checkpoint_of_step_4(interrupted):
    assert interrupted.exit_codes[0] == 0
    assert (interrupted.last_line[0], interrupted.last_whole[0]) == (4, 4)


def test_sigterm_saves_the_current_step_and_exits_with_143(interrupted):
    assert interrupted.exit_codes[1] == 143
    assert interrupted.last_whole[1] == interrupted.last_line[1] >= 9


def test_sigkill_leaves_a_complete_checkpoint_of_an_earlier_step(interrupted):
    assert interrupted.exit_codes[2:] == [-9, 0]
    for i in (2, 3):
        assert interrupted.last_whole[i - 1] <= interrupted.last_whole[i] <= interrupted.last_line[i]


def test_tensorboard_has_every_logged_step_once_and_the_config(interrupted):
    """The config is stored as hparams."""
    lines = run_log.read_metrics(interrupted.workdir / run_log.METRICS)
    folder = interrupted.workdir / events.FOLDER
    shown = {"loss", *(name for name in lines[0] if name.startswith("loss/sigma_"))}
    assert len(shown) > 1
    for tag in shown:
        expected = [(line["step"], np.float32(line[tag])) for line in lines if tag in line]
        assert points(folder, tag) == expected
    config = hparams(folder)
    assert (config["batch_size"], config["unet.embed_dim"], config["data.source"]) == (
        8,
        32,
        "diffusion_jax.examples.digits",
    )


def test_each_process_resumed_from_the_last_complete_checkpoint(interrupted):
    manifest = json.loads((interrupted.workdir / run_log.MANIFEST).read_text())
    firsts = [run["first_step"] for run in manifest["runs"]]
    assert firsts == [0, *interrupted.last_whole[:-1]]


def test_an_interrupted_run_ends_bit_for_bit_like_an_uninterrupted_one(interrupted, uninterrupted):
    actual, position = last_state(interrupted.workdir)
    expected, expected_position = last_state(uninterrupted)
    assert int(expected.step) == interrupted.steps
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert position == expected_position
    assert position["samples"] == 8 * interrupted.steps


def taken(workdir):
    """Return for each process {samples taken: the indices in the last batch}."""
    paths = sorted((workdir / SAMPLES).glob("*.jsonl"))
    lines = [path.read_text().rpartition("\n")[0].splitlines() for path in paths]
    return [dict(map(json.loads, process)) for process in lines]


def test_an_interrupted_run_takes_the_same_samples_in_the_same_order(interrupted, uninterrupted):
    (expected,) = taken(uninterrupted)
    assert list(expected) == list(range(8, 8 * interrupted.steps + 1, 8))
    processes, sequence = taken(interrupted.workdir), {}
    assert len(processes) == 4
    for first, process in zip([0, *interrupted.last_whole], processes, strict=False):
        assert list(process) == [8 * (first + 1 + i) for i in range(len(process))]
        sequence |= process
    assert {step: sequence[step] for step in expected} == expected
    # No sample occurs twice within an epoch.
    ids = [i for step in expected.values() for i in step]
    assert len(set(ids)) == len(ids) == 8 * interrupted.steps


def test_every_step_of_an_interrupted_run_has_the_same_loss(interrupted, uninterrupted):
    """A loss depends on the pictures, the noise and the parameters of its step."""
    lines = [run_log.read_metrics(path / run_log.METRICS) for path in (interrupted.workdir, uninterrupted)]
    losses = [[(line["step"], line["loss"], line["grad_norm"]) for line in run] for run in lines]
    assert losses[0] == losses[1]
    assert [step for step, *_ in losses[1]] == list(range(1, interrupted.steps + 1))


def test_replay_reproduces_the_logged_step_bit_for_bit(interrupted, tmp_path):
    run = shutil.copytree(interrupted.workdir, tmp_path / "run")
    ended = commands.succeed("replay", f"--workdir={run}", f"--step={interrupted.steps}")
    assert f"step {interrupted.steps}: grad_norm, loss, lr, param_norm, skipped" in ended.out
    assert "are equal, bit for bit" in ended.out and "  mid_attn " in ended.out
    written = {path.name for path in (run / "replay").iterdir()}
    assert written == {f"step_{interrupted.steps:08}{end}" for end in (".json", ".png")}
    lines = (run / run_log.METRICS).read_text().splitlines()
    lines[-1] = re.sub('"loss": [^,]*', '"loss": 0.5', lines[-1])
    (run / run_log.METRICS).write_text("\n".join(lines) + "\n")
    ended = commands.run("replay", f"--workdir={run}", f"--step={interrupted.steps}", devices=1)
    assert ended.code == 1 and "different: loss was 0.5 and is " in ended.out
