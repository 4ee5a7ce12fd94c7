"""Write Markdown tables of how benchmark runs converged, in the form that MLPerf publishes."""

import collections
import statistics
from collections.abc import Iterator, Sequence

from sd_jax.mlperf import rules
from sd_jax.mlperf.convergence import Result

_CONVERGENCE = (
    "global batch size", "runs", "converged", "mean samples to target", "standard deviation",
    "lowest", "highest", "mean steps", "runs by samples",
)  # fmt: skip
_CURVES = ("samples", "global batch size", "runs", *(f"mean {name}" for name in rules.TARGETS))


def markdown(runs: Sequence[Result]) -> str:
    """Return two Markdown tables of benchmark runs, sorted by batch size.

    The first table has one row per batch size, and shows on how many images the runs trained before
    they met the targets. The second has one row per evaluation, and shows the mean scores.
    """
    by_size = collections.defaultdict(list)
    for run in sorted(runs, key=lambda run: run.batch_size):
        by_size[run.batch_size].append(run)
    lines = [_row(_CONVERGENCE), _row(["---"] * len(_CONVERGENCE))]
    lines += [_row(_convergence(size, alike)) for size, alike in by_size.items()]
    lines += ["", _row(_CURVES), _row(["---"] * len(_CURVES))]
    lines += [_row(cells) for size, alike in by_size.items() for cells in _curve(size, alike)]
    return "\n".join(lines)


def _convergence(size: int, runs: Sequence[Result]) -> list[str]:
    reached = sorted(run.samples_to_target for run in runs if run.samples_to_target)
    cells = [f"{size:,}", str(len(runs)), str(len(reached))]
    if not reached:
        return [*cells, *["-"] * 6]
    mean = statistics.mean(reached)
    spread = f"{statistics.stdev(reached):,.0f}" if len(reached) > 1 else "-"
    counts = collections.Counter(reached).items()
    steps = f"{mean / size:,.0f}"
    by_samples = ", ".join(f"{count} x {samples:,}" for samples, count in counts)
    return [
        *cells,
        f"{mean:,.0f}",
        spread,
        f"{reached[0]:,}",
        f"{reached[-1]:,}",
        steps,
        by_samples,
    ]


def _curve(size: int, runs: Sequence[Result]) -> Iterator[list[str]]:
    for samples in sorted({n for run in runs for n in run.evaluations}):
        at_samples = [run.evaluations[samples] for run in runs if samples in run.evaluations]
        whole = [scores for scores in at_samples if scores.keys() >= rules.TARGETS.keys()]
        if whole:
            fid, clip = (statistics.fmean(s[name] for s in whole) for name in rules.TARGETS)
            yield [f"{samples:,}", f"{size:,}", str(len(whole)), f"{fid:.1f}", f"{clip:.3f}"]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
