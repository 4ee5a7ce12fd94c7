"""MLPerf's convergence test: runs must not converge faster than MLPerf's reference runs.

A run's samples to target are its number of training images at the first evaluation that meets the
targets for FID and CLIP score. The test drops the fastest and the slowest of ten runs. The mean of
the others must not be significantly below the mean of the reference runs at the same batch size.
MLCommons' package (mlperf_logging.rcp_checker) holds the means of the reference runs and computes
the limit by a t-test.
"""

import csv
import math
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from diffusion_jax.evaluate.mlperf import rcp
from sd_jax.mlperf import mllog, rules

_CHECKER = "rcp_checker.rcp_checker"


class Result(NamedTuple):
    """The outcome of a benchmark run, finished or not, read from its log."""

    name: str
    """A name for the run: the path of its log, or of the log's folder if the log is called
    result.txt."""
    batch_size: int
    status: str
    """The status of the run: "running" until the log has a run_stop event, then "success" or
    "aborted"."""
    evaluations: dict[int, dict[str, float]]
    """The scores {"FID": ..., "CLIP": ...} of each evaluation, keyed by the number of training
    images, in ascending order. A score is missing if the log ends within the evaluation."""
    samples_to_target: int | None
    """Training images at the first evaluation that meets both targets; None if the run has not
    ended with success."""


class ReferenceRuns(NamedTuple):
    """Samples to target of MLPerf's reference runs at one batch size."""

    mean: float
    """The mean without the fastest and the slowest reference run."""
    lowest: float
    """The lowest mean with which runs pass the test: lower means are significantly below `mean`."""
    origin: str
    """Text that names the published batch sizes from which the values are derived, such as "of
    batch size 512"."""


class Verdict(NamedTuple):
    """The outcome of the convergence test on runs of one batch size."""

    passed: bool
    reason: str
    """Text that states why the runs passed or failed."""
    mean: float
    """The mean samples to target without the fastest and the slowest run; infinite if too many runs
    did not converge."""
    reference: ReferenceRuns | None = None
    """The reference with which the runs were compared; None if there is none, or if too many runs
    did not converge."""
    scale: float = 1.0
    """The factor by which MLPerf multiplies the score of a submission. It is above 1 if the runs
    converged faster than the mean reference run."""


class Curve(NamedTuple):
    """The scores of R reference runs with the same batch size at E evaluations."""

    images: Int[np.ndarray, "E"]
    """The number of training images at each evaluation."""
    fid: Float[np.ndarray, "R E"]
    clip: Float[np.ndarray, "R E"]


def find(paths: Sequence[str | os.PathLike[str]]) -> list[pathlib.Path]:
    """Return the paths of the logs of benchmark runs.

    Each element of `paths` is a log, or a folder that holds result.txt or result_*.txt. Raises
    FileNotFoundError if an element is neither.
    """
    results = []
    for path in map(pathlib.Path, paths):
        logs = [*path.glob(mllog.RESULT), *sorted(path.glob("result_*.txt"))]
        logs = logs if path.is_dir() else [path]
        if not logs or not logs[0].is_file():
            raise FileNotFoundError(
                f"there is no log at {path}: name a file of mllog lines, or a folder that holds "
                f"{mllog.RESULT} or result_*.txt"
            )
        results += logs
    return results


def read(path: str | os.PathLike[str]) -> Result:
    """Read the outcome of a benchmark run from its log.

    Raises:
        ValueError: If the log lacks the batch size or holds a malformed line.
    """
    path = pathlib.Path(path)
    events = mllog.read(path)
    sizes = [event.value for event in events if event.key == "global_batch_size"]
    if not sizes:
        raise ValueError(
            f"{path} has no event global_batch_size, so it is not the log of a benchmark run: name another file"
        )
    name = str(path.parent if path.name == mllog.RESULT else path)
    status, evaluations = mllog.status(events), mllog.evaluations(events)
    return Result(name, int(sizes[-1]), status, evaluations, _samples_to_target(path, status))


