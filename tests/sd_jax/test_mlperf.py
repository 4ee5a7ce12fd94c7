"""The benchmark in miniature from start to result, judged by MLPerf's own checkers.

Its processes draw ten pictures for each of two evaluations, of which the second meets the targets.
One run has the real networks, tiny; in the others a product of matrices stands for them.
"""

import numpy as np
import pytest
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.package_checker.seed_checker import SeedChecker

from diffusion_jax.metrics import frechet, stats_files
from diffusion_jax.metrics.features import gaussian
from sd_jax import results
from tests.sd_jax import tiny_benchmark
from tests.sd_jax.tiny_benchmark import BATCH, CAPTIONS, INTERVAL

FIRST, SECOND = INTERVAL * BATCH, 2 * INTERVAL * BATCH
ONCE = (
    "submission_division", "submission_benchmark", "init_stop", "run_start", "run_stop",
    "train_samples", "eval_samples", "gradient_accumulation_steps", "opt_name", "opt_adamw_beta_1",
    "opt_adamw_beta_2", "opt_adamw_epsilon", "opt_adamw_weight_decay", "opt_base_learning_rate",
    "opt_learning_rate_warmup_steps", "cache_clear", "init_start", "global_batch_size",
    "block_start", "block_stop", "eval_accuracy",
)  # fmt: skip


def complies(path):
    """Whether MLCommons' checker passes a file, warnings as errors."""
    checker = mlp_compliance.make_checker("training", "5.0.0", False, True)
    return mlp_compliance.main(str(path), "training_5.0.0/common.yaml", checker)[0]


