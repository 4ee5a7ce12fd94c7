"""A tiny version of the benchmark runs from start to result, and MLPerf's checkers accept it.

Its processes sample ten pictures for each of two evaluations. The second meets the targets.
One run has tiny versions of the real networks, which take long to compile, and one evaluation. In
the others, grey images replace the networks (see tiny_mlperf).
"""

import shutil

import numpy as np
import pytest
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.package_checker.seed_checker import SeedChecker

from diffusion_jax.metrics import fid, stats_files
from diffusion_jax.metrics.features import gaussian
from diffusion_jax.weights import restore
from sd_jax.mlperf import convergence, mllog
from tests.processes import Group
from tests.sd_jax import tiny_benchmark
from tests.sd_jax.tiny_benchmark import BATCH, CAPTIONS, INTERVAL

FIRST, SECOND = INTERVAL * BATCH, 2 * INTERVAL * BATCH
ONCE = (
    "submission_division",
    "submission_benchmark",
    "init_stop",
    "run_start",
    "run_stop",
    "train_samples",
    "eval_samples",
    "gradient_accumulation_steps",
    "opt_name",
    "opt_adamw_beta_1",
    "opt_adamw_beta_2",
    "opt_adamw_epsilon",
    "opt_adamw_weight_decay",
    "opt_base_learning_rate",
    "opt_learning_rate_warmup_steps",
    "cache_clear",
    "init_start",
    "global_batch_size",
    "block_start",
    "block_stop",
    "eval_accuracy",
)


def complies(path):
    """Return whether MLCommons' checker accepts a file, with warnings as errors."""
    checker = mlp_compliance.make_checker("training", "5.0.0", False, True)
    return mlp_compliance.main(str(path), "training_5.0.0/common.yaml", checker)[0]


def logged(path):
    """Return the events of a log without their times."""
    return [(e.key, e.value, dict(e.metadata)) for e in mllog.read(path)]


def run(folder, name, *arguments, count=1, devices=2, code=0):
    """Run the command, and return its workdir FOLDER/NAME and its output."""
    flags = ("--seed=7", "--eval_batch=2", f"--workdir={folder / name}", *arguments)
    config = f"--config=tests/sd_jax/tiny_benchmark.py:{folder}"
    command = "tests.sd_jax.tiny_mlperf"
    group = Group(folder / "output", count, command, config, *flags, devices=devices)
    assert group.end() == [code] * count, group.printed()
    return folder / name, group.printed()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_benchmark.write(tmp_path_factory.mktemp("benchmark"))


@pytest.fixture(scope="module")
def whole(folder):
    """Return the workdir of a run without interruptions."""
    workdir, console = run(folder, "whole", "--toy")
    (workdir / "console.txt").write_text(console)
    return workdir


def features(workdir, step):
    parts = [np.load(part) for part in sorted(workdir.glob(f"evaluation/mlperf/step_*{step}/*"))]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0].files}


@pytest.mark.slow
def test_a_run_with_the_real_networks_meets_its_target(tmp_path):
    folder = tiny_benchmark.write(tmp_path, mean=0.0)
    once = f"--config.steps={INTERVAL}"
    workdir, _ = run(folder, "real", once, devices=1)
    path = workdir / "result.txt"
    result = convergence.read(path)
    assert result.status == "aborted" and result.evaluations[FIRST]["FID"] > 90
    # The sampled images become the target. The checkpoint samples them again, and meets it.
    tiny_benchmark.write_reference(folder, gaussian(features(workdir, INTERVAL)["inception"]))
    path.write_text(path.read_text().partition('"key": "eval_start"')[0])
    shutil.rmtree(workdir / "evaluation")
    run(folder, "real", once, devices=1)
    result = convergence.read(path)
    assert result.samples_to_target == FIRST
    assert result.evaluations[FIRST]["FID"] == pytest.approx(0, abs=1e-3)


@pytest.mark.gate
@pytest.mark.slow
def test_the_checker_accepts_the_result_and_needs_every_key(whole, tmp_path):
    path, other = whole / "result.txt", tmp_path / "result.txt"
    assert complies(path)
    assert SeedChecker("5.0.0").check_seeds([str(path)])
    lines = path.read_text().splitlines(keepends=True)
    for key in ONCE:
        other.write_text("".join(line for line in lines if f'"key": "{key}"' not in line))
        assert not complies(other), key
    other.write_text("".join(line for line in lines if f'"samples_count": {FIRST}' not in line))
    assert not complies(other)  # One evaluation is not enough.


