"""The ablations: equal numbers of network rows, intervals over seeds, and the command."""

import json
import pathlib

import pytest

from benchmarks import ablations
from benchmarks.ablations import Interval, Row
from configs import quickstart
from imagen_jax.settings import read_settings
from tests.imagen_jax import commands


def settings(**sampler):
    config = quickstart.get_config()
    config.sampler.update(sampler)
    return read_settings(config.to_dict())


def _slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("sampler", "steps", "rows"),
    [
        ({"name": "heun"}, 6, 22),  # Heun evaluates the network 2 n - 1 times.
        _slow({}, 12, 24),
        _slow({"guidance": 1.0}, 24, 24),  # Without guidance, an evaluation has one row.
        _slow({"name": "restart(repeats=1, inner=2)"}, 4, 22),  # The restarts add 2 x 2.
        # 7 of 16 levels are in the interval, so 16 + 7 rows.
        _slow({"guiding": "interval(1, 10)"}, 16, 23),
    ],
)
def test_every_variant_uses_at_most_24_network_rows_per_picture(sampler, steps, rows):
    s = settings(**sampler)
    assert ablations.steps_for(s) == steps and ablations.rows(s, steps) == rows


def test_variants_have_valid_configs_and_share_training_runs():
    each = [(axis, *item) for axis, of in ablations.AXES.items() for item in of.items()]
    names = [ablations.Variant(axis, name, **what) for axis, name, what in each]
    keys = [variant.key for variant in names]
    assert keys.count("base") == len(ablations.AXES) == 8
    others = [key for key in keys if key != "base"]
    assert len({*others}) == len(others)
    # The base, four objectives, four weightings, two networks, two of Muon, and MeanFlow.
    assert len({variant.run for variant in names}) == 14
    for variant in names:
        s = read_settings(ablations.config_of(variant.trained, 1, ablations.Size(12, 64)))
        assert (s.unet.embed_dim, s.run.steps, s.run.seed) == (64, 12, 1)
        other = variant.run.startswith("network")
        assert (type(s.unet).__name__ == "MagnitudeUNet") == other
        assert s.optimizer.lr == (0.04 if other else 0.002)


def test_the_flag_only_always_adds_the_first_variant_of_an_axis():
    chosen = ablations.select(["average/none", "average/width 0.05"])
    assert [variant.name for variant in chosen] == ["decay 0.999", "none", "width 0.05"]
    with pytest.raises(ValueError, match="--only is 'sampelr': did you mean 'sampler'"):
        ablations.select(["sampelr"])
    with pytest.raises(ValueError, match="--only=sampler/ is 'huen': did you mean 'heun'"):
        ablations.select(["sampler/huen"])


def test_intervals_use_students_t_distribution():
    # The 97.5 % quantile of t with 2 degrees of freedom is 4.3027. The deviation of 1, 2, 3 is 1.
    half = pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert ablations.interval([1, 2, 3]) == Interval(2, half)
    assert ablations.interval([5.0]) == Interval(5, float("inf"))
    assert Interval(-2, 1.9).is_noise is False and Interval(-2, 2.1).is_noise is True


def results(*values):
    return {seed: {"seen_prompt_accuracy": v, "steps": 12} for seed, v in enumerate(values)}


def test_the_table_marks_differences_larger_than_the_noise_over_seeds():
    rows = [
        Row("sampler", "ddim eta 1", results(0.5, 0.6, 0.7)),
        Row("sampler", "heun", results(0.61, 0.7, 0.8)),  # 10 or 11 points higher for every seed.
        Row("sampler", "deis", results(0.7, 0.6, 0.5)),
        Row("sampler", "plms", results(0.4, 0.5, 0.59)),
        Row("sampler", "unipc", {}),
    ]
    text = ablations.tables(rows)
    assert "## Sampler" in text and "unipc" not in text
    assert "| ddim eta 1 | 60.0 ± 24.8 |" in text
    assert "| heun | **70.3 ± 23.6** |" in text and "| deis | 60.0 ± 24.8 |" in text
    assert "| plms | **49.7 ± 23.6** |" in text
    assert "- seen prompts: *heun* is best (+10.3 ± 1.4 points compared with *ddim eta 1*). " in text
    assert "1*: *heun*. Significantly worse: *plms*. Not significantly different: *deis*." in text
    assert ablations.tables(rows[-1:]) == "\n"  # A single variant cannot be compared.


def test_a_variant_of_equal_time_trains_for_as_many_steps_as_take_the_time_of_the_base(tmp_path, monkeypatch):
    variants = ablations.select(["optimizer/Muon, equal time"])
    assert [variant.equal_time for variant in variants] == [False, True]
    ran = []

    def trained(workdir, changes, seed, size):
        ran.append((workdir.name, changes, seed, size.steps))
        return {"step_ms": 30.0 if changes else 20.0}

    monkeypatch.setattr(ablations, "trained", trained)
    size = ablations.equal_time(tmp_path, variants[1], 2, ablations.Size(600, 64))
    assert size == ablations.Size(400, 64)
    muon = {"optimizer.name": "muon"}
    assert ran == [("base_2", {}, 2, 600), ("optimizer_Muon_2", muon, 2, 600)]


def test_the_page_of_the_docs_has_the_tables_and_rows_that_the_command_writes():
    page = (pathlib.Path(ablations.__file__).parents[1] / "docs/lab/ablations.md").read_text()
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    rows = {
        axis.lower(): [line.split(" | ")[0][2:] for line in text.splitlines() if line[:2] == "| "]
        for axis, text in sections.items()
    }
    expected = {axis: ["", "---", *names] for axis, names in ablations.AXES.items()}
    assert {axis: rows[axis] for axis in expected} == expected


@pytest.mark.slow
def test_the_ablations_command_trains_draws_writes_and_resumes(tmp_path):
    page, work = tmp_path / "page.md", f"--workdir={tmp_path / 'runs'}"
    small = (work, "--steps=3", "--channels=32", f"--page={page}")
    only = "--only=weighting/P2,average/width 0.15,guidance/autoguidance 2"
    first = commands.run("benchmarks.ablations", *small, only, "--seeds=0", devices=1)
    assert first.code == 0, first.err
    lines = [json.loads(line) for line in first.out.splitlines()]
    named = [f"{line['axis']}/{line['variant']}" for line in lines]
    of_guidance = ["guidance/cfg 2", "guidance/autoguidance 2"]
    assert named == ["weighting/none", "weighting/P2", "average/decay 0.999", "average/width 0.15", *of_guidance]
    assert [line["steps"] for line in lines] == [12] * 6 and lines[0]["train_steps"] == 3
    assert lines[0]["v_loss"] == lines[2]["v_loss"] != lines[1]["v_loss"]
    assert "v_loss" not in lines[5] and 0 <= lines[5]["seen_prompt_accuracy"] <= 1
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}
    again = commands.run("benchmarks.ablations", *small, only, "--seeds=0", devices=1)
    assert again.out == first.out and "compiling" not in again.err
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert "## Average" in page.read_text() and "| width 0.15 |" in page.read_text()
    bad = commands.run("benchmarks.ablations", work, "--only=averag", devices=1)
    assert bad.code == 2 and "--only is 'averag': did you mean 'average'?" in bad.err