def said(path):
    """A log without its times."""
    return [(e.key, e.value, dict(e.metadata)) for e in results.read_events(path)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_benchmark.write(tmp_path_factory.mktemp("benchmark"))


@pytest.fixture(scope="module")
def aborted(folder):
    """A run that meets no target; what it drew makes the reference that the others reach."""
    (ended,) = tiny_benchmark.run(folder, folder / "aborted")
    tiny_benchmark.reach_at_the_second(folder, folder / "aborted")
    return ended


@pytest.fixture(scope="module")
def whole(folder, aborted):
    """The workdir of a run that is left alone."""
    (ended,) = tiny_benchmark.run(folder, folder / "whole")
    assert ended.code == 0, ended.err
    return folder / "whole"


def test_the_real_networks_run_to_the_end(folder, aborted):
    del aborted  # It comes first: the other runs' reference is far from these pictures.
    (ended,) = tiny_benchmark.run(folder, folder / "real", nets="real")
    assert ended.code == 1, ended.err
    result = results.read(folder / "real" / "result.txt")
    assert result.status == "aborted" and list(result.evaluations) == [FIRST, SECOND]
    fids = [scores["FID"] for scores in result.evaluations.values()]
    assert fids[0] != fids[1] and np.isfinite(fids).all()


def test_a_run_that_meets_no_target_says_so(folder, aborted):
    assert aborted.code == 1, aborted.err
    result = results.read(folder / "aborted" / "result.txt")
    assert result.status == "aborted" and len(result.evaluations) == 2
    assert not complies(folder / "aborted" / "result.txt")


def test_the_result_complies_and_each_key_is_needed(whole, tmp_path):
    path, other = whole / "result.txt", tmp_path / "result.txt"
    assert complies(path)
    assert SeedChecker("5.0.0").check_seeds([str(path)])
    lines = path.read_text().splitlines(keepends=True)
    for key in ONCE:
        other.write_text("".join(line for line in lines if f'"key": "{key}"' not in line))
        assert not complies(other), key
    other.write_text("".join(line for line in lines if f'"samples_count": {FIRST}' not in line))
    assert not complies(other)  # One evaluation is too few.


def test_the_result_says_what_was_done(whole):
    result = results.read(whole / "result.txt")
    assert (result.status, result.samples_to_target) == ("success", SECOND)
    values = {event.key: event.value for event in results.read_events(whole / "result.txt")}
    assert values["seed"] == 7 and values["train_samples"] == 24
    assert values["eval_samples"] == CAPTIONS and values["opt_base_learning_rate"] == 0.02
    places = {metadata["file"] for _, _, metadata in said(whole / "result.txt")}
    assert places == {"sd_jax/mlperf.py"}
    blocks = [(key, metadata["samples_count"]) for key, _, metadata in said(whole / "result.txt")
              if key.startswith(("block", "eval_st"))]  # fmt: skip
    assert blocks == [
        ("block_start", 0), ("block_stop", FIRST), ("eval_start", FIRST), ("eval_stop", FIRST),
        ("block_start", FIRST), ("block_stop", SECOND), ("eval_start", SECOND),
        ("eval_stop", SECOND),
    ]  # fmt: skip


def test_the_scores_are_of_each_caption_once(whole, folder):
    real = frechet.reference(stats_files.read(folder / "reference.npz").gaussian)
    for samples, scores in results.read(whole / "result.txt").evaluations.items():
        step = whole / f"evaluation/mlperf/step_{samples // BATCH:08}"
        parts = [np.load(part) for part in sorted(step.glob("*.npz"))]
        rows = np.concatenate([part["inception"] for part in parts])
        assert rows.shape == (CAPTIONS, tiny_benchmark.WIDTH)
        assert len(np.unique(rows, axis=0)) == CAPTIONS
        assert scores["FID"] == frechet.distance(gaussian(rows), real)
        assert scores["CLIP"] == np.concatenate([part["clip"] for part in parts]).mean()


def test_killed_in_training_saving_and_evaluation_it_ends_alike(whole, folder):
    workdir = folder / "killed"
    for kill in ("training", "saving", "evaluation"):
        (ended,) = tiny_benchmark.run(folder, workdir, kill=kill)
        assert ended.code == -9, (kill, ended.err)
    with (workdir / "result.txt").open("a") as file:
        file.write(':::MLLOG {"namespace": "", "time')  # Killed in a line.
    (ended,) = tiny_benchmark.run(folder, workdir)
    assert ended.code == 0, ended.err
    assert complies(workdir / "result.txt")
    assert said(workdir / "result.txt") == said(whole / "result.txt")


def test_two_processes_say_the_same(whole, folder):
    ended = tiny_benchmark.run(folder, folder / "two", devices=1, processes=2)
    assert [process.code for process in ended] == [0, 0], ended[0].err
    assert complies(folder / "two" / "result.txt")
    ours, theirs = said(folder / "two" / "result.txt"), said(whole / "result.txt")
    assert [(key, metadata) for key, _, metadata in ours] == [(k, m) for k, _, m in theirs]
    for (key, a, _), (_, b, _) in zip(ours, theirs, strict=True):
        # Sums of two processes' gradients are rounded in another order.
        assert a == (pytest.approx(b, rel=1e-3, abs=1e-2) if key == "eval_accuracy" else b)


def test_evaluation_may_come_after_training_and_does_not_count(whole, folder):
    workdir = folder / "later"
    (trained,) = tiny_benchmark.run(folder, workdir, "--mode=train")
    assert trained.code == 0, trained.err
    assert results.read(workdir / "result.txt").status == "running"
    (ended,) = tiny_benchmark.run(folder, workdir, "--mode=evaluate")
    assert ended.code == 0, ended.err
    assert complies(workdir / "result.txt")
    events = results.read_events(workdir / "result.txt")
    assert results.evaluations_of(events) == results.read(whole / "result.txt").evaluations
    (stop,) = [event for event in events if event.key == "run_stop"]
    (end,) = [event for event in events if event.key == "block_stop"
              and event.metadata["samples_count"] == SECOND]  # fmt: skip
    assert stop.time_ms == end.time_ms
