"""MLPerf scores against numpy, with other batches and devices, the judge, and the rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import sd2_mlperf
from diffusion_jax.devices import sharding
from diffusion_jax.metrics import clip_towers, extractors, fid
from diffusion_jax.metrics.clip_towers import ClipExtractors
from diffusion_jax.metrics.features import Gaussian
from diffusion_jax.task import Task
from diffusion_jax.text import hashed
from sd_jax.mlperf import benchmark, rules
from sd_jax.mlperf.benchmark import EvaluationInputs
from sd_jax.settings import read_settings
from tests.diffusion_jax.metrics import toy
from tests.sd_jax import tiny_benchmark

CAPTIONS = [f"picture {i}" for i in range(11)]


def sample(params, frozen, batch, keys, guidance):
    """Return grey 4x4 images in about [-1, 1], which depend on key, text and guidance."""
    grey = jax.vmap(lambda key: jax.random.uniform(key, (), minval=-1.2, maxval=1.2))(keys)
    grey = grey * params["x"] + frozen["y"] + 0.01 * (batch["text_ids"][:, 0] % 7) + guidance / 100
    return jnp.broadcast_to(grey[:, None, None, None], (len(grey), 4, 4, 3))


TASK = Task(lambda key: {}, None, sample, {"y": np.zeros(())}, [(".*", sharding.P())])


def judge():
    """FID's features are the grey level, and CLIP's text features those of a grey of 100."""
    grey = lambda params, x: x.mean((1, 2)) if x.ndim > 2 else x
    pixels = lambda images: images.astype(jnp.float32)
    inception = toy.extractor(width=3, prepare=pixels, apply=grey)
    image = toy.extractor(prepare=pixels, apply=lambda p, x: jnp.stack([x[:, 0, 0, 0] / 255, jnp.ones(len(x))], 1))
    text = toy.extractor(prepare=lambda ids: ids, apply=lambda p, ids: jnp.ones((len(ids), 2)))
    real = Gaussian(np.array([90.0, 90, 90]), np.eye(3), 100)
    tokenize = lambda texts: np.zeros((len(texts), 1), np.int32)
    return EvaluationInputs(CAPTIONS, fid.reference(real), inception, ClipExtractors(image, text, tokenize))


def scores(tmp_path, *, batch_size=4, devices=2, step=5, params=None, seed=3):
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])
    c = tiny_benchmark.get_config(tmp_path)
    c.seed = seed
    evaluate = benchmark.make_evaluate(
        read_settings(c.to_dict()), TASK, hashed.encoder(4, 8), judge(), mesh, tmp_path, batch_size
    )
    return evaluate.score(params or {"x": np.float32(1)}, step)


def greys(tmp_path, step=5):
    parts = sorted((tmp_path / f"evaluation/mlperf/step_{step:08}").glob("*.npz"))
    return np.concatenate([np.load(part)["inception"] for part in parts])


def test_scores_match_numpys_for_the_sampled_images(tmp_path):
    actual = scores(tmp_path)
    rows = greys(tmp_path).astype(np.float64)
    assert rows.shape == (11, 3) and len(np.unique(rows[:, 0])) == 11
    assert np.ptp(rows % 1) > 0.1  # Images for FID are not rounded to 8 bits.
    assert rows.min() >= 0 and rows.max() <= 255
    root = np.cov(rows, rowvar=False) + np.eye(3)
    values = np.linalg.eigvalsh(np.cov(rows, rowvar=False)).clip(0)
    fid = np.square(rows.mean(0) - 90).sum() + np.trace(root) - 2 * np.sqrt(values).sum()
    assert actual["FID"] == pytest.approx(fid, rel=1e-6)
    cut = np.floor(rows[:, 0]) / 255  # Images for CLIP are truncated to 8 bits.
    cosines = (cut + 1) / np.sqrt(2 * (cut**2 + 1))
    assert actual["CLIP"] == pytest.approx(cosines.mean(), rel=1e-6)


@pytest.mark.parametrize("how", [{"batch_size": 11, "devices": 1}, {"batch_size": 8, "devices": 8}])
def test_scores_do_not_depend_on_batches_and_devices(tmp_path, how):
    alone, other = scores(tmp_path / "a"), scores(tmp_path / "b", **how)
    assert other == pytest.approx(alone, rel=1e-6)
    np.testing.assert_allclose(greys(tmp_path / "b"), greys(tmp_path / "a"), rtol=1e-6)


def test_each_seed_and_step_has_different_noise(tmp_path):
    results = [scores(tmp_path / "a"), scores(tmp_path / "b", step=6), scores(tmp_path / "c", seed=4)]
    assert len({one["FID"] for one in results}) == 3


def test_scores_of_images_that_are_not_finite_are_nan_with_a_warning(tmp_path, caplog):
    actual = scores(tmp_path, params={"x": np.float32("nan")})
    assert np.isnan([actual["FID"], actual["CLIP"]]).all()
    assert "11 of 11 images of step 5 contain values that are not finite" in caplog.text


def test_stored_features_of_another_seed_are_an_error(tmp_path):
    scores(tmp_path)
    with pytest.raises(ValueError, match=r"mlperf.seed: 3 stored, 4 requested"):
        scores(tmp_path, seed=4)


@pytest.fixture
def evaluation(tmp_path, monkeypatch):
    """Return the evaluation settings of a config, with toy extractors."""
    folder = tiny_benchmark.write(tmp_path)
    extractor = toy.extractor(width=3, prepare=lambda x: x, apply=lambda params, x: x.mean((1, 2)))
    monkeypatch.setattr(extractors, "load_inception", lambda path: extractor)
    monkeypatch.setattr(clip_towers, "load", lambda path: ClipExtractors(extractor, extractor, lambda texts: texts))
    return read_settings(tiny_benchmark.get_config(folder).to_dict()).evaluation


def test_the_judge_reads_the_captions_of_mlperfs_table(evaluation):
    opened = benchmark.open_inputs(evaluation)
    assert opened.captions == ["a" * (i + 1) for i in range(10)]
    assert benchmark.open_inputs(evaluation._replace(num_prompts=3)).captions == opened.captions[:3]


def test_a_judge_without_its_files_or_enough_captions_is_an_error(evaluation, tmp_path):
    refused = lambda message: pytest.raises(ValueError, match=message)
    with refused("evaluation.clip is empty"):
        benchmark.open_inputs(evaluation._replace(clip=""))
    with refused(r"num_prompts is 11, but .*captions.tsv holds 10"):
        benchmark.open_inputs(evaluation._replace(num_prompts=11))
    with pytest.raises(FileNotFoundError, match=r"the table of captions nowhere\.tsv does not exist: write"):
        benchmark.open_inputs(evaluation._replace(prompts="nowhere.tsv"))
    (tmp_path / "captions.tsv").write_text("image_id\ttext\n1\ta\n")
    with refused(r"captions.tsv, line 2 has no column id: the first line must"):
        benchmark.open_inputs(evaluation)
    tiny_benchmark.write_reference(tmp_path, Gaussian(np.zeros(4), np.eye(4), 9))
    (tmp_path / "captions.tsv").write_text("image_id\tid\tcaption\n1\t2\ta\n2\t3\tb\n")
    with refused(r"reference.npz has 4 dimensions, but the extractor toy has 3"):
        benchmark.open_inputs(evaluation._replace(num_prompts=2))


@pytest.mark.parametrize("batch, steps", [("256", 2000), ("384", 1334), ("512", 1000), ("1024", 500), ("2048", 250)])
def test_the_mlperf_config_follows_the_rules(batch, steps):
    s = read_settings(sd2_mlperf.get_config(batch).to_dict())
    assert rules.departures(s) == []
    assert rules.steps_between(s) == steps
    assert rules.hyperparameters(s, 1)["opt_base_learning_rate"] == 1.25e-7 * int(batch)
    rules.check(s)


def test_departures_from_the_rules_are_named():
    c = sd2_mlperf.get_config("512")
    c.optimizer.clip, c.text.drop_prob, c.steps = 1.0, 0.1, 999
    s = read_settings(c.to_dict())
    assert rules.departures(s) == ["optimizer.clip is 1.0, not inf", "text.drop_prob is 0.1, not 0.0"]
    with pytest.raises(ValueError, match="steps is 999, but the first evaluation is after 1000"):
        rules.check(s)
    with pytest.raises(ValueError, match=r"unet.weights is .a., but benchmark runs start with random weights"):
        rules.check(s._replace(run=s.run._replace(steps=1000), unet_weights="a"))
