"""Training with aspect buckets: exact resume, any mesh, replay, one program per shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config.settings import Data
from diffusion_jax.data import aspect_buckets
from diffusion_jax.data.sources import open_pictures
from diffusion_jax.devices import sharding
from diffusion_jax.model import loss_by_noise_level
from diffusion_jax.task import to_range
from diffusion_jax.train import loop, rehearse, replay
from tests.diffusion_jax import toy, training_noise
from tests.diffusion_jax.train import test_loop

SHAPES = ((8, 8), (4, 12))


def task():
    """Return a Task whose network is a 3x3 convolution shifted by the text."""

    def init(key):
        keys = jax.random.split(key)
        shapes = {"kernel": (3, 3, 3, 3), "text": (toy.WIDTH, 3)}
        return {name: 0.1 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

    def loss(params, frozen, batch, keys):
        x0 = to_range(batch["image"])
        sigma = training_noise.draw(keys, training_noise.SIGMA, jax.random.uniform)
        x = x0 + sigma[:, None, None, None] * training_noise.normal(keys, 0, *x0.shape[1:])
        layout = ("NHWC", "HWIO", "NHWC")
        text = toy.encode(frozen, batch)[0].mean(1) @ params["text"]
        out = jax.lax.conv_general_dilated(x, params["kernel"], (1, 1), "SAME", dimension_numbers=layout)
        each = jnp.square(out + text[:, None, None] - x0).mean((1, 2, 3))
        return each.mean(), loss_by_noise_level(each, sigma)

    return test_loop.TASK._replace(init=init, loss=loss, frozen={}, rules=[(".*", sharding.P())])


TASK = task()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve square and twelve wide pictures of random pixels."""
    path, rng = tmp_path_factory.mktemp("mixed"), np.random.default_rng(0)
    for number in range(24):
        pixels = rng.integers(0, 256, (8, (8, 24)[number % 2], 3), np.uint8)
        Image.fromarray(pixels).save(path / f"{number:02}.png")
        (path / f"{number:02}.txt").write_text(f"picture {number}")
    return str(path)


def open_batches(folder, run):
    pictures = open_pictures(Data("folder", path=folder), toy.SIZE)
    return toy.batches(run, pictures, buckets=aspect_buckets.sort(pictures, SHAPES))


def train(folder, workdir, sizes=(1, 1, 1), **changes):
    run = test_loop.RUN._replace(**changes)
    workdir.mkdir(exist_ok=True)
    with open_batches(folder, run) as batches:
        inputs = loop.RunInputs(TASK, batches)
        mesh = sharding.make_mesh(*sizes)
        state = loop.train(inputs, run, test_loop.OPTIMIZER, mesh, workdir, {})
    return jax.device_get(state)


def test_aspect_bucket_runs_resume_bit_for_bit_and_can_be_replayed(folder, tmp_path, monkeypatch):
    programs, compiled = [], loop.compiled
    count = lambda *arguments: programs.append(compiled(*arguments)) or programs[-1]
    monkeypatch.setattr(loop, "compiled", count)
    whole = train(folder, tmp_path / "whole", log_every=1)
    assert len(programs) == 2  # One program per shape.
    train(folder, tmp_path / "parts", steps=3)
    test_loop.assert_equal(train(folder, tmp_path / "parts"), whole)

    run = test_loop.RUN._replace(log_every=1)
    with open_batches(folder, run) as batches:
        inputs = loop.RunInputs(TASK, batches)
        mesh = sharding.make_mesh(1, 1, 1)
        replayed = replay.replay(inputs, run, test_loop.OPTIMIZER, mesh, tmp_path / "whole", 6)
    assert [line.differ for line in replayed.compared] == [{}] * 6
    assert replayed.pictures.shape[1:3] in SHAPES
    wide = replayed.pictures.shape[1:3] == (4, 12)
    assert {int(row["text"].split()[1]) % 2 for row in replayed.examples} == {int(wide)}


def test_eight_devices_train_aspect_buckets_like_one(folder, tmp_path):
    one = train(folder, tmp_path / "one", steps=4)
    eight = train(folder, tmp_path / "eight", (2, 4, 1), steps=4)
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(near, eight.params, one.params)


def test_the_rehearsal_traces_every_bucket_shape(folder, tmp_path):
    shapes = []

    def loss(params, frozen, batch, key):
        shapes.append(batch["image"].shape[1:3])
        return TASK.loss(params, frozen, batch, key)

    run = test_loop.RUN
    with open_batches(folder, run) as batches:
        inputs = loop.RunInputs(TASK._replace(loss=loss), batches)
        mesh = sharding.make_mesh(1, 1, 1)
        report = rehearse.rehearse(inputs, run, test_loop.OPTIMIZER, mesh, tmp_path / "new")
    assert set(shapes) == set(SHAPES)
    assert "buckets        image 8x8x3; image 4x12x3\n" in report
