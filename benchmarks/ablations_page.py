"""The page of the ablations: tables with intervals over seeds, and what they say."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scipy import stats

MEASURES = {
    "seen_prompt_accuracy": ("seen, %", 100.0, False),
    "heldout_prompt_accuracy": ("never shown, %", 100.0, False),
    "fd_digits": ("FD", 1.0, True),
    "v_loss": ("v-loss", 1.0, True),
}
"""By column of a result: its head, what it is multiplied by, and whether less is better."""
NOTES = {
    "objective": "What the network predicts, with its levels of training: x0 with ln sigma of mean "
    "-0.4 and EDM with -1.2, deviation 1.2 both; eps and v with the cosine schedule, as DDPM; flow "
    "with logit-normal times.",
    "weighting": "How much an error counts at its level, of the same x0.",
    "network": "Both as large, to draw the same x0: the quick start's UNet, and the one that keeps "
    "magnitudes (EDM2's, config G), which comes with EDM2's optimizer; then EDM2's objective too, "
    "EDM with a learned uncertainty.",
    "guidance": "Names with their scales. The interval is sigma from 1 to 10; autoguidance is led "
    "by the run itself at a third of its steps.",
    "sampler": "At the same levels from 40 to 0.4, and then to 0. Restart goes back from 0.5 to 2 "
    "once, in 2 steps.",
    "average": "Of the weights that draw, all of the same trainings: a constant decay with its "
    "warm-up, or the width of a [power function](evaluation.md#averages-of-any-width); 0.05 and "
    "0.1 were kept, the others are made of snapshots.",
}
"""What the names on an axis stand for."""
_TIMES = {"step_ms": "ms a step", "steps": "steps", "picture_ms": "ms a picture"}


class Row(NamedTuple):
    """A variant, and its results by seed."""

    axis: str
    name: str
    results: Mapping[int, Mapping[str, Any]]


class Interval(NamedTuple):
    """A mean over seeds, and half of its 95 % interval by Student's t; inf of one seed."""

    mean: float
    half: float

    @property
    def is_noise(self) -> bool:
        """Whether 0 lies in it."""
        return abs(self.mean) <= self.half


