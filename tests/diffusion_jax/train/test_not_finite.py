"""The report on the first step that is not finite, and the origin of its NaN."""

import json
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from PIL import Image

from diffusion_jax.devices import sharding
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.model import loss_by_noise_level
from diffusion_jax.train import loop, not_finite
from diffusion_jax.train.state import image_keys
from diffusion_jax.weights import restore
from tests.diffusion_jax import toy, training_noise
from tests.diffusion_jax.train.test_loop import OPTIMIZER, RUN
from tests.imagen_jax import commands
from tests.imagen_jax.conftest import TINY

STEP, ROW = 3, 5  # The position of the damaged picture.


class Damaged(digits.Digits):
    """Digits as floats. One has an infinite pixel."""

    damaged = -1

    def read(self, indices, places=None):
        images, texts = super().read(indices, places)
        images = images.astype(np.float32)
        images[indices == self.damaged, 2, 3, 1] = np.inf
        return images, texts

    def names(self, indices):
        return [f"photos/{index}.png" for index in indices]


@pytest.fixture
def pictures():
    damaged = Damaged(toy.SIZE)
    with toy.batches(RUN, damaged, num_threads=0) as batches:
        for _ in range(STEP):
            next(batches)
        (name,) = batches.names([ROW])
    damaged.damaged = int(re.findall(r"\d+", name)[0])
    return damaged


def train(workdir, pictures, sizes=(1, 1, 1), micro_batch=0, start=None, max_skipped=100, **changes):
    run = RUN._replace(**changes)
    workdir.mkdir(exist_ok=True)
    with toy.batches(run, pictures) as batches:
        inputs = loop.RunInputs(toy.task(), batches, start=start)
        optimizer = OPTIMIZER._replace(micro_batch=micro_batch, max_skipped=max_skipped)
        state = loop.train(inputs, run, optimizer, sharding.make_mesh(*sizes), workdir, {})
    path = workdir / not_finite.REPORT
    return state, json.loads(path.read_text()) if path.exists() else None


@pytest.mark.parametrize(("sizes", "micro_batch"), [((1, 1, 1), 4), ((2, 2, 1), 1)])
def test_the_report_names_a_damaged_record_and_its_noise_level(tmp_path, pictures, sizes, micro_batch, caplog):
    """The step has two micro batches."""
    with caplog.at_level(logging.WARNING):
        state, report = train(tmp_path, pictures, sizes, micro_batch, steps=STEP + 1)
    assert int(state.skipped) == 1
    keys = image_keys(jax.random.key(RUN.seed), STEP - 1, 8)
    sigma = np.exp(1.2 * training_noise.normal(keys, training_noise.SIGMA, 1) - 1.2)[ROW, 0]
    (sample,) = report["samples"]
    assert sample.pop("sigma") == pytest.approx(float(sigma), rel=1e-5)
    assert sample == {"row": ROW, "name": f"photos/{pictures.damaged}.png", "loss": None}
    assert report["inputs"] == ["batch/image"] and report["again_not_finite"]
    assert (report["step"], report["parameters_of_step"], report["num_samples"]) == (STEP, STEP + 1, 1)
    assert f"photos/{pictures.damaged}.png at sigma {sigma:.4g}" in caplog.text


def test_a_finite_run_writes_no_report(tmp_path):
    state, report = train(tmp_path, digits.Digits(toy.SIZE), steps=3)
    assert int(state.skipped) == 0 and report is None


def test_the_report_names_an_infinite_parameter(tmp_path):
    params = jax.device_get(toy.init(jax.random.key(1)))
    params["text"]["kernel"] = np.full_like(params["text"]["kernel"], np.inf)
    _, report = train(tmp_path, digits.Digits(toy.SIZE), start=lambda: params, steps=2)
    assert report["inputs"] == ["params/text/kernel"]
    assert (report["step"], report["num_samples"]) == (1, RUN.batch_size)


class Net(nn.Module):
    """Three layers, of which the second one fails if `bad` is set."""

    bad: str

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, name="first")(x)
        x = nn.remat(Divide)(self.bad, name="second")(x)
        return nn.Dense(4, name="third")(x)


class Divide(nn.Module):
    bad: str

    @nn.compact
    def __call__(self, x):
        if self.bad == "forwards":  # Infinite only for the sample whose row is zero.
            return x / jnp.abs(x).max(-1, keepdims=True)
        return jnp.sqrt(jnp.abs(x))  # Finite at 0, but its gradient is infinite.


