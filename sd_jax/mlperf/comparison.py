"""Compare benchmark runs with MLPerf's reference runs, in text and in plots."""

import math
import pathlib
from collections.abc import Sequence

import numpy as np

from diffusion_jax import files
from diffusion_jax.evaluate import figures
from diffusion_jax.evaluate.figures import Band, Line, Plot
from diffusion_jax.logs.progress import counted
from sd_jax.mlperf import convergence, rules
from sd_jax.mlperf.convergence import Result, Verdict

_LABELS = {"FID": "FID", "CLIP": "CLIP score"}


def check_alike(runs: Sequence[Result]) -> int:
    """Return the batch size shared by all runs. Raises ValueError if they differ."""
    sizes = {run.batch_size: run.name for run in runs}
    if len(sizes) > 1:
        (a, first), (b, second) = list(sizes.items())[:2]
        raise ValueError(
            f"{first} has batch size {a}, but {second} has batch size {b}: name only runs with the same batch size"
        )
    return runs[0].batch_size


def describe(runs: Sequence[Result], verdict: Verdict) -> str:
    """Return a text that compares benchmark runs with MLPerf's reference runs.

    The text lists the runs, states the verdict, and shows the mean scores of the runs beside those
    of the reference runs.
    """
    return "\n".join([*_runs(runs), "", *_verdict(runs, verdict), "", *_curves(runs)])


def write(out: pathlib.Path, runs: Sequence[Result]) -> None:
    """Plot FID and CLIP score over the number of training images: fid.png and clip.png in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for metric, label in _LABELS.items():
        lines, bands = plotted(runs, metric)
        figure = figures.save(Plot(lines, "million images", label, bands), "png")
        files.write_whole(out / f"{metric.lower()}.png", figure)


def plotted(runs: Sequence[Result], metric: str) -> tuple[list[Line], list[Band]]:
    """Return the lines and bands of a plot of one score over millions of training images.

    One line shows the runs and another one the target. The only band is the range of MLPerf's
    reference runs with the nearest batch size. `metric` is "FID" or "CLIP".
    """
    size, curve = convergence.nearest_curve(runs[0].batch_size)
    scores = curve.fid if metric == "FID" else curve.clip
    images = (curve.images / 1e6).tolist()
    band = Band(f"MLPerf reference, batch {size}", images, scores.min(0), scores.max(0))
    x, y = [], []
    for run in runs:
        x += [
            *(n / 1e6 for n in run.evaluations),
            math.nan,  # Separates the runs, which share one line of the plot.
        ]
        y += [*(scores.get(metric, math.nan) for scores in run.evaluations.values()), math.nan]
    target, ends = rules.TARGETS[metric], [0, np.nanmax([*x, *images])]
    name = counted(len(runs), "run")
    return [Line(name, x, y), Line(f"target {target:g}", ends, [target, target])], [band]


def _runs(runs: Sequence[Result]) -> list[str]:
    width = max(len("run"), *(len(run.name) for run in runs))
    lines = [f"{'run':{width}}  batch  status   evaluations  samples to target      FID    CLIP"]
    for run in runs:
        reached = run.samples_to_target
        scores = run.evaluations.get(reached or max(run.evaluations, default=0), {})
        fid, clip = (scores.get(metric, float("nan")) for metric in _LABELS)
        lines.append(
            f"{run.name:{width}}  {run.batch_size:5}  {run.status:8} {len(run.evaluations):11}  "
            f"{f'{reached:,}' if reached else '-':>17}  {fid:7.2f}  {clip:.4f}"
        )
    return lines


def _verdict(runs: Sequence[Result], verdict: Verdict) -> list[str]:
    lines = [f"{len(runs)} runs; mean samples to target without the fastest and the slowest run: {verdict.mean:,.0f}"]
    if reference := verdict.reference:
        mean, lowest, origin = reference
        lines.append(f"MLPerf's reference {origin}: mean {mean:,.0f}; a mean of {lowest:,.0f} or more passes")
    lines.append(f"{'PASS' if verdict.passed else 'FAIL'}: {verdict.reason}")
    if verdict.passed and verdict.scale > 1:
        lines.append(
            f"MLPerf multiplies the score by {verdict.scale:.4f}, because the runs converged "
            "faster than the mean of the reference"
        )
    if len(runs) < rules.RUNS:
        lines.append(f"a submission needs {rules.RUNS} runs: with fewer runs, the verdict is preliminary")
    return lines


def _curves(runs: Sequence[Result]) -> list[str]:
    """Return a table of the mean FID and CLIP score of the runs and of the reference runs.

    It has one row for each evaluation of the reference runs near which a run was also evaluated.
    """
    size, curve = convergence.nearest_curve(runs[0].batch_size)
    lines = [f"mean of these runs, and mean (lowest to highest) of the reference at batch size {size}:"]
    lines.append("    images       FID             reference     CLIP                    reference")
    for column, images in enumerate(curve.images.tolist()):
        fid, clip = (_near(runs, metric, images) for metric in _LABELS)
        if fid and clip:
            fids, clips = curve.fid[:, column], curve.clip[:, column]
            lines.append(
                f"{images:10,} {np.mean(fid):9.2f}  {fids.mean():7.1f} ({fids.min():5.1f} to "
                f"{fids.max():5.1f})  {np.mean(clip):7.4f}  {clips.mean():.4f} ({clips.min():.4f} "
                f"to {clips.max():.4f})"
            )
    return lines


def _near(runs: Sequence[Result], metric: str, images: int) -> list[float]:
    """Return each run's score at its evaluation nearest to `images` training images.

    Runs without an evaluation within 10 % of `images` are left out. A run is rarely evaluated at
    exactly `images`, because evaluations are at multiples of the batch size.
    """
    nearest = [min(run.evaluations, key=lambda n: abs(n - images), default=0) for run in runs]
    pairs = zip(runs, nearest, strict=True)
    scores = [run.evaluations[n] for run, n in pairs if abs(n - images) < images / 10]
    return [at[metric] for at in scores if metric in at]
