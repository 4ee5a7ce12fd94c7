"""The benchmark in miniature from start to result, judged by MLPerf's own checkers."""

import pytest
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.package_checker.seed_checker import SeedChecker

from sd_jax import results
from tests.sd_jax import tiny_benchmark
from tests.sd_jax.tiny_benchmark import BATCH, INTERVAL


def complies(path):
    checker = mlp_compliance.make_checker("training", "5.0.0", False, True)
    return mlp_compliance.main(str(path), "training_5.0.0/common.yaml", checker)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_benchmark.write(tmp_path_factory.mktemp("benchmark"))


@pytest.fixture(scope="module")
def aborted(folder):
    """A run that reaches no target; what it drew makes the reference that the others reach."""
    ended, _ = tiny_benchmark.run(folder, folder / "aborted")
    log = (folder / "aborted" / "result.txt").read_text()
    tiny_benchmark.reach_at_the_second(folder, folder / "aborted")
    return ended, log


@pytest.fixture(scope="module")
def whole(folder, aborted):
    """The workdir of a run that reaches the targets in its second evaluation."""
    ended, _ = tiny_benchmark.run(folder, folder / "whole")
    assert ended.code == 0, ended.err
    return folder / "whole"


def test_a_run_that_reaches_no_target_says_so(aborted, tmp_path):
    ended, log = aborted
    assert ended.code == 1, ended.err
    (tmp_path / "result.txt").write_text(log)
    assert results.read(tmp_path / "result.txt").status == "aborted"
    assert not complies(tmp_path / "result.txt")


def test_the_result_complies(whole):
    assert complies(whole / "result.txt")
    result = results.read(whole / "result.txt")
    assert result.status == "success"
    assert result.samples_to_target == 2 * INTERVAL * BATCH
    assert list(result.evaluations) == [INTERVAL * BATCH, 2 * INTERVAL * BATCH]
    assert SeedChecker("5.0.0").check_seeds([str(whole / "result.txt")])