@pytest.mark.parametrize(("bad", "module"), [("forwards", "Net/second"), ("backwards", "gradient of Net/second")])
def test_the_report_names_the_first_module_that_is_not_finite(bad, module):
    net = Net(bad)
    x = jnp.array([[1.0, 2.0], [0.0, 0.0], [3.0, 1.0]])
    params = net.init(jax.random.key(0), x)

    def loss(params, frozen, batch, key):
        each = (net.apply(params, batch["x"]) ** 2).mean(-1)
        return each.mean(), loss_by_noise_level(each, jnp.arange(3.0))

    everywhere = sharding.replicated(sharding.make_mesh(1, 1, 1))
    seen = not_finite.watch(loss, params, {}, {"x": x}, training_noise.keys_of(3), 1, everywhere)
    first = int(np.argmax(seen.bad))
    assert seen.modules[first] == module
    np.testing.assert_array_equal(seen.labels["sigma"], [0, 1, 2])
    np.testing.assert_array_equal(np.isfinite(seen.labels["loss"]), [True, bad != "forwards", True])
    np.testing.assert_array_equal(not_finite._bad_rows(seen), [1])


def test_only_the_first_new_failure_is_reported():
    lookout = not_finite.SkippedSteps(step=9, skipped=2, lag=1, most=100)
    counts = [2, 2, 3, 4, 4]
    failures = [
        lookout.failed(step, {"x": jnp.array(step)}, {"skipped": jnp.array(count)}, step == 4)
        for step, count in enumerate(counts)
    ]
    assert failures == [None, None, None, (2, {"x": jnp.array(2)}), None]
    late = not_finite.SkippedSteps(step=0, skipped=0, lag=2, most=100)
    assert late.failed(7, {}, {"skipped": jnp.array(1)}, last=False) is None
    assert late.failed(8, {}, {"skipped": jnp.array(1)}, last=True) == (7, {})


@pytest.mark.parametrize(
    ("first", "most", "skipped", "ends"),
    [
        (0, 100, [1] * 20, 10),  # All steps from the start.
        (0, 4, [1] * 20, 4),
        (0, 12, [0] + [1] * 20, 13),  # After a finite step.
        (1, 12, [1] * 20, 13),  # A step before the last checkpoint was finite.
        (0, 3, [0, 1, 1, 0, 1, 1, 0, 1, 1, 1], 10),  # Only consecutive ones count.
        (0, 3, [1, 1, 0] * 6, None),
    ],
)
def test_a_run_ends_after_too_many_consecutive_skipped_steps(first, most, skipped, ends):
    lookout, counts = not_finite.SkippedSteps(first, 0, 0, most), np.cumsum(skipped).tolist()
    run = lambda: [
        lookout.failed(step, {}, {"skipped": jnp.array(count)}, last=False)
        for step, count in enumerate(counts, first + 1)
    ]
    if ends is None:
        assert len(run()) == len(skipped)
        return
    with pytest.raises(not_finite.NothingLearned, match=f"to step {ends}, were skipped"):
        run()


def test_a_run_with_only_skipped_steps_ends_without_saving(tmp_path, monkeypatch):
    """The loss is finite in the first three steps only. Two more steps are already in flight."""
    task = toy.task()

    def loss(params, frozen, batch, key):
        value, metrics = task.loss(params, frozen, batch, key)
        few = params["steps"] < 1.1e-3  # Three of Adam's steps, with the warm-up.
        return jnp.where(few, value - params["steps"], jnp.nan), metrics

    init = lambda key: task.init(key) | {"steps": jnp.zeros(())}
    counting = task._replace(init=init, loss=loss, rules=[(r"steps", sharding.P()), *task.rules])
    monkeypatch.setattr(toy, "task", lambda: counting)
    with pytest.raises(not_finite.NothingLearned, match="last 5 steps, up to step 8"):
        train(tmp_path, digits.Digits(toy.SIZE), steps=20, max_skipped=5, save_every=3)
    assert restore.steps(tmp_path / "checkpoints") == [6, 9]


@pytest.mark.slow
def test_train_names_the_file_of_an_embedding_that_overflows(tmp_path):
    """Pictures with stored T5 embeddings, one of which overflows, on two devices."""
    draw = np.random.default_rng(0)
    for i in range(24):
        image = Image.fromarray(draw.integers(0, 255, (16, 16, 3), np.uint8))
        image.save(tmp_path / f"photo_{i:02}.png")
        text = draw.standard_normal((5, 32)).astype(np.float32)
        text[2, 7] = 3e38 if i == 13 else 1.0
        np.save(tmp_path / f"photo_{i:02}.npy", text)
    fields = f"steps=3 text.encoder=t5 data.text=npy data.source=folder data.path={tmp_path} prompts=()"
    flags = (*TINY, *commands.config_flags(fields), f"--workdir={tmp_path / 'run'}")
    ended = commands.run("train", *flags, devices=2)
    assert ended.code == 0, ended.err
    report = json.loads((tmp_path / "run" / not_finite.REPORT).read_text())
    assert [sample["name"] for sample in report["samples"]] == ["photo_13.png"]
    assert report["inputs"] == [] and report["module"] == "UNet/mid_attn/norm_context"
    assert "such as photo_13.png at sigma " in ended.err
