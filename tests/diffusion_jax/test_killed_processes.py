"""One of two processes is killed in every phase, and the run still ends with the same weights."""

import jax
import numpy as np
import pytest

from diffusion_jax import runs
from diffusion_jax.logs import run_log
from diffusion_jax.weights import restore
from tests.diffusion_jax import toy
from tests.processes import Group

STEPS = 24
PHASES = ("start", "compile", "step", "save", "evaluation")


def train(workdir, *more):
    run = (f"--workdir={workdir}", f"--steps={STEPS}", "--step_timeout=60")
    return Group(workdir / "output", 2, "tests.diffusion_jax.toy_train", *run, *more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    group = train(workdir)
    assert group.end() == [0, 0], group.printed()
    return workdir


def parameters(workdir):
    """Return the last parameters, their average, and an average reconstructed from snapshots."""
    shapes = jax.eval_shape(toy.init, jax.random.key(0))
    of = lambda name, step: restore.load_params(workdir / runs.CHECKPOINTS, shapes, name, step)
    return of("raw", STEPS), of("0.1", STEPS), of("0.08", STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_run_killed_in_every_phase_ends_with_the_same_weights(undisturbed, tmp_path, which):
    reached = []
    for phase in PHASES:
        group = train(tmp_path, f"--kill={phase}", f"--killed={which}")
        codes = group.end()
        assert codes[which] == -9 and codes[1 - which] not in (0, 2, 143), group.printed()
        reached.append(max(restore.steps(tmp_path / runs.CHECKPOINTS), default=0))
    assert reached[:2] == [0, 0] and reached == sorted(reached) and reached[-1] > 0
    group = train(tmp_path)
    assert group.end() == [0, 0], group.printed()
    jax.tree.map(np.testing.assert_array_equal, parameters(tmp_path), parameters(undisturbed))
    lines = [run_log.read_metrics(folder / run_log.METRICS) for folder in (tmp_path, undisturbed)]
    for name in ("step", "loss", "grad_norm"):
        columns = [[line[name] for line in part] for part in lines]
        assert columns[0] == columns[1] and len(columns[0]) == STEPS
