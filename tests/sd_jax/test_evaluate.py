"""The evaluation of a Stable Diffusion run: its sweep, its scores and its card."""

import csv
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from diffusion_jax import runs
from diffusion_jax.evaluate import evaluate_command as evaluation
from diffusion_jax.evaluate import sweep
from diffusion_jax.examples.digits import judge as judges
from diffusion_jax.examples.digits.scorer import open_scorer
from diffusion_jax.files import sheets
from diffusion_jax.precache import lookup
from diffusion_jax.train import checkpoint, optimizer
from diffusion_jax.train.state import init_state
from diffusion_jax.weights import torch_weights
from sd_jax import drawing, task
from tests import written_runs
from tests.sd_jax import tiny

pytestmark = [pytest.mark.slow, pytest.mark.gate]

STEPS = (2, 4)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Return a run on coloured digits with two checkpoints of different random weights."""
    path = tmp_path_factory.mktemp("run")
    c = tiny.config(tiny.write_vae(path / "vae.safetensors"))
    runs.claim(path, c.to_dict())
    s = tiny.read_settings(c.to_dict())
    sd_task = task.make_task(s, lookup.open_encoder(s.text), tiny.vae_params())
    tx = optimizer.make_optimizer(s.optimizer, s.run.steps)
    saved = checkpoint.Checkpointer(path / runs.CHECKPOINTS, keep_last=2)
    for step in STEPS:
        params = written_runs.random_params(sd_task.init, seed=step)
        state = init_state(params, tx, s.optimizer.ema_decays)
        saved.save(step, state._replace(step=jnp.int32(step)), written_runs.Start())
    saved.close()
    return path


def opened(path, values, weights=({},)):
    return evaluation.open_subject(drawing.KIND, [str(path)], [[values]], [weights])


@pytest.fixture(scope="module")
def scorer():
    return open_scorer(tiny.SIZE, num_heldout=1)


def test_a_published_model_and_a_run_are_evaluated_together(workdir, scorer, published, tmp_path):
    """Each is sampled with its own sampler and size. --size resizes all pictures to one size."""
    folder = tmp_path / "theirs"
    shutil.copytree(published / "d", folder)
    config = json.loads((folder / "unet" / "config.json").read_text()) | {"sample_size": 8}
    (folder / "unet" / "config.json").write_text(json.dumps(config))
    published_model = opened(folder, {"steps": 2})
    assert (published_model.size, published_model.name) == (16, "theirs")
    points = [{"ema": "ema", "checkpoint": step} for step in STEPS]
    both = [opened(workdir, {"steps": 2}, points), published_model]
    plan = evaluation.Sweep((2.0,), batch_size=64, size=tiny.SIZE, name="beside")
    out = evaluation.evaluate(both, scorer, plan)
    with (out / sweep.TABLE).open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], row["checkpoint"]) for row in rows] == [
        (workdir.name, "2"),
        (workdir.name, "4"),
        ("theirs", "0"),
    ]
    assert len({row["fd_digits"] for row in rows}) == 3
    cards = {name: card for name, (_, card) in sweep.read_scored(out / sweep.SCORED).items()}
    (model,) = cards[f"{workdir.name}_step_00000004_ema_guidance_2_digits"]["models"]
    assert (model["vae"], model["negative_prompt"]) == (str(workdir / "vae.safetensors"), "")
    card = cards["theirs_step_00000000_ema_guidance_2_digits"]
    assert (card["sampler"], card["resized"]) == ("ddim", "Pillow's bicubic from 16x16")
    assert card["models"][0]["grid"] == "leading"
    model = drawing.load(folder, steps=2)
    numbers = range(len(scorer.prompts))
    drawn = model.batches(scorer.prompts, numbers, numbers, guidance=2.0, batch_sizes=[64])
    bicubic, pictures = (Image.Resampling.BICUBIC, sheets.to_uint8(np.concatenate([images for (images,) in drawn])))
    small = np.stack([Image.fromarray(i).resize((8, 8), bicubic) for i in pictures])
    expected = scorer.score(scorer.features(small, scorer.prompts))["digits"]["fd_digits"]
    assert float(rows[2]["fd_digits"]) == pytest.approx(expected, rel=1e-6)
    _, ink, paper = judges.compare(judges.fit_judge()(small)[:272], scorer.prompts[:272]).mean(0)
    assert float(rows[2]["seen_ink_accuracy"]) == pytest.approx(ink, abs=5e-5)  # Four digits are written.
    assert float(rows[2]["seen_paper_accuracy"]) == pytest.approx(paper, abs=5e-5)


def test_an_embedding_whose_word_is_in_no_prompt_is_a_warning(published, scorer, tmp_path, caplog):
    path = str(tmp_path / "fox.safetensors")
    torch_weights.write(path, {"emb_params": np.ones((2, 24), np.float32)})
    subject = opened(published / "d", {"steps": 2, "embedding": path})
    evaluation.rehearse(subject, scorer, evaluation.Sweep((2.0,), batch_size=2, size=tiny.SIZE))
    message = "no prompt contains 'fox', the word of a file of --embedding"
    assert caplog.messages.count(message) == 1
