"""Text of docs/lab/ablations.md: tables of scores with confidence intervals, and conclusions."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scipy import stats

MEASURES = {
    "seen_prompt_accuracy": ("seen prompts, %", 100.0, False),
    "heldout_prompt_accuracy": ("prompts never shown, %", 100.0, False),
    "fd_digits": ("FD", 1.0, True),
    "v_loss": ("v-loss", 1.0, True),
}
"""Displayed scores, by their name in a result: (heading, factor, whether lower is better).

The factor multiplies the score for display."""
NOTES = {
    "objective": "In each row, the network predicts another target. The noise levels in training "
    "differ too: x0 and EDM train with normally distributed ln sigma, of means -0.4 and -1.2, "
    "respectively, and standard deviation 1.2. eps and v use the cosine noise schedule, and flow "
    "uses logit-normal times.",
    "weighting": "Each row weights the loss by another function of the noise level. The network "
    "predicts x0.",
    "network": "All networks have the same widths. *UNet* is the network of the quick start. "
    "*magnitude* is EDM2's magnitude-preserving UNet (config G) with EDM2's optimizer. Both "
    "predict x0. *magnitude, EDM* also uses EDM2's objective: EDM with a learned uncertainty.",
    "guidance": "Each row is a guidance method and its guidance scale. *interval* guides only at "
    "sigma from 1 to 10. The guide of *autoguidance* is the same run's checkpoint at a third of "
    "its steps.",
    "sampler": "All samplers start at sigma 40, take their last step from 0.4 to 0, and use the "
    "same kind of grid in between. *restart* adds noise once, from sigma 0.5 up to 2, and goes "
    "back to 0.5 in 2 steps.",
    "one step": "*denoise* is the base, and *denoise, 1 step* draws with the same network in a "
    "single step. *MeanFlow* (Geng et al. 2025) learns to draw in one step, with guidance 1.5 "
    "built in. It trains on other noise levels than the base.",
    "average": "Each row draws with another average of the same run's weights. *decay* is an "
    "exponential average with a warm-up, *none* uses the last weights, and *width* is a "
    "[power-function average](../evaluation.md#averages-of-any-width). Training computed the "
    "averages of widths 0.05 and 0.1; those of other widths are computed from snapshots.",
}
"""For each axis, a paragraph that explains the names of its variants."""
_TIMES = {"step_ms": "ms per step", "steps": "steps", "picture_ms": "ms per picture"}


class Row(NamedTuple):
    """Variant of the ablations with its results by seed."""

    axis: str
    name: str
    results: Mapping[int, Mapping[str, Any]]


class Interval(NamedTuple):
    """Mean over seeds, and half the width of its 95 % confidence interval.

    For a single seed, `half` is infinite.
    """

    mean: float
    half: float

    @property
    def is_noise(self) -> bool:
        """Whether the interval contains 0: the mean does not differ significantly from 0."""
        return abs(self.mean) <= self.half


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and its 95 % confidence interval by Student's t.

    This assumes that the values are independent and normally distributed.
    """
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Interval(mean, float("inf"))
    return Interval(mean, stats.t.ppf(0.975, n - 1) * statistics.stdev(values) / n**0.5)


def difference(row: Row, base: Row, measure: str) -> Interval | None:
    """Return the interval of the row's score minus the base's score, paired by seed.

    `measure` names the score, a key of MEASURES. Returns None if no seed has this score for both
    the row and the base.
    """
    pairs = [
        (result[measure], base.results[seed][measure])
        for seed, result in row.results.items()
        if measure in result and measure in base.results.get(seed, {})
    ]
    return interval([a - b for a, b in pairs]) if pairs else None


