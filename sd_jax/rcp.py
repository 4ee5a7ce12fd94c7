"""Compares runs of the MLPerf benchmark with the reference's convergence.

    python -m sd_jax.rcp runs/mlperf/0 runs/mlperf/1 ... --out=convergence

Each argument is a result file of mllog lines, of any program, or a folder that holds result.txt
(a workdir of sd_jax.mlperf) or result_*.txt (a submission). It prints each run's samples to target,
their olympic mean and MLPerf's verdict (ruleset 5.0.0), then FID and CLIP beside the reference's
curves. --out gets rcp.json, fid.png and clip.png. The exit code is 1 where the verdict is a fail.
"""

import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from diffusion_jax import cli, figures, files
from diffusion_jax.figures import Band, Line
from sd_jax import convergence, results
from sd_jax.convergence import Curve, Verdict
from sd_jax.results import Result

_FAILED_EXIT = 1
_LABELS = {"FID": "FID", "CLIP": "CLIP score"}


def main(argv: list[str]) -> None:
    """Reads, prints, and writes into --out."""
    cli.start()
    with cli.bad_input():
        if len(argv) < 2:
            raise ValueError("name one result or more: python -m sd_jax.rcp runs/mlperf/0")
        runs = [results.read(path) for path in results.find(argv[1:])]
        batch_size = check_alike(runs)
    verdict = convergence.judge(batch_size, [run.samples_to_target for run in runs])
    print(describe(runs, verdict))
    if out := flags.FLAGS.out:
        write(pathlib.Path(out), runs, verdict)
    sys.exit(0 if verdict.passed else _FAILED_EXIT)


def check_alike(runs: Sequence[Result]) -> int:
    """The batch size of all runs; ValueError if they differ."""
    sizes = {run.batch_size: run.name for run in runs}
    if len(sizes) > 1:
        (a, first), (b, second) = list(sizes.items())[:2]
        raise ValueError(
            f"{first} is of batch size {a} and {second} of {b}: compare runs of one batch size"
        )
    return runs[0].batch_size


def describe(runs: Sequence[Result], verdict: Verdict) -> str:
    """The report, for people."""
    return "\n".join([*_runs(runs), "", *_verdict(runs, verdict), "", *_curves(runs)])


def write(out: pathlib.Path, runs: Sequence[Result], verdict: Verdict) -> None:
    """rcp.json, fid.png and clip.png into a folder, made if need be."""
    out.mkdir(parents=True, exist_ok=True)
    files.write_whole(out / "rcp.json", json.dumps(_plain(runs, verdict), indent=1))
    for metric, label in _LABELS.items():
        lines, bands = plotted(runs, metric)
        figure = figures.plot(lines, "million images", label, bands)
        files.write_whole(out / f"{metric.lower()}.png", figures.save(figure, "png"))


def plotted(runs: Sequence[Result], metric: str) -> tuple[list[Line], list[Band]]:
    """Each run's scores, the target, and the range of the reference's runs."""
    size, curve = convergence.nearest_curve(runs[0].batch_size)
    scores = _scores(curve, metric)
    reference = f"MLPerf reference, batch {size}"
    images = (curve.images / 1e6).tolist()
    band = Band(reference, images, scores.min(0).tolist(), scores.max(0).tolist())
    lines = []
    for run in runs:
        points = [(n / 1e6, s[metric]) for n, s in run.evaluations.items() if metric in s]
        lines.append(
            Line(pathlib.Path(run.name).name, [x for x, _ in points], [y for _, y in points])
        )
    most = max([*images, *(x for line in lines for x in line.x)])
    target = results.TARGETS[metric]
    return [*lines, Line("target", [0, most], [target, target])], [band]


