"""Ablation study on the quick start's coloured digits: change one choice at a time and compare.

    python -m benchmarks.ablations --workdir=runs/ablations --page=tables.md
    python -m benchmarks.ablations --workdir=runs/ablations --only=sampler,guidance/none --seeds=0

The base is the quick start with half its steps, a constant learning rate and no weighting of the
loss. Each variant changes one choice of the base. In training, this is the objective, the loss
weighting or the network; in sampling, the guidance, the sampler, the number of steps or the
parameter average. A classifier of the digits (the judge) scores the pictures of each variant. All
variants have the same budget: the same number of training steps (or, with "equal time" in their
names, the CPU time of the base), with networks of equal cost, and at most 24 evaluations of the
network per picture (a guided step counts as two). So, apart from "equal time", the scores do not
depend on the machine's load. The command also measures the CPU time per step and per picture.

The command prints a line of JSON per variant and seed. It stores runs and results in --workdir. So
the same command continues after an interruption, and commands with other seeds or variants add
results. With --page=FILE, it also writes tables of all results stored in --workdir to FILE, with
confidence intervals and conclusions.
"""

import bisect
import contextlib
import functools
import itertools
import json
import pathlib
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from scipy import stats

from benchmarks import measure
from configs import quickstart, quickstart_mp
from diffusion_jax import cli, files, heldout, runs, systems
from diffusion_jax.config.named import one_of
from diffusion_jax.devices import sharding
from diffusion_jax.diffusion import guidance, guidance_kinds, samplers
from diffusion_jax.draw import options, program
from diffusion_jax.evaluate import evaluate_command, scorers
from diffusion_jax.examples.digits.scorer import open_scorer
from diffusion_jax.train import loop, scoring
from diffusion_jax.train.trace import FOLDER, Trace
from diffusion_jax.train.train_command import exit_if_stopped
from diffusion_jax.weights import restore
from imagen_jax import cascade
from imagen_jax import train as imagen_train
from imagen_jax.settings import Settings, read_settings

STEPS, CHANNELS, BATCH = 600, 128, 64
"""Training steps, channels of the network and batch size. The quick start trains for twice as many
steps; a third of its steps is too few to learn the digits."""
SIDE = 16
"""Side of the quick start's pictures in pixels."""
ROWS = 24
"""Sampling budget: rows of input that the network processes per picture. The quick start needs 24:
12 guided steps, each with one row with the prompt and one without."""
LEVELS = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Noise levels (sigma) of the held-out v-loss, which has the same meaning for all objectives."""
GUIDE = "the run itself, at a third of its steps"
"""Placeholder for a guide in Variant.drawn. The function `drawn` replaces it by a checkpoint."""
MEASURES = {
    "seen_prompt_accuracy": ("seen prompts, %", 100.0, False),
    "heldout_prompt_accuracy": ("prompts never shown, %", 100.0, False),
    "fd_digits": ("FD", 1.0, True),
    "v_loss": ("v-loss", 1.0, True),
}
"""Displayed scores, by their name in a result: (heading, factor, whether lower is better).

