"""Scorers against the metrics that they use, and their errors."""

import numpy as np
import pytest

from diffusion_jax.config.settings import Evaluation
from diffusion_jax.evaluate import scorers
from diffusion_jax.examples.digits import judge as judges
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.examples.digits.scorer import open_scorer
from diffusion_jax.metrics import extractors, features, fid, stats_files
from diffusion_jax.train import scoring
from tests.diffusion_jax.metrics import toy
from tests.diffusion_jax.text import tiny_weights

PROMPTS = ["a red seven on gray paper", "a white two", "three"]


@pytest.fixture(scope="module")
def judge():
    return open_scorer(16)


def pictures(prompts):
    """Return real held-out digits for these prompts."""
    glyphs = digits.load("test")
    parsed = [digits.parse(prompt) for prompt in prompts]
    first = [np.argmax(glyphs.digits == p.digit) for p in parsed]
    return np.stack([digits.render(glyphs.images[i], p.ink, p.paper, 16) for i, p in zip(first, parsed, strict=True)])


def test_the_digits_scorer_accepts_real_digits_and_rejects_wrong_ink(judge):
    images = pictures(judge.prompts)
    row = judge.score(judge.features(images, judge.prompts))["digits"]
    assert row["seen_prompt_accuracy"] > 0.95 and row["heldout_ink_accuracy"] == 1
    wrong = pictures([p.replace("red", "green") for p in judge.prompts])
    row = judge.score(judge.features(wrong, judge.prompts))["digits"]
    red = np.mean(["red" in p for p in judge.prompts[: judge.cards["digits"]["images_seen"]]])
    assert abs(row["seen_ink_accuracy"] - (1 - red)) < 1e-4


def test_fd_digits_matches_the_distance_of_the_judges_features(judge):
    images = pictures(judge.prompts)
    features = judge.features(images, judge.prompts)
    prompts = (digits.seen_prompts() * 15)[:4000]
    real = judges.fit_judge().features(judges.real_pictures(16, prompts))
    seen = features["digits"][: judge.cards["digits"]["images_seen"]]
    expected = fid.distance(seen, fid.reference(real))
    row = judge.score(features)["digits"]
    np.testing.assert_allclose(row["fd_digits"], expected, rtol=1e-9)
    noisy = images // 2 + np.random.default_rng(0).integers(0, 128, images.shape, np.uint8)
    worse = judge.score(judge.features(noisy, judge.prompts))["digits"]
    assert worse["fd_digits"] > 3 * row["fd_digits"]


def test_sfid_fid_and_inception_score_are_computed_from_the_same_features(tmp_path, monkeypatch):
    monkeypatch.setattr(extractors, "load_inception", lambda *how: toy.with_spatial())
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), np.uint8)
    rows = np.asarray(toy.apply(toy.extractor().params, toy.prepare(images)))
    card = {"extractor": "inception", "weights": "abc", "preprocessing": "means"}
    parts = [features.gaussian(rows[:6, part]) for part in (slice(4), slice(4, 5))]
    path = str(tmp_path / "real.npz")
    stats_files.write(path, stats_files.Stats(parts[0], None, card, parts[1]))
    names = ("fid", "sfid", "inception_score")
    scorer = scorers.of_prompts(8, ["a"] * 6, toy.wanted(path, "weights", metrics=names))
    row = scorer.score(scorer.features(images[6:], ["a"] * 6))["inception"]
    assert row["fd_inception"] == pytest.approx(fid.frechet(rows[6:, :4], parts[0]), rel=1e-4)
    spatial = fid.frechet(rows[6:, 4:5], parts[1])
    assert row["sfid_inception"] == pytest.approx(spatial, rel=1e-4)
    assert row["inception_score_inception"] == pytest.approx(1)  # With a single class, it is 1.
    stats_files.write(path, stats_files.Stats(parts[0], None, None, parts[1]))
    with pytest.raises(ValueError, match=r"has no card .*: set inception_mode to the prep"):
        scorers.of_prompts(8, ["a"] * 6, toy.wanted(path, "weights", metrics=names))


def test_the_clip_score_is_the_mean_cosine_with_its_interval(tmp_path):
    folder = tiny_weights.clip_folder(tmp_path / "clip", "open_clip")
    scorer = scorers.of_prompts(24, PROMPTS, toy.wanted(clip=str(folder)))
    images = np.random.default_rng(0).integers(0, 256, (3, 24, 24, 3), np.uint8)
    cosines = scorer.features(images, PROMPTS)["clip"]
    alone = scorer.features(images[1:2], PROMPTS[1:2])["clip"]
    np.testing.assert_allclose(alone[0], cosines[1], atol=1e-5)
    assert np.ptp(cosines) > 1e-4
    row = scorer.score({"clip": cosines})["clip"]
    np.testing.assert_allclose(row["clip_score"], cosines.mean(), rtol=1e-9)
    assert row["clip_score_low"] < row["clip_score"] < row["clip_score_high"]
    assert scorer.cards["clip"].items() >= {"image_size": "24x24", "n": 3, "official": False}.items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "", ""), "no score is possible: set reference and inception for FID, clip"),
        (("real.npz", "", "clip"), "FID needs both"),
        (("", "weights.npz", ""), "FID needs both"),
    ],
)
def test_fid_without_its_weights_or_reference_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        scorers.of_prompts(24, PROMPTS, toy.wanted(*arguments))


def test_a_scorer_without_prompts_is_an_error():
    with pytest.raises(ValueError, match=r"data\.source is 'folder', which provides no prompts"):
        scorers.open_scorer("folder", 64, [], toy.wanted())
    with pytest.raises(ValueError, match=r"^there is no data source that provides prompts"):
        scorers.open_scorer("", 64, [], toy.wanted())  # A model without a data source.


def test_scores_during_training_use_all_prompts_and_are_named_by_guidance_scale(judge):
    calls = []

    def draw(prompts, seeds, scale):
        calls.append((seeds, scale))
        images = pictures(prompts) / 127.5 - 1
        if scale == 9:
            images[np.isin(seeds, [3, 415]), 2, 2, 1] = np.nan
        return images

    scores = scoring.score_now(judge, draw, (1.0, 2.5, 9.0), 150)
    assert [scale for _, scale in calls] == [1.0] * 3 + [2.5] * 3 + [9.0] * 3
    rows = [*range(416), *range(300, 334)]  # The last batch is filled up with its own rows.
    assert [seeds for seeds, _ in calls[:3]] == [rows[:150], rows[150:300], rows[300:]]
    whole = judge.score(judge.features(pictures(judge.prompts), judge.prompts))["digits"]
    for name, value in whole.items():
        assert scores[f"evaluation/guidance_2.5/{name}"] == pytest.approx(value, rel=1e-9)
    (name,) = (name for name in scores if "guidance_9" in name)
    assert (name, scores[name]) == ("evaluation/guidance_9/images_not_finite", 2)


def test_references_that_the_digits_scorer_ignores_are_errors():
    for name in ("reference", "dinov2", "dinov2_reference", "judge"):
        evaluation = Evaluation(**{name: "s3://bkt/no_such"})
        with pytest.raises(ValueError, match=rf"evaluation\.{name} has no effect without a file"):
            scorers.open_scorer("diffusion_jax.examples.digits", 16, [], evaluation)
