"""A sweep from prompts to tables, with a toy model, a toy Inception and a tiny CLIP.

The two processes have four of eight CPU devices each.
"""

import csv
import functools
import itertools
import json
import os
import pathlib
import re
import types
import warnings
from unittest import mock

import jax
import numpy as np
import pytest
from absl import flags
from PIL import Image

from diffusion_jax.config import picture_fields
from diffusion_jax.devices import sharding
from diffusion_jax.draw import model as draw_model
from diffusion_jax.draw import program
from diffusion_jax.draw.stage import Stage
from diffusion_jax.evaluate import curve, scorers, sweep
from diffusion_jax.evaluate import evaluate_command as evaluation
from diffusion_jax.evaluate.evaluate_command import Point, Subject, Sweep
from diffusion_jax.files import folder_lock, sheets
from diffusion_jax.logs import events
from diffusion_jax.metrics import extractors, features, fid, stats_files, weights
from imagen_jax import cascade
from tests import processes
from tests.diffusion_jax import toy
from tests.diffusion_jax.event_files import points
from tests.diffusion_jax.metrics import toy as toy_metrics
from tests.diffusion_jax.text import tiny_weights

pytestmark = [pytest.mark.slow, pytest.mark.gate]

PROMPTS = [f"a {'bcdefghij'[i % 9]} {'klmnopq'[i % 7]}" for i in range(67)]
SCALES = (1.0, 4.0)
LAST = (("ema", None),)
# Differences in the last bits of float32 can change 8-bit pixels. One changed pixel of 12,864
# changes these scores by 1e-5.
CLOSE = 5e-5


def real_features():
    pictures = np.random.default_rng(1).integers(0, 256, (200, 8, 8, 3), np.uint8) // 2
    return np.asarray(toy_metrics.apply(toy_metrics.extractor().params, toy_metrics.prepare(pictures)))


def write_reference(path, **fields):
    """Write statistics like the stats command."""
    extractor = toy_metrics.extractor()
    card = {"extractor": "toy", "weights": "abc", "preprocessing": extractor.preprocessing} | fields
    stats_files.write(path, stats_files.Stats(features.gaussian(real_features()), None, card))
    return str(path)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return the paths of a reference and a CLIP."""
    folder = tmp_path_factory.mktemp("inputs")
    clip = tiny_weights.clip_folder(folder / "clip", "open_clip")
    return write_reference(folder / "real.npz"), str(clip)


def make_scorer(inputs, prompts=PROMPTS, **fields):
    """Return a scorer for FID and CLIP score, with the toy extractor in place of Inception."""
    with (
        mock.patch.object(weights, "load"),
        mock.patch.object(extractors, "inception_extractor", lambda *_: toy_metrics.extractor()),
    ):
        wanted = toy_metrics.wanted(inputs[0], "toy.safetensors", inputs[1], **fields)
        return scorers.of_prompts(toy.SIZE, prompts, wanted)


def make_subject(workdir, calls=None, seed=0, spoil=None, steps=(3,), weights=LAST, name=""):
    """Return the toy as a run. `calls` receives each batch's seeds; `spoil` changes images."""
    mesh, task = sharding.make_mesh(), toy.task()
    frozen = sharding.place_all(task.frozen, mesh, [(".*", sharding.P())])
    draw_one = program.make_draw(task.sample, frozen, mesh)

    def draw(params):
        def drawn(prompts, seeds, scale):
            if calls is not None:
                calls.append(list(seeds))
            scales = np.full(len(seeds), scale, np.float32)
            images = draw_one(params, toy.ENCODER.tokenize(list(prompts)), seeds, scales)
            return images if spoil is None else spoil(images, seeds)

        return drawn

    def at(ema, step):
        step = step or steps[-1]
        if step not in steps:
            raise FileNotFoundError(f"no checkpoint of step {step}")
        key = jax.random.key(seed + step)
        noisy = lambda x: x + 0.1 * jax.random.normal(key, x.shape)
        params = jax.device_get(jax.tree.map(noisy, task.init(key)))
        params = sharding.place_all(params, mesh, task.rules)
        card = {"sampler": "ddim", "steps": "4", "precision": "float32", "models": [{"seed": seed}]}
        return Point(step, ema, [params], draw(params), card)

    points = [functools.partial(at, *which) for which in weights]
    return Subject(workdir, "folder", toy.SIZE, 64, points, name)


