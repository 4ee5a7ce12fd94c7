"""The held-out loss: computed again image by image, for several batches and meshes, and logged."""

import json

import jax
import numpy as np
import pytest

from configs import quickstart
from diffusion_jax import heldout
from diffusion_jax.config.settings import Data, Heldout, Optimizer, Run
from diffusion_jax.data import pipeline
from diffusion_jax.devices import sharding
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.logs import run_log
from diffusion_jax.train import loop
from tests.diffusion_jax import toy
from tests.imagen_jax import commands

TASK = toy.task()
RUN = Run(steps=4, batch_size=8, seed=5, log_every=4, sample_every=0, save_every=4)


def records(every=2, count=12, levels=3):
    data = Data("diffusion_jax.examples.digits", threads=0, heldout=0.01)
    pictures, mesh = digits.Digits(toy.SIZE), sharding.make_mesh(1, 1, 1)
    batches = pipeline.training_batches(pictures, toy.ENCODER.tokenize, RUN, data, mesh)
    return heldout.open_records(Heldout(every, count, levels), batches, TASK.measure), batches


def score(mesh, batch_size):
    held, _ = records()
    frozen = sharding.place_all(TASK.frozen, mesh, TASK.rules)
    params = sharding.place_all(jax.device_get(toy.init(jax.random.key(3))), mesh, TASK.rules)
    return heldout.make_scorer(TASK, frozen, mesh, held, batch_size)(params)


@pytest.fixture(scope="module")
def alone():
    return score(sharding.make_mesh(1, 1, 1), 36)


def test_the_held_out_loss_is_the_mean_over_records_and_levels_with_fixed_noise(alone):
    held, _ = records()
    assert held is not None and held.batch["image"].shape == (12, 8, 8, 3)
    params, means = toy.init(jax.random.key(3)), []
    for level, sigma in enumerate(held.sigmas):
        fold = lambda number, level=level: jax.random.fold_in(jax.random.fold_in(jax.random.key(0), number), level)
        keys = jax.numpy.stack([fold(number) for number in held.numbers])
        at = jax.numpy.full(12, sigma)
        means.append(np.mean(TASK.measure.errors(params, TASK.frozen, held.batch, keys, at), 1))
        name = f"sigma_{sigma:.3g}"
        np.testing.assert_allclose(alone[f"loss/{name}"], means[-1][0], rtol=1e-5)
        np.testing.assert_allclose(alone[f"v_loss/{name}"], means[-1][1], rtol=1e-5)
    assert alone["loss"] == pytest.approx(np.mean(means, 0)[0], rel=1e-5)
    assert len(alone) == 2 * (1 + 3)


def test_held_out_levels_are_quantiles_of_the_training_noise():
    levels = TASK.measure.levels(3)
    # The quantiles 1/6, 1/2 and 5/6 of a lognormal. With 65,536 draws, their error is below 0.01.
    np.testing.assert_allclose(np.log(levels), -1.2 + 1.2 * np.array([-0.9674, 0, 0.9674]), atol=0.02)


@pytest.mark.parametrize(("sizes", "batch_size"), [((1, 1, 1), 8), ((1, 8, 1), 16), ((2, 2, 1), 8)])
def test_the_held_out_loss_does_not_depend_on_batch_size_or_mesh(alone, sizes, batch_size):
    other = score(sharding.make_mesh(*sizes), batch_size)
    assert other.keys() == alone.keys()
    # Float32 sums in another order: 6 digits agree for each image, and 7 for their mean.
    np.testing.assert_allclose([*other.values()], [*alone.values()], rtol=1e-6)


def test_training_logs_the_held_out_loss_of_parameters_and_averages(tmp_path):
    held, batches = records(every=3)
    optimizer = Optimizer(lr=1e-3, warmup=0, ema_decays=(0.5,))
    with batches:
        inputs = loop.RunInputs(TASK, batches, records=held)
        state = loop.train(inputs, RUN, optimizer, sharding.make_mesh(), tmp_path, {})
    lines = [row for row in run_log.read_metrics(tmp_path / "metrics.jsonl") if "heldout/raw/loss" in row]
    assert [row["step"] for row in lines] == [3, 4]  # Every third step, and the last.
    assert lines[0]["heldout/raw/loss"] != lines[1]["heldout/raw/loss"]
    frozen = jax.device_get(TASK.frozen)
    fresh = heldout.make_scorer(TASK, frozen, sharding.make_mesh(), held, 8)(state.ema["0.5"])
    assert lines[1]["heldout/ema_0.5/loss"] == fresh["loss"] != lines[1]["heldout/raw/loss"]
    assert (tmp_path / "tensorboard").is_dir()


def test_a_held_out_loss_without_held_out_records_is_an_error():
    data = Data("diffusion_jax.examples.digits", threads=0)
    pictures, mesh = digits.Digits(toy.SIZE), sharding.make_mesh()
    with pipeline.training_batches(pictures, toy.ENCODER.tokenize, RUN, data, mesh) as batches:
        with pytest.raises(ValueError, match=r"no records are held out: .* such as data.heldout=0.01"):
            heldout.open_records(Heldout(every=1), batches, TASK.measure)
        assert heldout.open_records(Heldout(), batches, TASK.measure) is None


@pytest.mark.gate
@pytest.mark.slow
def test_the_heldout_command_prints_the_losses_that_training_logged(tmp_path):
    work = f"--workdir={tmp_path / 'run'}"
    fields = "steps=4 heldout.every=4 data.heldout=0.01 heldout.records=16 heldout.levels=4 sample_every=0 "
    fields += "batch_size=8 unet.embed_dim=32 unet.image_size=8 unet.cond_dim=32 optimizer.warmup=0"
    flags = ("--config=configs/quickstart.py", work, *commands.config_flags(fields))
    ended = commands.run("train", *flags, devices=1, before=commands.skip_rehearsal)
    assert ended.code == 0, ended.err
    written = run_log.read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    ended = commands.run("diffusion_jax.heldout", work, devices=4)
    assert ended.code == 0, ended.err
    raw, averaged = map(json.loads, ended.out.splitlines())
    assert (raw["weights"], averaged["weights"], raw["step"]) == ("raw", "ema_0.999", 4)
    for line in (raw, averaged):
        names = [name for name in line if "loss" in name]
        assert len(names) == 2 * (1 + 4)
        then = [written[f"heldout/{line['weights']}/{name}"] for name in names]
        np.testing.assert_allclose([line[name] for name in names], then, rtol=3e-6)
    some = work, "--ema=raw", "--levels=0.5,2", "--records=8"
    others = digits.write_examples(tmp_path / "others", 8, size=8)
    whole, same, other = (
        json.loads(commands.run("diffusion_jax.heldout", *some, data, devices=1).out)
        for data in ("--share=1", "--data=diffusion_jax.examples.digits:", f"--data=folder:{others}")
    )
    assert whole == same != other
    assert {"loss/sigma_0.5", "loss/sigma_2"} < whole.keys() and len(whole) == 2 + 2 * 3
    assert quickstart.get_config().optimizer.ema_decays == (0.999,)
