"""The table of metrics in sweeps: adding a metric, and what a reference allows."""

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.evaluate import curve, scorers, sweep
from diffusion_jax.evaluate import evaluate_command as evaluation
from diffusion_jax.evaluate.evaluate_command import Sweep
from diffusion_jax.metrics import bootstrap, cards, clip_towers, extractors, features, fid, mmd, neighbours, stats_files
from diffusion_jax.metrics.table import METRICS, Metric
from diffusion_jax.train import scoring
from diffusion_jax.web import results
from tests.diffusion_jax.evaluate.test_evaluate_command import (
    SCALES,
    make_scorer,
    make_subject,
    real_features,
    table_of,
)
from tests.diffusion_jax.metrics.running import run
from tests.diffusion_jax.text import tiny_weights

__all__ = ["run"]  # A fixture.
PROMPTS = [f"a {letter}" for letter in "bcdefghijklmnopqrstuvw"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return paths of statistics with features, of a CLIP, and of its image features for CMMD."""
    folder = tmp_path_factory.mktemp("inputs")
    clip = tiny_weights.clip_folder(folder / "clip", "open_clip")
    real = real_features()
    card = {"extractor": "toy", "weights": "abc", "preprocessing": "means"}
    stats_files.write(folder / "real.npz", stats_files.Stats(features.gaussian(real), real, card))
    image = clip_towers.load(clip, preprocessing="squash").image
    pictures = np.random.default_rng(1).integers(0, 256, (30, 8, 8, 3), np.uint8)
    rows = extractors.on_host(image)(pictures)
    card = cards.make_card(image, image_size=(8, 8), n=30)
    stats = stats_files.Stats(features.gaussian(rows), rows, card)
    stats_files.write(folder / "clip.npz", stats)
    return str(folder / "real.npz"), str(clip), str(folder / "clip.npz")


def lightness(rows):
    """A metric computed from the pictures' features only."""
    return bootstrap.mean(rows.mean(axis=1))


def test_an_added_metric_appears_in_sweeps_the_page_training_and_the_command(inputs, tmp_path, monkeypatch, run):
    """A new metric needs only an entry in METRICS."""
    monkeypatch.setitem(METRICS, "lightness", Metric("mean <feature>", "inception", lightness))
    subject, scorer = make_subject(tmp_path), make_scorer(inputs, PROMPTS)
    out = evaluation.evaluate([subject], scorer, Sweep(SCALES))
    row = table_of(out)[1]
    shards = sorted((out / "features" / "step_00000003_ema_guidance_4").glob("*.npz"))
    rows = np.concatenate([np.load(path)["inception"] for path in shards])
    assert float(row["lightness"]) == pytest.approx(rows.mean())
    assert float(row["lightness_low"]) < float(row["lightness"]) < float(row["lightness_high"])
    page = results.sweeps([("run", sweep.read(out))], str)
    assert page["metrics"]["lightness"]["label"] == "mean <feature>"
    assert page["sweeps"][0]["points"][1]["scores"]["lightness"] == float(row["lightness"])
    now = scoring.score_now(scorer, subject.points[0]().draw, SCALES, 22)
    assert now["evaluation/guidance_4/lightness"] == pytest.approx(rows.mean(), rel=1e-5)
    (tmp_path / "drawn").mkdir()
    for i, image in enumerate(np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), np.uint8)):
        Image.fromarray(image).save(tmp_path / "drawn" / f"{i}.png")
    code, printed, _ = run("fid", tmp_path / "drawn", tmp_path / "drawn", "--all", "--kid_subset=9")
    assert code == 0 and "lightness: " in printed and "lightness_low: " in printed