def table_of(out):
    with (out / sweep.TABLE).open() as file:
        return list(csv.DictReader(file))


def rows_of(out):
    text = ("ema", "features_share_of_time")
    return [{k: float(v) for k, v in row.items() if k not in text} for row in table_of(out)]


@pytest.fixture(scope="module")
def one(tmp_path_factory, inputs):
    """Return the folder and the rows of a sweep by one process with eight devices."""
    workdir = tmp_path_factory.mktemp("one")
    out = evaluation.evaluate([make_subject(workdir)], make_scorer(inputs), Sweep(SCALES))
    return out, rows_of(out)


def check_same(rows, expected):
    assert len(rows) == len(expected) == len(SCALES)
    for row, expected_row in zip(rows, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=CLOSE)


def test_a_sweep_writes_both_scores_with_intervals_and_nemos_tables(one):
    out, rows = one
    assert [row["guidance"] for row in rows] == [1, 4]
    for row in rows:
        assert row["fd_toy_low"] < row["fd_toy"] < row["fd_toy_high"]
        assert row["clip_score_low"] < row["clip_score"] < row["clip_score_high"]
    assert abs(rows[0]["fd_toy"] / rows[1]["fd_toy"] - 1) > 100 * CLOSE
    assert (out / "clip_scores.csv").read_text().splitlines()[0] == "cfg,clip_score"
    assert not (out / "fid_scores.csv").exists()  # Only the official weights give a FID.


def test_a_sweeps_score_matches_one_computed_from_its_pictures(one, inputs, tmp_path):
    """Draw the pictures again in one batch, and extract features like the metrics command."""
    point = make_subject(tmp_path).points[0]()
    images = sheets.to_uint8(point.draw(PROMPTS, list(range(67)), 4.0))
    assert one[1][1]["fd_toy"] == pytest.approx(distance_of(images), rel=CLOSE)


def distance_of(images):
    taken = extractors.extract(toy_metrics.extractor(), toy_metrics.InMemory(images), sharding.make_mesh())
    return fid.distance(taken.stream.features(), fid.reference(features.gaussian(real_features())))


@pytest.mark.parametrize(("devices", "batch"), [(1, 64), (8, 7)])
def test_scores_do_not_depend_on_devices_or_batch_size(one, inputs, tmp_path, devices, batch):
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])
    with mock.patch.object(sharding, "make_mesh", lambda: mesh):
        subject, scorer = make_subject(tmp_path), make_scorer(inputs)
        out = evaluation.evaluate([subject], scorer, Sweep(SCALES, batch_size=batch))
    check_same(rows_of(out), one[1])
    scored = [*sweep.read_scored(out / sweep.SCORED).values(), *sweep.read_scored(one[0] / sweep.SCORED).values()]
    assert len({card["model"] for _, card in scored}) == 1  # The hash of the weights ignores their sharding.


def test_two_processes_compute_the_same_scores_as_one(one, inputs, tmp_path):
    assert processes.run_all(2, process, tmp_path, *inputs, devices=4) == [0, 0]
    check_same(rows_of(tmp_path / "evaluation" / "step_00000003"), one[1])


class Killed(Exception):
    """Raised while a batch is drawn."""


def test_a_killed_sweep_repeats_one_batch_and_gives_the_same_scores(one, inputs, tmp_path):
    calls = []

    def dying(images, seeds):
        if len(calls) == 4:  # In the second batch of the second guidance scale.
            raise Killed
        return images

    settings, scorer = Sweep(SCALES, batch_size=64), make_scorer(inputs)
    with pytest.raises(Killed):
        evaluation.evaluate([make_subject(tmp_path, calls, spoil=dying)], scorer, settings)
    out = tmp_path / "evaluation" / "step_00000003"
    check_same([*rows_of(out), one[1][1]], one[1])  # The row of the first scale is complete.
    evaluation.evaluate([make_subject(tmp_path, calls)], scorer, settings)
    # The second batch is filled up with row 34, which is dropped.
    first, second = [*range(34)], [*range(34, 67), 34]
    assert calls == [first, second, first, second, second]
    check_same(rows_of(out), one[1])