The factor multiplies the score for display."""
_TIMES = {"step_ms": "ms per step", "steps": "steps", "picture_ms": "ms per picture"}


class Size(NamedTuple):
    """Number of training steps, and number of channels of the network."""

    steps: int
    channels: int


class Variant(NamedTuple):
    """Variant of the base, one row of a table: its axis, its name and what it changes."""

    axis: str
    """Choice that the variant changes, a key of AXES."""
    name: str
    trained: Mapping[str, Any] = {}
    """Config fields that training changes, such as {"diffusion.weight": "p2"}."""
    drawn: Mapping[str, Any] = {}
    """Options of sampling (see cascade.OPTIONS) that the variant changes, such as
    {"sampler": "heun"}."""
    equal_time: bool = False
    """Whether the run takes the CPU time of the base instead of its number of steps."""

    @property
    def run(self) -> str:
        """Name of the training run, without seed; "base" if the variant only changes sampling."""
        return _file_name(f"{self.axis}_{self.name}") if self.trained else "base"

    @property
    def key(self) -> str:
        """Name of the result files, without the seed; "base" for the base, which all axes share."""
        return _file_name(f"{self.axis}_{self.name}") if self.trained or self.drawn else "base"


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


def _objective(predicts: str, levels: str, **more: Any) -> dict[str, Any]:
    return {"trained": {"diffusion.predicts": predicts, "diffusion.noise": levels, **more}}


def _magnitude(**more: Any) -> dict[str, Any]:
    """Return the Variant fields that select EDM2's magnitude-preserving UNet and optimizer.

    `more` adds or overrides config fields.
    """
    c = quickstart_mp.get_config().to_dict()
    names = ("lr", "weight_decay", "clip", "schedule")
    fields = {f"optimizer.{name}": c["optimizer"][name] for name in names}
    return {"trained": {"unet": c["unet"], "optimizer.decay_from": STEPS // 6, **fields, **more}}


def _weighting(text: str) -> dict[str, Any]:
    return {"trained": {"diffusion.weight": text}}


def _drawn(**choice: Any) -> dict[str, Any]:
    return {"drawn": choice}


# The samplers left out equal ddim (with eta 0 or 1) or plms on this grid, repeat pictures of
# k-diffusion with samplers that few use, or need another model (lcm).
_LEFT_OUT = ("ddim", "euler", "euler_ancestral", "ddpm", "plms_v", "dpm2", "dpm2_ancestral", "lms", "dpmpp_2s", "lcm")
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "objective": {
        "x0": {},
        "EDM": _objective("edm", "lognormal", **{"diffusion.p_mean": -1.2}),
        "eps": _objective("eps", "cosine"),
        "v": _objective("v", "cosine"),
        "flow": _objective("flow", "logit_normal"),
    },
    "weighting": {
        "none": {},
        "EDM": _weighting("edm"),
        "min-SNR-5": _weighting("min_snr(5)"),
        "P2": _weighting("p2"),
        "uncertainty": _weighting("uncertainty"),
    },
    "network": {
        "UNet": {},
        "magnitude": _magnitude(),
        "magnitude, EDM": _magnitude(**{"diffusion.predicts": "edm", "diffusion.weight": "uncertainty"}),
    },
    "optimizer": {
        "AdamW": {},
        "Muon": {"trained": {"optimizer.name": "muon"}},
        "Muon, equal time": {"trained": {"optimizer.name": "muon"}, "equal_time": True},
    },
    "guidance": {
        "cfg 2": {},
        "none": _drawn(guidance=1.0),
        "cfg 1.5": _drawn(guidance=1.5),
        "cfg 3": _drawn(guidance=3.0),
        "cfg 4": _drawn(guidance=4.0),
        "interval 3": _drawn(guidance=3.0, guiding="interval(1, 10)"),
        "APG 3": _drawn(guidance=3.0, guiding="apg"),
        "rescale 3": _drawn(guidance=3.0, guiding="cfg+rescale"),
        "CFG-Zero 3": _drawn(guidance=3.0, guiding="cfg_zero"),
        "TCFG 3": _drawn(guidance=3.0, guiding="tcfg"),
        "FDG 3": _drawn(guidance=3.0, guiding="fdg"),
        "CFG++ 0.3": _drawn(guidance=0.3, guiding="cfg_pp", sampler="ddim(eta=0)"),
        "autoguidance 2": _drawn(guidance=2.0, guide=GUIDE),
    },
    "sampler": {"ddim eta 1": {}, "ddim eta 0": _drawn(sampler="ddim(eta=0)")}
    | {name: _drawn(sampler=name) for name in samplers.SAMPLERS if name not in _LEFT_OUT}
    | {"restart": _drawn(sampler="restart(low=0.5, high=2, repeats=1, inner=2)")},
    "one step": {
        "denoise": {},
        "denoise, 1 step": _drawn(steps=1),
        "MeanFlow, 1 step": {
            "trained": {
                "diffusion.method": "meanflow(omega=1.5, norm_eps=1, every=8)",
                "diffusion.p_mean": 0.0,
                "diffusion.p_std": 1.0,
                "sampler.eta": 0.0,
            },
            "drawn": {"sampler": "ddim(eta=0)", "steps": 1, "guidance": 1.0},
        },
    },
    "average": {"decay 0.999": {}, "none": _drawn(ema="raw")}
    | {f"width {width}": _drawn(ema=width) for width in ("0.02", "0.05", "0.1", "0.15", "0.2")},
}
"""Fields of each Variant, by axis and name. The first variant of each axis is the base."""


def select(only: Sequence[str]) -> list[Variant]:
    """Return the variants that --only selects, and the base of each of their axes.

    An entry "AXIS" of `only` selects all variants of an axis, an entry "AXIS/NAME" one of them. An
    empty `only` selects all variants of all axes. Raises ValueError for unknown names.
    """
    wanted = [text.partition("/") for text in only] or [(axis, "", "") for axis in AXES]
    chosen: dict[tuple[str, str], Variant] = {}
    for axis, _, name in wanted:
        one_of("--only", axis, AXES)
        if name:
            one_of(f"--only={axis}/", name, AXES[axis])
        for variant in [next(iter(AXES[axis])), name] if name else AXES[axis]:
            chosen[axis, variant] = Variant(axis, variant, **AXES[axis][variant])
    return list(chosen.values())


def page(root: pathlib.Path) -> str:
    """Return the tables and conclusions for all results in the workdir `root`."""
    rows = []
    for axis, variants in AXES.items():
        for name, fields in variants.items():
            key = Variant(axis, name, **fields).key
            paths = sorted((root / "results").glob(f"{key}_*.json"))
            matching = [p for p in paths if re.fullmatch(rf"{re.escape(key)}_\d+", p.stem)]
            results = {int(p.stem.rpartition("_")[2]): json.loads(p.read_text()) for p in matching}
            rows.append(Row(axis, name, results))
    return tables(rows)


def result(root: pathlib.Path, variant: Variant, seed: int, scorer: scorers.Scorer, size: Size) -> dict[str, Any]:
    """Return the costs and scores of a variant for one seed.

    The result has the key "seed", and the keys that the functions `trained` and `drawn` return. It
    also has the key "v_loss", unless the variant only changes guidance or sampling. The result is
    read from its file in the workdir `root`. If there is no such file, the variant is trained,
    sampled and scored, and the file is written.
    """
    path = root / "results" / f"{variant.key}_{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    workdir = root / "runs" / f"{variant.run}_{seed}"
    if variant.equal_time:
        size = equal_time(root, variant, seed, size)
    cost = trained(workdir, variant.trained, seed, size)
    row = {"seed": seed, **cost, **drawn(workdir, variant, seed, scorer)}
    if variant.trained or variant.axis in ("objective", "weighting", "optimizer", "average"):
        ema = str(variant.drawn.get("ema", "ema"))
        (loss,) = heldout.measure_run(workdir, None, [ema], None, None, LEVELS)
        row["v_loss"] = loss["v_loss"]
    files.write_whole(path, json.dumps(row, indent=1))
    return row


def equal_time(root: pathlib.Path, variant: Variant, seed: int, size: Size) -> Size:
    """Return `size` with the number of steps that take the CPU time of the base's run.

    The variant without ", equal time" in its name measures the time of a step.
    """
    timed = variant._replace(name=variant.name.removesuffix(", equal time"))
    base, own = (
        trained(root / "runs" / f"{one.run}_{seed}", one.trained, seed, size)["step_ms"]
        for one in (Variant(variant.axis, ""), timed)
    )
    return size._replace(steps=round(size.steps * base / own))


def trained(workdir: pathlib.Path, changes: Mapping[str, Any], seed: int, size: Size) -> dict[str, float]:
    """Train a run to its last step, from its newest checkpoint if there is one.

    Returns the number of steps ("train_steps"), the CPU milliseconds per step ("step_ms") and the
    number of "parameters". For a finished run, these are read from a file.
    """
    path = workdir / "cost.json"
    if path.exists():
        return json.loads(path.read_text())
    config, mesh = config_of(changes, seed, size), sharding.make_mesh()
    s = read_settings(config)
    inputs, clock = imagen_train.prepare(s, mesh), Clock(workdir / FOLDER, range(0))
    with inputs.batches, runs.writing(workdir):
        runs.claim(workdir, config)
        state = loop.train(inputs, s.run, s.optimizer, mesh, workdir, config, clock)
    exit_if_stopped(state, s.run.steps)
    cost = {"train_steps": s.run.steps, "step_ms": 1e3 * clock.mean()}
    cost["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    files.write_whole(path, json.dumps(cost))
    return cost


def config_of(changes: Mapping[str, Any], seed: int, size: Size) -> dict[str, Any]:
    """Return the config of a training run: the config of the base, with these changes.

    `changes` maps config fields such as "diffusion.weight", or whole groups, to values.
    """
    c, steps = systems.complete(quickstart.get_config().to_dict()), size.steps
    c |= {"seed": seed, "steps": steps, "batch_size": BATCH, "log_every": steps, "keep_last": 1}
    c |= {"sample_every": 0, "save_every": -(-steps // 3), "keep_every": -(-steps // 3)}
    c["data"]["heldout"], c["heldout"]["records"] = 0.01, 64
    c["diffusion"]["weight"] = "none"
    # The base writes regular snapshots, from which averages of other widths are computed. The other
    # runs need no averages of other widths, and write a single snapshot, at the last step.
    every = steps if changes else 0
    # With half the steps, a constant learning rate learns more, and averages matter more.
    c["optimizer"] |= {"schedule": "constant", "warmup": steps // 12}
    c["optimizer"] |= {"ema_widths": (0.05, 0.1), "snapshot_every": every}
    for name, value in changes.items():
        group, _, field = name.partition(".")
        c[group] = c[group] | {field: value} if field else value
    c["unet"]["embed_dim"] = size.channels
    return c


class Clock(Trace):
    """Trace that records the process's CPU time at the start of each training step."""

    starts: list[float]

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[list[Any]]:
        """Enclose one training step, and record the CPU time at its start."""
        self.starts = [*getattr(self, "starts", []), time.process_time()]
        with super().step(number) as results:
            yield results

    def mean(self) -> float:
        """Return the mean CPU seconds per step, or 0 if fewer than two steps ran.

        Only the mean is meaningful, because a step may start before earlier steps have ended.
        """
        return float(np.diff(self.starts).mean()) if len(self.starts) > 1 else 0.0