def _runs(runs: Sequence[Result]) -> list[str]:
    width = max(len("run"), *(len(run.name) for run in runs))
    lines = [f"{'run':{width}}  batch  status   evaluations  samples to target      FID    CLIP"]
    for run in runs:
        reached = run.samples_to_target
        shown = run.evaluations.get(reached or max(run.evaluations, default=0), {})
        fid, clip = (shown.get(metric, float("nan")) for metric in _LABELS)
        lines.append(
            f"{run.name:{width}}  {run.batch_size:5}  {run.status:8} {len(run.evaluations):11}  "
            f"{f'{reached:,}' if reached else '-':>17}  {fid:7.2f}  {clip:.4f}"
        )
    return lines


def _verdict(runs: Sequence[Result], verdict: Verdict) -> list[str]:
    lines = [f"{len(runs)} runs, mean without the fastest and the slowest {verdict.mean:,.0f}"]
    if point := verdict.point:
        lines.append(
            f"reference {verdict.origin}: mean {point.mean:,.0f}, and not below {point.lowest:,.0f}"
        )
    lines.append(f"{'PASS' if verdict.passed else 'FAIL'}: {verdict.reason}")
    if verdict.passed and verdict.scale > 1:
        lines.append(f"scores are multiplied by {verdict.scale:.4f}: faster than the mean")
    if len(runs) < convergence.RUNS:
        lines.append(f"a submission has {convergence.RUNS} runs: this is a forecast")
    return lines


def _curves(runs: Sequence[Result]) -> list[str]:
    size, curve = convergence.nearest_curve(runs[0].batch_size)
    lines = [f"beside the reference of batch size {size}, its mean (and lowest to highest run):"]
    lines.append("    images       FID             reference     CLIP                    reference")
    for row in _compared(runs, curve):
        fid, clip = row["FID"], row["CLIP"]
        lines.append(
            f"{row['images']:10,} {fid['mean']:9.2f}  {fid['reference']:7.1f} "
            f"({fid['low']:5.1f} to {fid['high']:5.1f})  {clip['mean']:7.4f}  "
            f"{clip['reference']:.4f} ({clip['low']:.4f} to {clip['high']:.4f})"
        )
    return lines


def _compared(runs: Sequence[Result], curve: Curve) -> list[dict[str, Any]]:
    """At each of the reference's evaluations that a run has too (the nearest, within a tenth)."""
    rows = []
    for column, images in enumerate(curve.images.tolist()):
        row: dict[str, Any] = {"images": images}
        for metric in _LABELS:
            ours = [_at(run, metric, images) for run in runs]
            ours = [value for value in ours if value is not None]
            theirs = _scores(curve, metric)[:, column]
            ends = {"low": float(theirs.min()), "high": float(theirs.max())}
            if ours:
                row[metric] = {"mean": float(np.mean(ours)), "reference": float(theirs.mean())}
                row[metric] |= ends
        if len(row) == 1 + len(_LABELS):
            rows.append(row)
    return rows


def _at(run: Result, metric: str, images: int) -> float | None:
    """Evaluations lie at multiples of the batch size, so rarely at exactly so many images."""
    near = [n for n, s in run.evaluations.items() if metric in s and abs(n - images) < images / 10]
    closest = min(near, key=lambda n: abs(n - images), default=None)
    return None if closest is None else run.evaluations[closest][metric]


def _scores(curve: Curve, metric: str) -> np.ndarray:
    return curve.fid if metric == "FID" else curve.clip


def _plain(runs: Sequence[Result], verdict: Verdict) -> dict[str, Any]:
    _, curve = convergence.nearest_curve(runs[0].batch_size)
    point = verdict.point
    reference = {**point._asdict(), "lowest": point.lowest} if point else None
    named = [{**run._asdict(), "samples_to_target": run.samples_to_target} for run in runs]
    verdict_of = {**verdict._asdict(), "point": reference}
    return _finite({"runs": named, "verdict": verdict_of, "curves": _compared(runs, curve)})


def _finite(tree: Any) -> Any:
    """JSON has neither NaN nor infinity: they become null."""
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "Folder for rcp.json, fid.png and clip.png; default: none.")
    cli.run(main)