def test_each_score_has_a_card_with_its_settings(one):
    scored = sweep.read_scored(one[0] / sweep.SCORED)
    names = [f"step_00000003_ema_guidance_{g}_{k}" for g in (1, 4) for k in ("clip", "inception")]
    assert list(scored) == names
    scores, card = scored["step_00000003_ema_guidance_4_inception"]
    assert scores["fd_toy"] == one[1][1]["fd_toy"]
    of_images = {"extractor": "toy", "weights": "abc", "preprocessing": "means", "image_size": "8x8", "n": 67}
    of_model = {"checkpoint": 3, "ema": "ema", "precision": "float32", "reference": "real.npz, n 200"}
    of_sampler = {"seed": 0, "sampler": "ddim", "steps": "4", "guidance": 4.0, "official": False}
    assert card.items() >= (of_images | of_model | of_sampler).items()
    assert re.fullmatch("[0-9a-f]{16}", card["prompts"]) and card["versions"]["jax"]
    _, card = scored["step_00000003_ema_guidance_1_clip"]
    assert (card["extractor"], card["preprocessing"]) == ("clip_clip", "open_clip")


def test_a_sweep_over_checkpoints_and_averages_writes_one_table(inputs, tmp_path):
    weights = itertools.product(("ema", "raw"), (3, 5))
    subject = make_subject(tmp_path, steps=(3, 5), weights=weights)
    settings = Sweep((2.0,), batch_size=67, name="all")
    out = evaluation.evaluate([subject], make_scorer(inputs), settings)
    rows = [(row["ema"], row["checkpoint"], row["fd_toy"]) for row in table_of(out)]
    assert [row[:2] for row in rows] == [("ema", "3"), ("ema", "5"), ("raw", "3"), ("raw", "5")]
    assert rows[0][2] == rows[2][2] != rows[1][2]  # The toy's average equals its raw weights.
    assert len(curve.figure(sweep.read(out)).lines) == 4
    names = [f"step_{int(step):08}_{ema}" for ema, step, _ in rows]
    curves = [points(out / events.FOLDER / name, "guidance_x100/fd_toy") for name in names]
    scores = [np.float32(score) for *_, score in rows]
    assert curves == [[(200, score)] for score in scores]


def test_models_of_different_sizes_are_compared_at_one_size(inputs, tmp_path):
    """Pillow reduces the pictures of the larger model, and the card records that."""
    twice = lambda images, seeds: images.repeat(2, axis=1).repeat(2, axis=2)
    large = make_subject(tmp_path / "no", seed=1, spoil=twice, name="large")._replace(size=16)
    both = [make_subject(tmp_path, name="small"), large]
    scorer = make_scorer(inputs)
    out = evaluation.evaluate(both, scorer, Sweep((1.0, 4.0), size=8, batch_size=67))
    assert out == tmp_path / "evaluation" / "small_large"
    rows = table_of(out)
    assert [row["model"] for row in rows] == ["small", "small", "large", "large"]
    scored = sweep.read_scored(out / sweep.SCORED)
    name = "large_step_00000003_ema_guidance_4_inception"
    assert scored[name].card["resized"] == "Pillow's bicubic from 16x16"
    assert scored[name.replace("large", "small")].card["resized"] is None
    images = sheets.to_uint8(large.points[0]().draw(PROMPTS, list(range(67)), 4.0))
    small = [Image.fromarray(i).resize((8, 8), Image.Resampling.BICUBIC) for i in images]
    assert float(rows[3]["fd_toy"]) == pytest.approx(distance_of(np.stack(small)), rel=CLOSE)
    lines = curve.figure(sweep.read(out)).lines
    assert [line.name for line in lines] == ["small", "large"]
    assert (out / "large_guidance_4.png").exists() and (out / "small_guidance_4.png").exists()


class Named(draw_model.Model):
    """A model whose "images" are texts: each stage's average and number of steps."""

    options = cascade.OPTIONS

    def describe(self, stage):
        return {"ema": stage.ema}

    def batches(self, prompts, rows, seeds, **inputs):
        yield [np.array([f"{stage.ema} {stage.settings.sampler.steps}" for stage in self.stages])]


