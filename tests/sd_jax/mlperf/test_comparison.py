"""The command that compares runs with the reference: its output and files."""

import numpy as np
import pytest
from PIL import Image

from sd_jax.mlperf import comparison, convergence, rules
from tests.sd_jax import mllog_files

PASSING = {512_000: (240.0, 0.06), 2_560_000: (89.0, 0.16), 3_072_000: (80.0, 0.17)}


def test_convergence_reads_the_log_of_a_run(tmp_path):
    run = convergence.read(mllog_files.write(tmp_path / "r.txt", 512, PASSING))
    assert run.evaluations[512_000] == {"FID": 240.0, "CLIP": 0.06}
    assert (run.batch_size, run.samples_to_target) == (512, 2_560_000)
    aborted = convergence.read(mllog_files.write(tmp_path / "a.txt", 512, PASSING, "aborted"))
    running = convergence.read(mllog_files.write(tmp_path / "b.txt", 512, PASSING, ""))
    assert (aborted.status, running.status) == ("aborted", "running")
    assert aborted.samples_to_target is running.samples_to_target is None
    failing = convergence.read(mllog_files.write(tmp_path / "c.txt", 512, {512_000: (240.0, 0.06)}))
    assert failing.status == "success" and failing.samples_to_target is None


def test_an_evaluation_without_score_is_an_error_if_the_log_reports_success(tmp_path):
    path = mllog_files.write(tmp_path / "r.txt", 512, PASSING)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"value": 240.0' not in line))
    with pytest.raises(ValueError, match=r"r.txt lacks 'FID', which MLCommons' checker"):
        convergence.read(path)


@pytest.mark.parametrize(
    "scores, met",
    [((90.0, 0.15), True), ((90.0001, 0.15), False), ((90.0, 0.1499), False), ((float("nan"), 0.2), False)],
)
def test_both_targets_must_be_met_at_once(scores, met):
    assert rules.meets_targets(dict(zip(("FID", "CLIP"), scores, strict=True))) is met
    assert not rules.meets_targets({"FID": 1.0})


def test_targets_met_in_different_evaluations_do_not_count(tmp_path):
    scores = {1: (80.0, 0.1), 2: (95.0, 0.2), 3: (89.0, 0.151)}
    assert convergence.read(mllog_files.write(tmp_path / "r", 8, scores)).samples_to_target == 3


def test_the_report_and_its_files_compare_runs_with_the_reference(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    for i in range(3):
        mllog_files.write(folder / f"result_{i}.txt", 512, PASSING)
    runs = [convergence.read(path) for path in convergence.find([folder])]
    verdict = convergence.judge(comparison.check_alike(runs), [r.samples_to_target for r in runs])
    text = comparison.describe(runs, verdict)
    assert "PASS: no faster than the reference" in text
    assert "interpolated between batch sizes 256 and 2048: mean 2,034,701; a mean of " in text
    assert "a submission needs 10 runs: with fewer runs, the verdict is preliminary" in text
    rows = [line for line in text.splitlines() if " (" in line and " to " in line][-3:]
    assert [row.split()[0] for row in rows] == ["512,000", "2,560,000", "3,072,000"]
    assert rows[1].startswith(" 2,560,000     89.00     83.7 (")
    comparison.write(tmp_path / "out", runs)
    (all_runs, target), (band,) = comparison.plotted(runs, "FID")
    np.testing.assert_array_equal(all_runs.y, 3 * [240.0, 89.0, 80.0, np.nan])
    np.testing.assert_array_equal(all_runs.x, 3 * [0.512, 2.56, 3.072, np.nan])
    assert target.y == [90.0, 90.0]
    low, high = band.low[4], band.high[4]
    fids = convergence.read_curves()[512].fid[:, 4]
    assert (low, high) == (fids.min(), fids.max())
    for name in ("fid", "clip"):
        with Image.open(tmp_path / "out" / f"{name}.png") as picture:
            assert np.asarray(picture).std() > 10


def test_a_run_that_did_not_converge_fails(tmp_path):
    nan = float("nan")
    runs = [convergence.read(mllog_files.write(tmp_path / "r", 300, {512_000: (nan, 0.1)}, "aborted"))]
    verdict = convergence.judge(300, [None])
    assert not verdict.passed
    assert "1 of 1 runs did not converge" in comparison.describe(runs, verdict)
    comparison.write(tmp_path / "out", runs)


def test_runs_that_cannot_be_compared_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no log at .*holds result.txt or result_"):
        convergence.find([tmp_path])
    a, b = (convergence.read(mllog_files.write(tmp_path / str(n), n, PASSING)) for n in (512, 1024))
    with pytest.raises(ValueError, match=r"size 512, but .* has batch size 1024: name only runs"):
        comparison.check_alike([a, b])
    (tmp_path / "log").write_text("step 1\n")
    with pytest.raises(ValueError, match="has no event global_batch_size"):
        convergence.read(tmp_path / "log")
    (tmp_path / "log").write_text("step 1\n:::MLLOG {\n")
    with pytest.raises(ValueError, match="line 2 is a malformed mllog event"):
        convergence.read(tmp_path / "log")