def drawn(workdir: pathlib.Path, variant: Variant, seed: int, scorer: scorers.Scorer) -> dict[str, float]:
    """Draw pictures with a trained run and score them.

    Returns the number of sampling "steps", the CPU milliseconds per picture ("picture_ms"), and the
    scores by name. The number of steps is that of the variant or, if the variant sets none, the
    largest that the budget ROWS allows.
    """
    chosen = dict(variant.drawn)
    if chosen.get("guide") == GUIDE:
        chosen["guide"] = f"{workdir}@{restore.steps(workdir / runs.CHECKPOINTS)[0]}"
    ema = chosen.pop("ema", "ema")
    s = cascade.read_run(workdir, options.fields(cascade.OPTIONS, chosen))
    steps = chosen.pop("steps", steps_for(s))
    values = {**chosen, "steps": steps}
    subject = evaluate_command.open_subject(cascade.KIND, [str(workdir)], [[values]], [[{"ema": ema}]])
    point = subject.points[0]()
    batch_size = program.even_batch_size(subject.batch_size, len(scorer.prompts))
    seconds = []

    def draw(prompts, seeds, guidance):
        start = time.process_time()
        images = point.draw(prompts, [s + 10_000 * seed for s in seeds], guidance)
        seconds.append((time.process_time() - start) / len(seeds))
        return images

    draw(scorer.prompts[:batch_size], range(batch_size), s.sampler.guidance)  # Compiles.
    seconds.clear()
    scores = scoring.score_now(scorer, draw, (s.sampler.guidance,), batch_size)
    logging.info("%s: %s", variant.key, scores)
    row = {name.rpartition("/")[2]: value for name, value in scores.items()}
    return {"steps": steps, "picture_ms": 1e3 * statistics.median(seconds)} | row