def named_model(folder, *names):
    """Return a Named model. Each stage is at step 9, with two averages and 3 sampler steps."""
    of = lambda steps: types.SimpleNamespace(
        sampler=types.SimpleNamespace(name="heun", steps=steps),
        unet=types.SimpleNamespace(dtype="x"),
        output_shape=(8, 8),
        fields=(),
    )
    settings_with = lambda fields: of(fields.get("sampler.steps", 3))
    for name, step, ema in itertools.product(names, (5, 7, 9), ("ema_0.9", "ema_0.99")):
        (folder / name / "checkpoints" / str(step) / ema).mkdir(parents=True)
    programs = lambda s, preview, strength: None
    stages = [
        Stage(str(folder / name), of(3), toy.ENCODER, {"a": 1}, "ema", 9, (), None, programs, settings_with, None)
        for name in names
    ]
    return Named(stages, [{}] * len(names))


def test_a_sweep_over_a_cascade_combines_the_weights_of_all_stages(monkeypatch, tmp_path):
    """The first combination is already loaded. Stages without an axis keep their weights."""
    read = []

    def with_weights(stage, ema, step):
        read.append((pathlib.Path(stage.workdir).name, ema, step))
        return stage._replace(ema=ema, step=step)

    monkeypatch.setattr(draw_model.stage_module, "with_weights", with_weights)
    model = named_model(tmp_path, "base", "sr", "last")
    value = lambda ema, step=None: {"ema": ema, "checkpoint": step}
    weights = [[value("ema"), value("raw", 5)], [value("ema"), value("0.9", 7)]]
    points = evaluation.with_weights([[{}] * 3], weights)
    subject = evaluation.of_model(model, points, "folder")
    points = [open_point() for open_point in subject.points]
    drawn = [[text.split()[0] for text in point.draw([], [], 1.0)] for point in points]
    assert drawn == [["ema", "ema", "ema"], ["ema", "0.9", "ema"], ["raw", "ema", "ema"], ["raw", "0.9", "ema"]]
    assert read == [("sr", "0.9", 7), ("base", "raw", 5)]  # Each is read once.
    shown = [(p.checkpoint, p.ema, p.later) for p in points[1:3]]
    assert shown == [(9, "ema", "7 0.9, 9 ema"), (5, "raw", "9 ema, 9 ema")]
    names = {sweep.point_name({"checkpoint": p.checkpoint, "ema": p.ema, "later": p.later}) for p in points}
    assert len(names) == 4 and "step_00000009_ema_7_0.9_9_ema" in names


def test_a_sweep_over_sampler_settings_does_not_reload_weights(tmp_path):
    """A point is the same model with another sampling program."""
    model = named_model(tmp_path, "run")
    points = [[{"steps": n}] for n in (3, 5, 7)]
    subject = evaluation.of_model(model, points, "folder")
    points = [open_point() for open_point in subject.points]
    drawn = [point.draw([], [], 1.0).tolist() for point in points]
    assert drawn == [["ema 3"], ["ema 5"], ["ema 7"]]
    assert [point.card["steps"] for point in points] == ["3", "5", "7"]
    assert [point.settings for point in points] == [{"sampler.steps": n} for n in "357"]
    assert all(point.params[0] is model.stages[0].params for point in points)


def test_models_of_different_sizes_without_size_are_an_error(tmp_path):
    subjects = [make_subject(tmp_path), make_subject(tmp_path)._replace(size=16)]
    with pytest.raises(ValueError, match=r"sizes \(8, 16 pixels\): set --size, .*--size=8"):
        evaluation.common_size(subjects)
    assert evaluation.common_size(subjects[:1]) == subjects[0].size


def not_finite(images, seeds):
    images = images.copy()
    images[[i for i, seed in enumerate(seeds) if seed == 40], 3, 3, 1] = np.nan
    return images


