"""Whether runs converge as MLPerf's reference does: its points, its curves, its test.

The rules of training 5.0.0: of ten runs the fastest and the slowest are dropped, and the mean of
the others may not be significantly below the reference's at the same batch size.
"""

import csv
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.special
from jaxtyping import Float, Int

from diffusion_jax.evaluate import report

RUNS = 10
"""Of a submission."""
_SIGNIFICANCE = 0.05

# {batch size: (learning rate a sample, {samples to target: how many runs})}, from the rcp_checker
# of MLCommons' logging repository, ruleset 5.0.0. All have 1,000 steps of warm-up.
REFERENCE = {
    256: (2.8e-7, {1_536_000: 13, 2_048_000: 7}),
    384: (2.3e-7, {1_536_768: 2, 2_049_024: 16, 2_561_280: 2}),
    512: (2.3e-7, {1_536_000: 2, 2_048_000: 14, 2_560_000: 4}),
    1024: (1.25e-7, {2_560_000: 6, 3_072_000: 7}),
    2048: (1.25e-7, {3_584_000: 4, 4_096_000: 7, 4_608_000: 2}),
}


class Point(NamedTuple):
    """A reference convergence point: the samples that a batch size takes."""

    batch_size: int
    mean: float
    """Without the fastest and the slowest run."""
    std: float
    """Of all runs, divided by n."""
    runs: int
    """How many the mean is of, as the test counts them."""

    @property
    def lowest(self) -> float:
        """The lowest mean of a submission's eight runs that is not significantly faster.

        A one-sided t-test of two means of this one standard deviation.
        """
        of_mean = math.sqrt(1 / self.runs + 1 / (RUNS - 2))
        return self.mean - self.std * of_mean * _quantile(self.runs + RUNS - 4)


class Verdict(NamedTuple):
    """What the test says of runs of one batch size."""

    passed: bool
    reason: str
    mean: float
    """Olympic, in samples; infinite where runs did not converge."""
    point: Point | None
    """What they were compared with."""
    origin: str
    """Where the point comes from, for people."""
    scale: float
    """What a score is multiplied by: above 1 where the runs were faster than the reference."""


class Curve(NamedTuple):
    """Reference runs of one batch size: scores of each run at each evaluation."""

    images: Int[np.ndarray, "E"]
    fid: Float[np.ndarray, "R E"]
    clip: Float[np.ndarray, "R E"]


def judge(batch_size: int, samples: Sequence[int | None]) -> Verdict:
    """The test of MLPerf's rules on each run's samples to target; None for one without.

    One run may fail to converge. A batch size that the reference lacks is interpolated; below its
    smallest, runs pass that are no faster than that one; above its largest there is no passing.
    """
    mean = olympic_mean([math.inf if n is None else n for n in samples])
    if (lost := list(samples).count(None)) > 1 or not math.isfinite(mean):
        reason = f"{lost} of {len(samples)} runs did not converge"
        return Verdict(False, reason, mean, None, "", 1.0)
    points = pruned([_point(size) for size in sorted(REFERENCE)])
    low = [point for point in points if point.batch_size <= batch_size]
    high = [point for point in points if point.batch_size >= batch_size]
    if not high:
        reason = f"no reference of batch size {batch_size}: one would have to be submitted"
        return Verdict(False, reason, mean, None, "", 1.0)
    point = interpolated(batch_size, low[-1], high[0]) if low else high[0]
    passed = mean >= point.lowest
    reason = "no faster than the reference" if passed else "faster than the reference allows"
    scale = max(1.0, point.mean / mean)
    return Verdict(passed, reason, mean, point, _origin(batch_size, low, high), scale)


def olympic_mean(values: Sequence[float | int]) -> float:
    """The mean without the lowest and the highest; of fewer than three values, of all."""
    ordered = sorted(values)
    return float(np.mean(ordered[1:-1] if len(ordered) > 2 else ordered))


def pruned(points: Sequence[Point]) -> list[Point]:
    """Drops the points that are slower than the line between their neighbours.

    Those below the batch size that converges fastest go first, then the others in turn, once.
    """
    fastest = min(points, key=lambda point: point.mean)
    kept = [point for point in points if point.batch_size >= fastest.batch_size]
    i = 1
    while i < len(kept) - 1:
        if kept[i].mean > interpolated(kept[i].batch_size, kept[i - 1], kept[i + 1]).mean:
            del kept[i]
        else:
            i += 1
    return kept


def interpolated(batch_size: int, low: Point, high: Point) -> Point:
    """Mean and deviation between two points, linear in the batch size; a point itself is exact."""
    if batch_size in (low.batch_size, high.batch_size):
        return low if batch_size == low.batch_size else high
    share = (batch_size - low.batch_size) / (high.batch_size - low.batch_size)
    between = lambda a, b: a + share * (b - a)
    return Point(batch_size, between(low.mean, high.mean), between(low.std, high.std), 2 * RUNS)


def read_curves() -> dict[int, Curve]:
    """The reference's FID and CLIP at every evaluation, by batch size (1.25e-7 a sample)."""
    with report.RCP.open(newline="") as file:
        rows = sorted(csv.DictReader(file), key=_place)
    groups = itertools.groupby(rows, lambda row: int(row["global_batch_size"]))
    return {size: _curve(list(group)) for size, group in groups}


def nearest_curve(batch_size: int) -> tuple[int, Curve]:
    """The curve of the batch size that is nearest by ratio, and that batch size."""
    curves = read_curves()
    size = min(curves, key=lambda size: abs(math.log(size / batch_size)))
    return size, curves[size]


def _origin(batch_size: int, low: Sequence[Point], high: Sequence[Point]) -> str:
    if not low:
        return f"of batch size {high[0].batch_size}, the smallest there is"
    if low[-1] is high[0]:
        return f"of batch size {batch_size}"
    return f"interpolated between batch sizes {low[-1].batch_size} and {high[0].batch_size}"


def _point(batch_size: int) -> Point:
    _, counts = REFERENCE[batch_size]
    samples = [n for n, runs in counts.items() for _ in range(runs)]
    return Point(batch_size, olympic_mean(samples), float(np.std(samples)), len(samples) - 2)


def _quantile(freedom: int) -> float:
    return float(scipy.special.stdtrit(freedom, 1 - _SIGNIFICANCE))


def _place(row: dict[str, str]) -> tuple[int, int, int]:
    return int(row["global_batch_size"]), int(row["run"]), int(row["images"])


def _curve(rows: Sequence[dict[str, str]]) -> Curve:
    images = sorted({int(row["images"]) for row in rows})
    table = lambda column: np.array([float(row[column]) for row in rows]).reshape(-1, len(images))
    return Curve(np.array(images), table("fid"), table("clip"))