def interval(values: Sequence[float]) -> Interval:
    """Of independent values of one normal distribution."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Interval(mean, float("inf"))
    return Interval(mean, stats.t.ppf(0.975, n - 1) * statistics.stdev(values) / n**0.5)


def difference(row: Row, base: Row, measure: str) -> Interval | None:
    """A row's values less the base's of the same seeds; None where there are none."""
    pairs = [
        (result[measure], base.results[seed][measure])
        for seed, result in row.results.items()
        if measure in result and measure in base.results.get(seed, {})
    ]
    return interval([a - b for a, b in pairs]) if pairs else None


def write(rows: Sequence[Row], machine: Mapping[str, Any]) -> str:
    """The page of all axes that have results beside those of their first row."""
    if not any(row.results for row in rows):
        return _NOTHING
    by_axis = {row.axis: [r for r in rows if r.axis == row.axis and r.results] for row in rows}
    paragraphs = _INTRODUCTION.format(**machine, **_setup(rows)).strip().split("\n\n")
    parts = [" ".join(paragraph.split()) for paragraph in paragraphs]
    for axis, of_axis in by_axis.items():
        if len(of_axis) > 1 and of_axis[0].results:
            parts += [f"## {axis.capitalize()}", NOTES[axis], _table(of_axis), _verdict(of_axis)]
    return "\n\n".join(parts) + "\n"


def _setup(rows: Sequence[Row]) -> dict[str, Any]:
    """What all results have in common, for the introduction."""
    results = [result for row in rows for result in row.results.values()]
    of = lambda name: sorted(result[name] for result in results if result.get(name))
    said = lambda values: f"{values[0]:.3g} to {values[-1]:.3g}" if values else "not measured"
    return {
        "seeds": len({seed for row in rows for seed in row.results}),
        "parameters": max(of("parameters"), default=0),
        "train_steps": max(of("train_steps"), default=0),
        "step_ms": said(of("step_ms")),
        "picture_ms": said(of("picture_ms")),
    }


def _table(rows: Sequence[Row]) -> str:
    shown = lambda measure, row: any(measure in result for result in row.results.values())
    measures = [m for m in MEASURES if any(shown(m, row) for row in rows[1:])]
    heads = [MEASURES[m][0] for m in measures]
    lines = [_line(["", *heads, *_TIMES.values()]), _line(["---"] * (1 + len(heads) + len(_TIMES)))]
    for row in rows:
        cells = [row.name]
        for measure in measures:
            cells.append(_cell(row, rows[0], measure))
        lines.append(_line([*cells, *(_time(row, name) for name in _TIMES)]))
    return "\n".join(lines)


def _cell(row: Row, base: Row, measure: str) -> str:
    """Mean and interval, in bold where the difference from the base is outside the noise."""
    values = [r[measure] for r in row.results.values() if measure in r]
    if not values:
        return ""
    _, factor, _ = MEASURES[measure]
    text = _said(interval(values), factor)
    apart = None if row is base else difference(row, base, measure)
    return f"**{text}**" if apart and not apart.is_noise else text


def _said(of: Interval, factor: float, sign: str = "") -> str:
    decimals = ".1f" if factor > 1 else ".3g"
    half = f" ± {factor * of.half:{decimals}}" if of.half < float("inf") else ""
    return f"{factor * of.mean:{sign}{decimals}}{half}"


def _time(row: Row, name: str) -> str:
    values = [r[name] for r in row.results.values() if r.get(name)]
    return f"{statistics.median(values):.3g}" if values else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _verdict(rows: Sequence[Row]) -> str:
    """By each measure the best row and by how much, and which rows are within the noise."""
    base, lines = rows[0], []
    for measure, (head, factor, less) in MEASURES.items():
        apart = {row.name: difference(row, base, measure) for row in rows[1:]}
        apart = {name: d for name, d in apart.items() if d is not None}
        if not apart:
            continue
        gain = lambda d, less=less: -d.mean if less else d.mean
        name, best = max(apart.items(), key=lambda item: gain(item[1]))
        outside = [n for n, d in apart.items() if not d.is_noise]
        better = [n for n in outside if gain(apart[n]) > 0]
        head = head.removesuffix(", %")
        by = f"{_said(best, factor, '+')}{' points' if factor > 1 else ''}"
        won = f"*{name}*, by {by}" if gain(best) > 0 else f"*{base.name}*"
        noise = " (within the noise)" if gain(best) > 0 and best.is_noise else ""
        said = [f"{head}: best is {won}{noise}"]
        if better:
            said.append(f"better than *{base.name}* outside the noise: {', '.join(better)}")
        if worse := [n for n in outside if n not in better]:
            said.append(f"worse outside the noise: {', '.join(worse)}")
        if within := [n for n in apart if n not in outside]:
            said.append(f"no difference shown: {', '.join(within)}")
        lines.append(f"- {'; '.join(said)}.")
    return "\n".join(lines)


_NOTHING = """# Ablations
Nothing has been run yet. `python -m benchmarks.ablations --workdir=runs/ablations
--page=docs/ablations.md` trains, draws, judges and writes this page
([benchmarks.md](benchmarks.md#ablations)).
"""
_INTRODUCTION = """# Ablations

What won here, on the coloured digits in a network of {parameters:,} parameters trained for
{train_steps:,} steps of 64 pictures, and by how much: no more is claimed of larger models.
`python -m benchmarks.ablations --workdir=runs/ablations --page=docs/ablations.md` trained, drew,
judged and wrote this page; started again it goes on, and `--only=sampler,guidance/none
--seeds=3,4` add to it. {device}, jax {jax}.

**Each axis changes one thing** of the quick start in half of its steps, at a constant learning
rate and without the weighting that it has since this page was first written (its objective,
guidance 2, DDIM with eta 1 in 12 steps, an average of decay 0.999), the first row of each table.
The rate is constant because in first trials, a third of the steps with a rate that fell to zero,
hardly a digit was learned; it was chosen before any rows were compared. An objective comes with
the noise levels and the grid of sampling that are its own. Scores are the judge's
(`diffusion_jax/examples/digits/judge.py`): the share of pictures with digit, ink and paper as
asked, one for each of the 272 prompts seen in training and 8 for each of the 18 never shown; FD is
the Fréchet distance of the judge's features from real pictures; the v-loss is the held-out one at
sigma 0.2, 0.5, 1, 2 and 5, by which objectives compare
([evaluation.md](evaluation.md#a-held-out-loss)), of the weights that drew.

**Time is equal** by what it is made of, so that other work on the machine changes nothing: all
trainings take the same number of steps of networks that cost as much, and a picture takes at most
24 rows of the network's input, of which a guided evaluation has two, an unguided one one; samplers
with two evaluations a step get fewer steps. Measured beside, in the process's own CPU time, which
other work on the machine does stretch: a step took {step_ms} ms, a picture {picture_ms} ms.

**Intervals** are 95 % by Student's t over {seeds} seeds, each with its own initial weights, data
order, noise and pictures. Bold is what differs from the first row outside the noise: the interval
of the difference, seed by seed, leaves out zero. Of rows that differ in nothing one in twenty is
bold by chance. Times are medians, in milliseconds of CPU time.
"""