def test_images_that_are_not_finite_end_the_sweep_with_an_error(inputs, tmp_path, capsys):
    subject = make_subject(tmp_path, spoil=not_finite)
    with pytest.raises(SystemExit, match="2"):
        evaluation.evaluate([subject], make_scorer(inputs), Sweep(SCALES, save_images=True))
    message = "1 of 33 images of step_00000003_ema_guidance_1 are not finite; the first one is for prompt number 40 (fr"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "evaluation" / "step_00000003" / sweep.TABLE).exists()
    saved = {path.name for path in tmp_path.rglob("image*.png")}
    assert "image000039.png" in saved and "image000040.png" not in saved


def test_features_that_are_not_finite_end_the_sweep_with_an_error(inputs, tmp_path, capsys):
    scorer = make_scorer(inputs)
    scorer.features = lambda images, prompts: {"clip": np.full((len(images), 1), np.nan)}
    with pytest.raises(SystemExit, match="2"):
        evaluation.evaluate([make_subject(tmp_path)], scorer, Sweep(SCALES))
    message = "error: the clip features are not finite: the weights of the network that computes them are damaged\n"
    assert capsys.readouterr().err == message


def test_two_simultaneous_evaluations_into_one_folder_are_an_error(inputs, tmp_path, capsys):
    folder = tmp_path / "evaluation" / "step_00000003"
    folder.mkdir(parents=True)
    other = {"machine": folder_lock._machine(), "host": "here", "nonce": "n", "pid": os.getppid()}
    other["started"] = folder_lock._started(os.getppid())
    (folder / "writer-1.json").write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="75"):
        evaluation.evaluate([make_subject(tmp_path)], make_scorer(inputs), Sweep(SCALES))
    assert f"{folder} is being written by process {os.getppid()}" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["writer-1.json"]


def test_stored_features_of_other_weights_are_an_error(inputs, tmp_path, capsys):
    settings, scorer = Sweep((2.0,)), make_scorer(inputs)
    out = evaluation.evaluate([make_subject(tmp_path)], scorer, settings)
    with pytest.raises(SystemExit, match="2"):
        evaluation.evaluate([make_subject(tmp_path, seed=1)], scorer, settings)
    err = capsys.readouterr().err
    assert re.search(r"guidance_2 was started with other settings \(clip.model: '\w+' stored", err)
    with pytest.raises(SystemExit, match="2"):
        evaluation.evaluate([make_subject(tmp_path)], make_scorer(inputs, PROMPTS[:66]), settings)
    assert "clip.n: 67 stored, 66 requested" in capsys.readouterr().err
    assert len(rows_of(out)) == 1


def test_evaluating_a_missing_checkpoint_is_a_one_line_error(inputs, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        missing = make_subject(tmp_path, weights=[("ema", 4)])
        evaluation.evaluate([missing], make_scorer(inputs), Sweep(SCALES))
    assert capsys.readouterr().err == "error: no checkpoint of step 4\n"


def test_a_reference_of_another_extractor_is_an_error(inputs, tmp_path):
    reference = write_reference(tmp_path / "other.npz", weights="def")
    with pytest.raises(ValueError, match=r"other\.npz was computed with weights def, but the images"):
        make_scorer((reference, inputs[1]))
    with pytest.raises(ValueError, match="a Fréchet distance needs at least 2 images, but there is 1"):
        make_scorer(inputs, PROMPTS[:1])


def process(index, workdir, reference, clip):
    warnings.simplefilter("error")
    scorer = make_scorer((reference, clip))
    evaluation.evaluate([make_subject(workdir)], scorer, Sweep(SCALES, batch_size=16))


def test_evaluating_on_prompts_with_numbers_for_fields_is_an_error(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text("text,year\na,2000\n")
    parsed = flags.FlagValues()
    values = {"prompts": str(path), **dict.fromkeys(("num_prompts", "num_seen", "num_heldout"))}
    f = {n: flags.DEFINE_string(n, v, "", flag_values=parsed) for n, v in values.items()}
    f["size"] = flags.DEFINE_integer("size", 8, "", flag_values=parsed)
    parsed.mark_as_parsed()
    fields = picture_fields.read(("year=1900..2030",))
    subjects = [Subject(tmp_path, "", 8, 1, [], fields=of) for of in ((), fields)]
    with pytest.raises(ValueError, match=r"numbers of data.fields \(year\), which only sample"):
        evaluation._scorer(subjects, f)