def write(rows: Sequence[Row], machine: Mapping[str, Any]) -> str:
    """Return the page as Markdown, with a section for each axis that has something to compare.

    These are the axes with results for the base and at least one other row. `machine` describes the
    computer (see `measure.machine`).
    """
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
    """Return the values to insert into the introduction of the page."""
    results = [result for row in rows for result in row.results.values()]
    sorted_values = lambda name: sorted(r[name] for r in results if r.get(name))
    span = lambda values: f"{values[0]:.3g} to {values[-1]:.3g}" if values else "not measured"
    return {
        "seeds": len({seed for row in rows for seed in row.results}),
        "parameters": max(sorted_values("parameters"), default=0),
        "train_steps": max(sorted_values("train_steps"), default=0),
        "step_ms": span(sorted_values("step_ms")),
        "picture_ms": span(sorted_values("picture_ms")),
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
    """Format a score with its interval, in bold if it differs significantly from the base."""
    values = [r[measure] for r in row.results.values() if measure in r]
    if not values:
        return ""
    _, factor, _ = MEASURES[measure]
    text = _shown(interval(values), factor)
    apart = None if row is base else difference(row, base, measure)
    return f"**{text}**" if apart and not apart.is_noise else text


def _shown(value: Interval, factor: float, sign: str = "") -> str:
    decimals = ".1f" if factor > 1 else ".3g"
    half = f" ± {factor * value.half:{decimals}}" if value.half < float("inf") else ""
    return f"{factor * value.mean:{sign}{decimals}}{half}"


def _time(row: Row, name: str) -> str:
    values = [r[name] for r in row.results.values() if r.get(name)]
    return f"{statistics.median(values):.3g}" if values else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _verdict(rows: Sequence[Row]) -> str:
    """Return one line per score that names the best row and the rows that differ from the base.

    The base is rows[0].
    """
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
        by = f"{_shown(best, factor, '+')}{' points' if factor > 1 else ''}"
        if gain(best) > 0:
            noise = ", not significant" if best.is_noise else ""
            parts = [f"{head}: *{name}* is best ({by} compared with *{base.name}*{noise})"]
        else:
            parts = [f"{head}: *{base.name}*, the base, is best"]
        if better:
            parts.append(f"Significantly better than *{base.name}*: {_names(better)}")
        if worse := [n for n in outside if n not in better]:
            parts.append(f"Significantly worse: {_names(worse)}")
        if within := [n for n in apart if n not in outside]:
            parts.append(f"Not significantly different: {_names(within)}")
        lines.append(f"- {'. '.join(parts)}.")
    return "\n".join(lines)


def _names(rows: Sequence[str]) -> str:
    return ", ".join(f"*{name}*" for name in rows)


_NOTHING = """# Ablations
There are no results yet. `python -m benchmarks.ablations --workdir=runs/ablations
--page=docs/lab/ablations.md` trains, draws, scores and writes this page
([benchmarks.md](benchmarks.md#ablations)).
"""
_INTRODUCTION = """# Ablations

This page compares training and sampling choices on the coloured digits, for a network of
{parameters:,} parameters trained for {train_steps:,} steps of 64 pictures. The results may not hold
for larger models. `python -m benchmarks.ablations --workdir=runs/ablations
--page=docs/lab/ablations.md` trains, draws, scores and writes this page. The same command continues
after an interruption, and `--only=sampler,guidance/none --seeds=3,4` adds results. Machine:
{device}, jax {jax}.

**Each table changes one thing.** Its first row is the base: the quick start with half its steps, a
constant learning rate and no weighting of the loss. (The quick start weights its loss by P2 because
of these results.) The base uses the quick start's objective, guidance 2, DDIM with eta 1 in 12
steps, and an average of decay 0.999. The learning rate is constant because the networks hardly
learned the digits in first trials, with a third of the quick start's steps and a rate that fell to
zero. This was decided before any rows were compared. Each objective has its own noise levels and
sampling grid.

**Scores.** A classifier, the judge, recognises the digit, the ink colour and the paper colour of a
picture (`diffusion_jax/examples/digits/judge.py`). *Seen prompts* and *prompts never shown* give
the share of pictures in which all three are right: one picture for each of the 272 prompts seen in
training, and 8 for each of the 18 prompts never shown in training. FD is the Fréchet distance
between the judge's features of drawn and real pictures; lower is better. The v-loss is the
[held-out loss](../evaluation.md#a-held-out-loss) at sigma 0.2, 0.5, 1, 2 and 5, computed with the
weights that drew the pictures. It has the same meaning for every objective, and lower is better.

**All rows have the same budget.** All networks train for the same number of steps and cost about
the same per step. Drawing a picture uses at most 24 evaluations of the network. A guided step
counts as two, because it evaluates the network with and without the prompt. A sampler with two
evaluations per step takes fewer steps. Times are CPU times of the process in milliseconds. They
depend on the machine, and other work on the machine can increase them. A training step took
{step_ms} ms, and a picture {picture_ms} ms.

**Intervals** are 95 % intervals by Student's t over {seeds} seeds. Each seed has its own initial
weights, data order, noise and pictures. A value is bold if it differs significantly from the first
row: the 95 % interval of the difference, paired by seed, excludes zero. By chance, this also holds
for about one value in twenty without a real difference. Times in the tables are medians.
"""