def judge(batch_size: int, samples: Sequence[int | None]) -> Verdict:
    """Apply MLPerf's convergence test: runs must not converge faster than the reference runs.

    The test also fails if more than one run did not converge, or if there is no reference for the
    batch size.

    Args:
        batch_size: The global batch size of all runs.
        samples: The samples to target of each run; None for a run that did not converge.
    """
    ordered = sorted(math.inf if n is None else n for n in samples)
    mean = float(np.mean(ordered[1:-1] if len(ordered) > 2 else ordered))
    if (lost := list(samples).count(None)) > 1 or not math.isfinite(mean):
        return Verdict(False, f"{lost} of {len(samples)} runs did not converge", mean)
    reference = reference_at(batch_size)
    if reference is None:
        reason = f"MLPerf has no reference runs for a batch size as large as {batch_size}: submit reference runs first"
        return Verdict(False, reason, mean)
    passed = mean >= reference.lowest
    reason = "no faster than the reference" if passed else "faster than the reference allows"
    return Verdict(passed, reason, mean, reference, max(1.0, reference.mean / mean))


def reference_at(batch_size: int) -> ReferenceRuns | None:
    """Return how many training samples MLPerf's reference runs needed to reach the targets.

    For a batch size between two published ones, the values are interpolated. For a batch size below
    the smallest published one, the values of the smallest are returned. Above the largest one,
    there is no reference, and the result is None.
    """
    checker = mllog.package(_CHECKER).RCP_Checker("training", rules.VERSION, rules.NAME, False)
    points = sorted(checker.pruned_rcp_data.values(), key=lambda point: point["BS"])
    at_least = [point for point in points if point["BS"] >= batch_size]
    below = [point for point in points if point["BS"] < batch_size]
    if not at_least:
        return None
    point, size = at_least[0], at_least[0]["BS"]
    origin = f"of batch size {size}"
    if size > batch_size and not below:
        origin += ", the smallest one"
    elif size > batch_size:
        origin = f"interpolated between batch sizes {below[-1]['BS']} and {size}"
        _, point = checker._create_interp_rcp(batch_size, below[-1], point)
    return ReferenceRuns(float(point["RCP Mean"]), float(point["Min Epochs"]), origin)


def read_curves() -> dict[int, Curve]:
    """Return the scores of MLPerf's reference runs at each evaluation, keyed by batch size.

    These runs used a learning rate of 1.25e-7 times the batch size.
    """
    with rcp.PATH.open() as file:
        columns = ("global_batch_size", "run", "images", "fid", "clip")
        rows = np.array([[float(row[c]) for c in columns] for row in csv.DictReader(file)])
    rows = rows[np.lexsort(rows.T[2::-1])]  # By batch size, run and images.
    return {int(size): _curve(rows[rows[:, 0] == size]) for size in np.unique(rows[:, 0])}


def nearest_curve(batch_size: int) -> tuple[int, Curve]:
    """Return the batch size of reference runs nearest to `batch_size`, and these runs' scores.

    The batch sizes are compared by their ratio.
    """
    curves = read_curves()
    size = min(curves, key=lambda size: abs(math.log(size / batch_size)))
    return size, curves[size]


def _samples_to_target(path: pathlib.Path, status: str) -> int | None:
    if status != mllog.SUCCESS:  # MLCommons' checker would only warn.
        return None
    try:
        _, samples, *_ = mllog.package(_CHECKER).read_submission_file(path, rules.VERSION, False)
    except ValueError:  # min() of an empty list: no evaluation meets the targets.
        return None
    except KeyError as error:
        missing = (
            f"an evaluation in {path} lacks {error}, which MLCommons' checker needs: write the log "
            "with sd_jax.mlperf, or add this field"
        )
        raise ValueError(missing) from error
    return int(samples)


def _curve(rows: Float[np.ndarray, "N 5"]) -> Curve:
    images = np.unique(rows[:, 2]).astype(int)
    fid, clip = rows[:, 3:].T.reshape(2, -1, len(images))
    return Curve(images, fid, clip)