def test_a_reference_with_features_gives_kid_precision_recall_and_cmmd(inputs, tmp_path):
    scorer = make_scorer(inputs[:2], PROMPTS, clip_reference=inputs[2])
    out = evaluation.evaluate([make_subject(tmp_path)], scorer, Sweep((2.0,)))
    (row,) = table_of(out)
    (shard,) = (out / "features" / "step_00000003_ema_guidance_2").glob("*.npz")
    stored, real, real_clip = np.load(shard), real_features(), stats_files.read(inputs[2]).features
    rows, embedded = stored["inception"], stored["clip_image"]
    normalised = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (real_clip, embedded)]
    expected = {
        "fd_toy": fid.frechet(rows, real),
        "kid_toy": mmd.kid(real, rows, size=22).mean,
        "precision_toy": neighbours.precision(rows, neighbours.RealFeatures(real)).value,
        "recall_toy": neighbours.recall(rows, neighbours.RealFeatures(real)).value,
        "cmmd": mmd.cmmd(*normalised),
        "clip_score": stored["clip"].mean(),
    }
    for name, value in expected.items():
        low, mid, high = (float(row[f"{name}{end}"]) for end in ("_low", "", "_high"))
        assert mid == pytest.approx(value, rel=1e-6) and low <= mid <= high
    assert row.keys().isdisjoint({"fd_toy_infinity"})  # Slow, so only computed if it is named.
    scored = sweep.read_scored(out / sweep.SCORED)["step_00000003_ema_guidance_2_clip_image"]
    assert scored.scores["cmmd"] == pytest.approx(float(row["cmmd"]))
    assert scored.card.items() >= {"preprocessing": "squash", "reference": "clip.npz, n 30"}.items()
    page = results.sweeps([("run", sweep.read(out))], str)
    assert page["unlike"] == []  # CLIP's two preprocessings do not make cards unlike.
    cards = page["sweeps"][0]["points"][0]["cards"].values()
    assert [card["extractor"] for card in cards].count("clip_clip") == 2


def test_the_page_labels_scores_of_unofficial_weights(tmp_path):
    names = {"fd_inception": 3.0, "kid_inception": 0.1, "precision": 0.5, "recall": 0.75, "cmmd": 2}
    folder = tmp_path / "evaluation" / "step_2"
    folder.mkdir(parents=True)
    rows = [{"guidance": g, "checkpoint": 2, "ema": "ema", **names} for g in (1.0, 2.0)]
    sweep.write_table(folder / sweep.TABLE, rows)
    page = results.sweeps([("run", sweep.read(folder))], str)
    shown = [page["metrics"][c]["label"] for c in page["sweeps"][0]["points"][0]["scores"] if c in page["metrics"]]
    for label in ("Fréchet distance (stand-in Inception)", "KID (stand-in Inception)", "CMMD"):
        assert label in shown
    both = curve.figure(sweep.read(folder))
    assert both.x == "precision and recall"
    assert [(line.name, line.x) for line in both.lines] == [("precision", [0.5, 0.5]), ("recall", [0.75, 0.75])]


def test_evaluation_metrics_selects_the_computed_metrics(inputs):
    images = np.random.default_rng(0).integers(0, 256, (22, 8, 8, 3), np.uint8)
    scorer = make_scorer(inputs, PROMPTS, metrics=("clip_score", "fid_infinity"))
    features = scorer.features(images, PROMPTS)
    columns = scorers.columns(scorer.score(features))
    value, residual = fid.extrapolated(features["inception"], fid.reference(real_features()))
    assert columns["fd_toy_infinity"] == value and columns["fd_toy_infinity_residual"] == residual
    assert columns.keys() >= {"clip_score", "clip_score_low"} and "fd_toy" not in columns


@pytest.mark.parametrize(
    ("fields", "prompts", "message"),
    [
        ({"metrics": ("fit",)}, PROMPTS, "unknown metric 'fit': choose from fid, fd_digits, kid"),
        ({"metrics": ("cmmd",)}, PROMPTS, "cmmd needs the features clip_image, but only"),
        ({"metrics": ("precision",)}, PROMPTS[:3], "precision needs at least 4 images, but there"),
    ],
)
def test_a_metric_without_its_requirements_is_an_error(inputs, fields, prompts, message):
    with pytest.raises(ValueError, match=message):
        make_scorer(inputs, prompts, **fields)


def test_kid_requires_a_reference_with_features(inputs, tmp_path):
    stats = stats_files.read(inputs[0])
    path = str(tmp_path / "moments.npz")
    stats_files.write(path, stats._replace(features=None))
    scorer = make_scorer((path, inputs[1]), PROMPTS)
    features = {"inception": real_features(), "clip": np.full((200, 1), 0.5)}
    names = {f"{name}{end}" for name in ("fd_toy", "clip_score") for end in ("", "_low", "_high")}
    assert scorers.columns(scorer.score(features)).keys() == names
    with pytest.raises(ValueError, match=r"kid needs features that the reference .* stats --k"):
        make_scorer((path, inputs[1]), PROMPTS, metrics=("kid",))
    stats_files.write(path, stats_files.read(inputs[2])._replace(features=None))
    with pytest.raises(ValueError, match=r"but clip_reference \(.*moments.npz\) holds only statistics: .* --clip_mode"):
        make_scorer(inputs, PROMPTS, clip_reference=path)
