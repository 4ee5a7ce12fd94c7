"""The training command: data sources and errors."""

import re

import numpy as np
import pytest

from diffusion_jax import runs
from diffusion_jax.devices import sharding
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.logs import run_log
from diffusion_jax.text import precomputed
from diffusion_jax.train import loop
from diffusion_jax.weights import finetune
from imagen_jax import train
from imagen_jax.settings import read_settings
from tests.diffusion_jax import toy
from tests.imagen_jax import commands
from tests.imagen_jax.conftest import STDERR, TINY


def test_train_logs_step_rate_loss_and_time_left(trained):
    text = (trained / STDERR).read_text()
    line = r"step 3/\d+ \| [\d,.]+ images/s \| loss \d\.\d{4} \| \d+:\d\d:\d\d left\n"
    assert re.search(line, text)
    assert "Traceback" not in text


def stored_embeddings(path):
    """Write twelve digits with embeddings of three to five tokens."""
    digits.write_examples(path, 12, size=toy.SIZE)
    rng = np.random.default_rng(0)
    for i, text in enumerate(sorted(path.glob("*.txt"))):
        np.save(text.with_suffix(".npy"), rng.normal(size=(3 + i % 3, 32)).astype(np.float16))
        text.unlink()
    return {"source": "folder", "path": str(path), "text": "npy"}


@pytest.mark.parametrize("embedded", [False, True])
def test_train_draws_samples_from_its_prompts_or_from_stored_embeddings(tmp_path, embedded):
    """Runs the command's data and examples with a toy system that compiles in a second."""
    data = stored_embeddings(tmp_path / "data") if embedded else {"source": "diffusion_jax.examples.digits"}
    s = tiny(data, encoder="t5" if embedded else "hashed")
    encoder = precomputed.encoder(32, 6) if embedded else toy.ENCODER
    mesh = sharding.make_mesh(1, 1, 1)
    (tmp_path / "run").mkdir()
    with train.open_batches(s, encoder, mesh) as batches:
        examples = train._examples(s, encoder, batches)
        inputs = loop.RunInputs(toy.task(encoder), batches, examples)
        state = loop.train(inputs, s.run, s.optimizer, mesh, tmp_path / "run", {})
    assert (int(state.step), int(state.skipped)) == (2, 0)
    assert [path.name for path in (tmp_path / "run" / "samples").iterdir()] == ["step_00000002.png"]
    if not embedded:
        assert examples.captions == s.run.prompts
        return
    assert examples.captions == tuple(f"text of picture {i}" for i in range(8))
    for row, path in enumerate(sorted((tmp_path / "data").glob("*.npy"))[:8]):
        array = np.load(path)
        np.testing.assert_array_equal(examples.batch["text"][row, : len(array)], array)
    np.testing.assert_array_equal(examples.batch["text_mask"].sum(1), [3, 4, 5, 3, 4, 5, 3, 4])


def tiny(data, encoder):
    """Return settings of two steps on 8x8 pixels."""
    from configs import quickstart

    c = quickstart.get_config()
    c.unet.update(image_size=toy.SIZE, patch=2, embed_dim=32, head_dim=32)
    c.unet.attention_resolutions = ()
    c.text.update(encoder=encoder, width=32, max_tokens=6)
    c.optimizer.update(schedule="constant")
    c.data.update(data)
    c.update(steps=2, batch_size=8, sample_every=2, save_every=2, log_every=1)
    return read_settings(c.to_dict())


def test_a_mended_config_takes_over_the_workdir_of_a_start_without_a_checkpoint(trained, tmp_path):
    config = runs.load(trained)
    runs.claim(tmp_path, config | {"optimizer": config["optimizer"] | {"lr": 0.5}})
    (tmp_path / "vocabulary.json").write_text('{"words": {"other": 1}}')
    (tmp_path / finetune.BASE).write_text('{"fingerprint": "that of another model"}')
    (tmp_path / run_log.METRICS).write_text('{"step": 0, "loss": 1.0}')
    arguments = (*TINY, f"--workdir={tmp_path}", "--config.steps=1")
    ended = commands.succeed("train", *arguments, before=commands.skip_rehearsal)
    assert "so this config replaces that of an earlier start (optimizer.lr: 0.5" in ended.err
    assert "other" not in (tmp_path / "vocabulary.json").read_text()
    assert not (tmp_path / finetune.BASE).exists()
    assert [line["step"] for line in run_log.read_metrics(tmp_path / run_log.METRICS)] == [1]


def test_settings_without_effect_are_named_before_training(tmp_path):
    unread = {
        "data.keep_tags": 1,
        "data.fields_drop_prob": 0.5,
        "data.prior_weight": 0.5,
        "lora.alpha": 3.0,
        "lora.scale": 0.5,
        "optimizer.decay_from": 7,
        "optimizer.snapshot_every": 3,
        "evaluation.prompts": "a.txt",
    }
    overrides = [f"--config.{name}={value}" for name, value in unread.items()]
    ended = commands.succeed("train", *TINY, *overrides, "--rehearse", f"--workdir={tmp_path}")
    named = re.findall(r"(\S+) is .*, but has no effect: this run does not read it", ended.err)
    assert sorted(named) == sorted(unread)  # Not evaluation.guidance, which the config sets.


def test_train_help_shows_example_commands():
    text = commands.run("train", "--help").out
    assert "python -m imagen_jax.train --config=configs/quickstart.py --workdir=runs/" in text
    assert "--config.optimizer.lr=2e-4" in text
