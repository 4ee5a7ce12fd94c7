"""The test of convergence: agreement with MLCommons' own checker, and facts of its references."""

import numpy as np
import pytest
from mlperf_logging.rcp_checker import rcp_checker

from sd_jax.mlperf import convergence
from tests.sd_jax import mllog_files

EVERY = 512_000


def theirs(folder, batch_size, samples):
    """(passed, what scores are multiplied by) of the package's checker."""
    for i, n in enumerate(samples):
        path = folder / f"result_{i}.txt"
        if n is None:
            mllog_files.write(path, batch_size, {EVERY: (200, 0.1)}, "aborted")
        else:
            mllog_files.write(path, batch_size, {EVERY: (200, 0.1), n: (80, 0.2), n + 1: (70, 0.3)})
    passed, _, scale = rcp_checker.check_directory(
        str(folder), "training", "5.0.0", False, False, rcp_pass="pruned_rcps"
    )
    return passed, scale


def test_the_reference_is_the_packages():
    checker = rcp_checker.RCP_Checker("training", "5.0.0", "stable_diffusion", False)
    records = {r["BS"]: r for r in checker.rcp_data.values()}
    assert records.keys() == convergence.REFERENCE.keys()
    for size, (rate, counts) in convergence.REFERENCE.items():
        record = records[size]
        samples = sorted(n for n, runs in counts.items() for _ in range(runs))
        assert record["Epochs to converge"] == samples
        assert record["Hyperparams"]["opt_base_learning_rate"] == rate
        point = convergence.interpolated(size, *[convergence._point(size)] * 2)
        assert point.mean == pytest.approx(record["RCP Mean"], rel=1e-12)
        assert point.lowest == pytest.approx(record["Min Epochs"], abs=1e-3)  # A search to 1e-4.


@pytest.mark.parametrize("batch_size", [128, 256, 384, 512, 768, 1024, 1536, 2048, 4096])
def test_verdicts_are_those_of_the_packages_checker(batch_size, tmp_path):
    rng = np.random.default_rng(batch_size)
    passed = set()
    for start in (1, 2, 3, 4, 5, 6, 7, 8):
        samples = [EVERY * (start + int(n)) for n in rng.integers(0, 3, 10)]
        ours = convergence.judge(batch_size, samples)
        assert (ours.passed, ours.scale) == pytest.approx(theirs(tmp_path, batch_size, samples))
        passed.add(ours.passed)
    assert passed == ({False} if batch_size == 4096 else {False, True})


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_one_run_may_not_converge(lost, tmp_path):
    samples = [2_560_000] * (10 - lost) + [None] * lost
    ours = convergence.judge(512, samples)
    assert ours.passed == theirs(tmp_path, 512, samples)[0] == (lost < 2)
    if lost == 2:
        assert ours.reason == "2 of 10 runs did not converge"


def test_points_above_the_line_between_their_neighbours_are_pruned():
    point = lambda size, mean: convergence.Point(size, mean, 0.1, 10)
    names = lambda points: [p.batch_size for p in convergence.pruned(points)]
    assert names([point(1, 9.0), point(2, 1.0), point(4, 2.0), point(8, 5.0)]) == [2, 4, 8]
    assert names([point(1, 1.0), point(2, 3.0), point(4, 3.0), point(8, 8.0)]) == [1, 4, 8]


def test_the_threshold_is_a_t_test_by_hand():
    # Of 12 + 8 runs, t(18) at 95 % is 1.7341 (any table); 100 - 1.7341 * 10 * sqrt(1/12 + 1/8).
    assert convergence.Point(1, 100.0, 10.0, 12).lowest == pytest.approx(92.0849, abs=1e-3)


def test_the_reference_curves():
    curves = convergence.read_curves()
    runs = {size: curve.fid.shape for size, curve in curves.items()}
    assert runs == {512: (14, 10), 1024: (13, 11), 2048: (13, 12)}
    # Means of the table in the reference's readme, and the first evaluation that passes.
    assert curves[512].fid.mean(0)[4] == pytest.approx(83.7, abs=0.05)
    assert curves[2048].clip.mean(0)[-1] == pytest.approx(0.201, abs=5e-4)
    means = {}
    for size, curve in curves.items():
        first = np.argmax((curve.fid <= 90) & (curve.clip >= 0.15), axis=1)
        means[size] = round(float(curve.images[first].mean()))
    assert means == {512: 2_596_571, 1024: 2_914_462, 2048: 4_017_231}
    assert convergence.nearest_curve(700)[0] == 512 and convergence.nearest_curve(800)[0] == 1024