def steps_for(s: Settings) -> int:
    """Return the largest number of sampling steps within the budget ROWS, but at least 1."""
    return max(1, bisect.bisect_right(range(1, ROWS + 1), ROWS, key=functools.partial(rows, s)))


def rows(s: Settings, steps: int) -> int:
    """Count the rows of input that the network processes to sample one picture in `steps` steps.

    The function runs the sampler with a dummy network that returns zeros.
    """
    sampler, objective, taken = s.sampler._replace(steps=steps), s.diffusion.objective, []
    sigmas, times = samplers.sampling_grid(objective.noise, sampler)
    guide = guidance.make(sampler, guidance_kinds.GuidedModel(objective.make_precond(times), sigmas))
    guided = guidance.scale_per_image(sampler, sampler.guidance, 1) is not None

    def denoise(x, sigma):
        applies = guided and (guide.applies is None or bool(guide.applies(sigma[0])))
        taken.append(len(guide.needs) if applies else 1)
        return jnp.zeros_like(x)

    x = jnp.zeros((1, 1, 1, 1))
    with jax.disable_jit():  # Loops run in Python.
        sampler.method.sampler(denoise, x, sigmas, lambda i: x)
    return sum(taken)


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and its 95 % confidence interval by Student's t.

    This assumes that the values are independent and normally distributed.
    """
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Interval(mean, float("inf"))
    return Interval(mean, stats.t.ppf(0.975, n - 1) * statistics.stdev(values) / n**0.5)


def difference(row: Row, base: Row, score: str) -> Interval | None:
    """Return the interval of the row's score minus the base's score, paired by seed.

    `score` is a key of MEASURES. Returns None if no seed has this score for both
    the row and the base.
    """
    pairs = [
        (result[score], base.results[seed][score])
        for seed, result in row.results.items()
        if score in result and score in base.results.get(seed, {})
    ]
    return interval([a - b for a, b in pairs]) if pairs else None


def tables(rows: Sequence[Row]) -> str:
    """Return tables and conclusions as Markdown, with a section for each axis that can be compared.

    These are the axes with results for the base and at least one other row.
    """
    by_axis = {row.axis: [r for r in rows if r.axis == row.axis and r.results] for row in rows}
    parts = []
    for axis, of_axis in by_axis.items():
        if len(of_axis) > 1 and of_axis[0].results:
            parts += [f"## {axis.capitalize()}", _table(of_axis), _verdict(of_axis)]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    shown = lambda score, row: any(score in result for result in row.results.values())
    scores = [m for m in MEASURES if any(shown(m, row) for row in rows[1:])]
    heads = [MEASURES[m][0] for m in scores]
    lines = [_line(["", *heads, *_TIMES.values()]), _line(["---"] * (1 + len(heads) + len(_TIMES)))]
    for row in rows:
        cells = [row.name]
        for score in scores:
            cells.append(_cell(row, rows[0], score))
        lines.append(_line([*cells, *(_time(row, name) for name in _TIMES)]))
    return "\n".join(lines)


def _cell(row: Row, base: Row, score: str) -> str:
    """Format a score with its interval, in bold if it differs significantly from the base."""
    values = [r[score] for r in row.results.values() if score in r]
    if not values:
        return ""
    _, factor, _ = MEASURES[score]
    text = _shown(interval(values), factor)
    apart = None if row is base else difference(row, base, score)
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
    for score, (head, factor, less) in MEASURES.items():
        apart = {row.name: difference(row, base, score) for row in rows[1:]}
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


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.]+", "_", text)


if __name__ == "__main__":
    _ONLY = flags.DEFINE_list("only", [], "Axes (AXIS) or variants (AXIS/NAME) to run; default: all.")
    _SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds; each one trains its own runs.")
    _STEPS = flags.DEFINE_integer("steps", STEPS, "Steps of a training run.", lower_bound=3)
    _CHANNELS = flags.DEFINE_integer("channels", CHANNELS, "Channels of the network.", lower_bound=32)
    _PAGE = flags.DEFINE_string("page", None, "File to write the page with all results to.")

    def main() -> None:
        """Run the selected variants that lack results, print their results and write the page."""
        cli.start(alone=True)
        with cli.bad_input():
            variants = select(_ONLY.value)
            seeds = [int(seed) for seed in _SEEDS.value]
        root, size = pathlib.Path(str(measure.WORKDIR.value)), Size(_STEPS.value, _CHANNELS.value)
        scorer = open_scorer(SIDE)
        for seed, variant in itertools.product(seeds, variants):
            row = result(root, variant, seed, scorer, size)
            measure.say({"axis": variant.axis, "variant": variant.name, **row})
        if _PAGE.value:
            files.write_whole(_PAGE.value, page(root))

    flags.mark_flag_as_required("workdir")
    cli.run(main)
