"""Whether runs converge as MLPerf's reference does: its points and its test, through rcp_checker.

Of ten runs the fastest and the slowest are dropped, and the mean of the others may not be
significantly below the reference's at the same batch size. The reference's points, their pruning
and the limit of the t-test are MLCommons' own code and data (mlperf_logging.rcp_checker).
"""

import csv
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from diffusion_jax.evaluate.mlperf import rcp
from sd_jax.mlperf import mllog, rules


class Result(NamedTuple):
    """A benchmark run as its log tells it, over or not."""

    name: str
    """The workdir, or the file of another program."""
    batch_size: int
    status: str
    """"running" until there is a run_stop, which says "success" or "aborted"."""
    evaluations: dict[int, dict[str, float]]
    """{samples: {"FID": ..., "CLIP": ...}}, ascending; a score may still be missing."""
    samples_to_target: int | None
    """Samples at the first evaluation that meets both targets; None unless it succeeded."""


class Reference(NamedTuple):
    """The samples to target of the reference's runs at one batch size."""

    mean: float
    """Without the fastest and the slowest run."""
    lowest: float
    """The lowest mean of a submission's runs that is not significantly faster."""
    origin: str
    """How it follows from the published points, for people."""


class Verdict(NamedTuple):
    """The outcome of the test on runs of one batch size."""

    passed: bool
    reason: str
    mean: float
    """Olympic, in samples; infinite where runs did not converge."""
    reference: Reference | None = None
    scale: float = 1.0
    """A submission's score is multiplied by it: above 1 for runs faster than the reference."""


class Curve(NamedTuple):
    """Reference runs of one batch size: scores of each run at each evaluation."""

    images: Int[np.ndarray, "E"]
    fid: Float[np.ndarray, "R E"]
    clip: Float[np.ndarray, "R E"]


def find(paths: Sequence[str | os.PathLike[str]]) -> list[pathlib.Path]:
    """The result files that are named, or lie in a named folder as result.txt or result_*.txt.

    FileNotFoundError if a path has none.
    """
    results = []
    for path in map(pathlib.Path, paths):
        here = [*path.glob(mllog.RESULT), *sorted(path.glob("result_*.txt"))]
        here = here if path.is_dir() else [path]
        if not here or not here[0].is_file():
            raise FileNotFoundError(
                f"no result at {path}: give a file of mllog lines, or a folder that holds "
                f"{mllog.RESULT} or result_*.txt"
            )
        results += here
    return results


def read(path: str | os.PathLike[str]) -> Result:
    """Reads a result file; ValueError if it holds no batch size, which every run logs first."""
    path = pathlib.Path(path)
    events = mllog.read(path)
    sizes = [event.value for event in events if event.key == "global_batch_size"]
    if not sizes:
        raise ValueError(f"{path} logs no global_batch_size: it is no result of a benchmark run")
    name = str(path.parent if path.name == mllog.RESULT else path)
    status, evaluations = mllog.status(events), mllog.evaluations(events)
    return Result(name, int(sizes[-1]), status, evaluations, _samples_to_target(path, status))


def judge(batch_size: int, samples: Sequence[int | None]) -> Verdict:
    """The test of MLPerf's rules on each run's samples to target; None for one without.

    One run may fail to converge. A batch size that the reference lacks is interpolated; below its
    smallest, runs pass that are no faster than that one; above its largest there is no passing.
    """
    mean = olympic_mean([math.inf if n is None else n for n in samples])
    if (lost := list(samples).count(None)) > 1 or not math.isfinite(mean):
        return Verdict(False, f"{lost} of {len(samples)} runs did not converge", mean)
    reference = reference_at(batch_size)
    if reference is None:
        reason = f"no reference of batch size {batch_size}: one would have to be submitted"
        return Verdict(False, reason, mean)
    passed = mean >= reference.lowest
    reason = "no faster than the reference" if passed else "faster than the reference allows"
    return Verdict(passed, reason, mean, reference, max(1.0, reference.mean / mean))


def olympic_mean(values: Sequence[float | int]) -> float:
    """The mean without the lowest and the highest; of fewer than three values, of all."""
    ordered = sorted(values)
    return float(np.mean(ordered[1:-1] if len(ordered) > 2 else ordered))


def reference_at(batch_size: int) -> Reference | None:
    """The reference at any batch size; None above its largest."""
    checker = _rcp_checker().RCP_Checker("training", rules.VERSION, rules.NAME, False)
    points = sorted(checker.pruned_rcp_data.values(), key=lambda point: point["BS"])
    at_least = [point for point in points if point["BS"] >= batch_size]
    below = [point for point in points if point["BS"] < batch_size]
    if not at_least:
        return None
    point, size = at_least[0], at_least[0]["BS"]
    origin = f"of batch size {size}"
    if size > batch_size and not below:
        origin += ", the smallest there is"
    elif size > batch_size:
        origin = f"interpolated between batch sizes {below[-1]['BS']} and {size}"
        _, point = checker._create_interp_rcp(batch_size, below[-1], point)
    return Reference(float(point["RCP Mean"]), float(point["Min Epochs"]), origin)


def read_curves() -> dict[int, Curve]:
    """The reference's FID and CLIP at every evaluation, by batch size (1.25e-7 a sample)."""
    with rcp.PATH.open() as file:
        columns = ("global_batch_size", "run", "images", "fid", "clip")
        rows = np.array([[float(row[c]) for c in columns] for row in csv.DictReader(file)])
    rows = rows[np.lexsort(rows.T[2::-1])]  # By batch size, run and images.
    return {int(size): _curve(rows[rows[:, 0] == size]) for size in np.unique(rows[:, 0])}


def nearest_curve(batch_size: int) -> tuple[int, Curve]:
    """The curve of the batch size that is nearest by ratio, and that batch size."""
    curves = read_curves()
    size = min(curves, key=lambda size: abs(math.log(size / batch_size)))
    return size, curves[size]


def _rcp_checker() -> Any:
    return mllog.package("rcp_checker.rcp_checker")


def _samples_to_target(path: pathlib.Path, status: str) -> int | None:
    if status != mllog.SUCCESS:  # Of which the checker would only warn.
        return None
    try:
        _, samples, *_ = _rcp_checker().read_submission_file(path, rules.VERSION, False)
    except ValueError:  # The least of none: no evaluation meets the targets after all.
        return None
    except KeyError as error:
        missing = f"an evaluation of {path} has no {error}, which MLCommons' checker reads of each"
        raise ValueError(missing) from error
    return int(samples)


def _curve(rows: Float[np.ndarray, "N 5"]) -> Curve:
    images = np.unique(rows[:, 2]).astype(int)
    fid, clip = rows[:, 3:].T.reshape(2, -1, len(images))
    return Curve(images, fid, clip)