@pytest.mark.gate
@pytest.mark.slow
def test_nothing_is_compiled_after_the_clock_starts(whole):
    """The data is opened right after the clock starts."""
    before, opened, after = (whole / "console.txt").read_text().partition("tars imported")
    assert before.count("compiling the step") == 1 and opened and "compil" not in after.lower()


@pytest.mark.gate
@pytest.mark.slow
def test_the_result_logs_settings_blocks_and_evaluations(whole):
    result = convergence.read(whole / "result.txt")
    assert (result.status, result.samples_to_target) == ("success", SECOND)
    values = {event.key: event.value for event in mllog.read(whole / "result.txt")}
    assert values["seed"] == 7 and values["train_samples"] == 24
    assert values["eval_samples"] == CAPTIONS and values["opt_base_learning_rate"] == 0.05
    source_files = {metadata["file"] for _, _, metadata in logged(whole / "result.txt")}
    assert source_files == {"sd_jax/mlperf/run.py"}
    blocks = [
        (key, metadata["samples_count"])
        for key, _, metadata in logged(whole / "result.txt")
        if key.startswith(("block", "eval_st"))
    ]
    assert blocks == [
        ("block_start", 0),
        ("block_stop", FIRST),
        ("eval_start", FIRST),
        ("eval_stop", FIRST),
        ("block_start", FIRST),
        ("block_stop", SECOND),
        ("eval_start", SECOND),
        ("eval_stop", SECOND),
    ]


@pytest.mark.gate
@pytest.mark.slow
def test_scores_are_computed_from_one_image_per_caption(whole, folder):
    real = fid.reference(stats_files.read(folder / "reference.npz").gaussian)
    for samples, scores in convergence.read(whole / "result.txt").evaluations.items():
        rows = features(whole, samples // BATCH)
        assert rows["inception"].shape == (CAPTIONS, 3)
        assert len(np.unique(rows["inception"], axis=0)) == CAPTIONS
        assert scores["FID"] == fid.distance(gaussian(rows["inception"]), real)
        assert scores["CLIP"] == rows["clip"].mean()


@pytest.mark.slow
def test_a_run_that_was_killed_at_any_point_ends_with_the_same_log(whole, folder):
    for kill, code in (("training", -9), ("stop", 143), ("saving", -9), ("evaluation", -9)):
        workdir, _ = run(folder, "killed", "--toy", f"--kill={kill}", code=code)
        if kill == "stop":  # Before the first step of this start, there is nothing new to save.
            assert restore.steps(workdir / "checkpoints") == [INTERVAL]
    with (workdir / "result.txt").open("a") as file:
        file.write(':::MLLOG {"namespace": "", "time')  # As if killed within a line.
    run(folder, "killed", "--toy")
    assert complies(workdir / "result.txt")
    assert logged(workdir / "result.txt") == logged(whole / "result.txt")


@pytest.mark.slow
def test_two_processes_log_the_same_events_as_one(whole, folder):
    workdir, _ = run(folder, "two", "--toy", count=2, devices=1)
    assert complies(workdir / "result.txt")
    assert logged(workdir / "result.txt") == logged(whole / "result.txt")


@pytest.mark.gate
@pytest.mark.slow
def test_evaluation_after_training_does_not_count_as_training_time(whole, folder):
    workdir, _ = run(folder, "later", "--toy", "--mode=train")
    assert convergence.read(workdir / "result.txt").status == "running"
    run(folder, "later", "--toy", "--mode=evaluate")
    assert complies(workdir / "result.txt")
    events = mllog.read(workdir / "result.txt")
    assert mllog.evaluations(events) == convergence.read(whole / "result.txt").evaluations
    (stop,) = [event for event in events if event.key == "run_stop"]
    (end,) = [event for event in events if event.key == "block_stop" and event.metadata["samples_count"] == SECOND]
    assert stop.time_ms == end.time_ms
