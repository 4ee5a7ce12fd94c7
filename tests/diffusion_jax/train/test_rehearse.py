"""The report of a rehearsal, and errors that it finds before the run starts."""

import logging
import os
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from diffusion_jax import runs
from diffusion_jax.config.settings import Optimizer
from diffusion_jax.data.pictures import Columns
from diffusion_jax.devices import sharding
from diffusion_jax.logs import run_log
from diffusion_jax.train import continuing, loop
from diffusion_jax.train.rehearse import _sample, rehearse
from diffusion_jax.weights import restore
from tests.diffusion_jax import toy
from tests.diffusion_jax.files.test_folder_lock import end, hold
from tests.diffusion_jax.test_heldout import records
from tests.diffusion_jax.train.test_loop import EXAMPLES, OPTIMIZER, RUN, TASK, train


@pytest.fixture
def compiled(caplog):
    """Collect JAX's messages about the programs that it compiles."""
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        yield lambda: [r.message for r in caplog.records if "XLA compilation" in r.message]


def report_of(workdir, task=TASK, sizes=(1, 1, 1), run=RUN, settings=OPTIMIZER, inputs=(), **options):
    """Rehearse a run, and return the lines of its report by name."""
    mesh = sharding.make_mesh(*sizes)
    with toy.batches(run) as batches:
        before = batches.get_state()
        of_run = loop.RunInputs(task, batches, EXAMPLES)._replace(**dict(inputs))
        text = rehearse(of_run, run, settings, mesh, workdir, **options)
        assert batches.get_state() == before  # The rehearsal takes no sample from the run.
    return {line[:14].strip(): line[15:] for line in text.splitlines()}


def test_a_rehearsal_reports_the_run_without_compiling_it(tmp_path, compiled):
    lines = report_of(tmp_path / "new", sizes=(1, 2, 1))
    trained = sum(leaf.size for leaf in jax.tree.leaves(toy.init(jax.random.key(0))))
    once = len(compiled())  # Programs that create the toy's parameters.
    report_of(tmp_path / "new", sizes=(1, 2, 1))
    assert [m for m in compiled()[once:] if "train_step" in m or "from_seeds" in m] == []
    assert lines["parameters"] == f"{trained:,} trained, {toy.WIDTH**2:,} frozen"
    assert lines["device"] == "2 x cpu, 1 process; mesh: replica 1, fsdp 2, tensor 1"
    assert lines["data"].startswith("34,221 pictures; image 8x8x3, text_ids 6, text_mask 6;")
    assert lines["files"] == "34,221 pictures"
    assert lines["read"] == "256 pictures; all can be used"
    fits = "the largest micro batch that fits is 4"
    assert lines["batch"] == f"8 images per step: 1 pass of 4 on each device; {fits}"
    assert lines["drawing"] == "3 examples of 8x8"
    assert lines["workdir"] == f"{tmp_path / 'new'}: a new run"
    assert lines["rehearsed"].endswith("nothing was compiled")
    assert not (tmp_path / "new").exists()


def test_the_report_states_the_optimizers_share_of_the_arithmetic(tmp_path):
    lines = report_of(tmp_path, settings=OPTIMIZER._replace(name="muon"))
    passes = float(report_of(tmp_path)["arithmetic"].removesuffix(" TFLOP a step"))
    shapes = [x.shape for x in jax.tree.leaves(toy.init(jax.random.key(0))) if x.ndim > 1]
    # Five iterations for X [m, n] with m > n: A = X'X, A A, and X times a polynomial of A.
    sides = [sorted((np.prod(shape[:-1]), shape[-1])) for shape in shapes]
    update = sum(5 * 2 * (2 * n * n * m + n**3) for n, m in sides) / 1e12
    shown = re.fullmatch(r"(.*) TFLOP a step, of which the optimizer takes (.*)", lines["arithmetic"])
    assert shown
    np.testing.assert_allclose([float(x) for x in shown.groups()], [passes + update, update], rtol=5e-3)


def test_a_rehearsal_reads_some_pictures_and_counts_unusable_ones():
    class Damaged:
        def __init__(self):
            self.found = {"no_caption": 5}

        def __len__(self):
            return 400

        def columns(self, indices):
            damaged = int((indices % 25 == 0).sum())
            self.found["broken_image"] = self.found.get("broken_image", 0) + damaged
            return Columns(np.zeros((len(indices), 2, 2, 3), np.uint8), [""] * len(indices), {})

        def skipped(self):
            return self.found

    rows = np.unique(np.linspace(0, 399, 256).astype(int))
    expected = int((rows % 25 == 0).sum())
    assert _sample(Damaged()) == f"256 pictures; left out: {expected} broken_image"


def test_scores_during_training_are_rehearsed_with_pictures_of_zeros(tmp_path):
    seen = []

    def score(draw, params):
        seen.append(draw(params, EXAMPLES.batch, [0, 1, 2], None))

    lines = report_of(tmp_path, inputs={"evaluation": loop.Scoring(16, lambda *_: {}, score)})
    assert lines["drawing"].endswith("scores after every 16 images")
    assert seen[0].shape == (3, 8, 8, 3) and not seen[0].any()


@pytest.mark.parametrize(
    ("broken", "error", "note"),
    [
        ({"loss": lambda p, f, b, k: p["nothing"]}, KeyError, "a training step"),
        ({"sample": lambda *_: jnp.ones((3, 8)) @ jnp.ones((3, 8))}, TypeError, "drawing"),
        ({"sample": lambda *_: jnp.ones((3, 8, 8, 4))}, ValueError, "drawing"),
    ],
)
def test_a_rehearsal_error_names_the_part_that_would_fail(tmp_path, broken, error, note):
    with pytest.raises(error) as raised:
        report_of(tmp_path, TASK._replace(**broken))
    assert raised.value.__notes__[-1] == f"(while rehearsing {note}, before anything was compiled)"


def test_a_sampler_that_does_not_return_pictures_is_an_error(tmp_path):
    message = r"of the same shape .* returned \[8, 8, 4\] and \[8, 8, 4\]: check the Task's sample"
    with pytest.raises(ValueError, match=message):
        report_of(tmp_path, TASK._replace(sample=lambda *_: jnp.ones((3, 8, 8, 4))))


def test_the_memory_for_drawing_is_estimated_per_batch(tmp_path, monkeypatch, caplog):
    few = report_of(tmp_path)["drawn at once"]
    assert re.fullmatch(r"3 pictures on each device, for which it needs about 0\.00 GB", few)
    monkeypatch.setattr(f"{__name__}.EXAMPLES", EXAMPLES._replace(most=2))
    assert report_of(tmp_path)["drawn at once"].startswith("2 pictures on each device, for which")
    report_of(tmp_path, device_memory=2e5, ignore_memory=True)
    assert "drawing 2 pictures at once may not fit into a device's memory: it needs" in caplog.text


def test_the_held_out_loss_is_rehearsed(tmp_path, compiled):
    held = {"records": records()[0]}
    report_of(tmp_path, inputs=held)
    assert not [message for message in compiled() if "of_rows" in message]
    task = TASK._replace(measure=TASK.measure._replace(errors=lambda *_: 1 // 0))
    with pytest.raises(ZeroDivisionError) as raised:
        report_of(tmp_path, task, inputs=held)
    assert "while rehearsing the held-out loss" in raised.value.__notes__[-1]


LONG = Optimizer(lr=1e-3, warmup=10, ema_decays=(0.99, 0.9999), ema_warmup=False)


PASSES = "0.117 passes over the pictures; the learning rate rises to 100% of optimizer.lr=0.001"
AVERAGED = "; pictures are drawn with averaged weights (optimizer.ema_decays=0.9999), which at the end consist of "
INITIAL = "95 % of the average that pictures are drawn with are the initial weights, because its decay rate is 0.9999"
SLOW = "because optimizer.warmup is 9999, but the run has 499 steps: lower optimizer.warmup"


@pytest.mark.parametrize(
    "steps, changes, visible, warning",
    [
        (500, {}, f"{PASSES}{AVERAGED}4.9% training and 95.1% initial", f"{INITIAL}: set optimizer.ema_warmup=True"),
        (500, {"ema_warmup": True}, "consist of 100.0% training and 0.0% initial weights", ""),
        (500, {"ema_decays": ()}, PASSES, ""),
        (50_000, {}, "consist of 99.3% training and 0.7% initial weights", ""),
        (499, {"warmup": 9999, "ema_warmup": True}, "the learning rate rises to 5% of optimizer.lr", SLOW),
    ],
)
def test_the_report_says_what_the_averaged_pictures_will_show(tmp_path, caplog, steps, changes, visible, warning):
    lines = report_of(tmp_path, run=RUN._replace(steps=steps), settings=LONG._replace(**changes))
    assert visible in lines["learning"]
    assert warning in caplog.text and bool(warning) == bool(caplog.text)


@pytest.mark.parametrize("begun", [False, True])
def test_the_averages_of_an_added_lora_are_counted_from_the_step_at_which_it_was_added(tmp_path, begun):
    """Each average has 500 of the 49,500 steps, whether the run or only its source exists."""
    source = continuing.ContinuedRun(str(tmp_path / "other"), 49_000, {}, adds_lora=True)
    source.folder.mkdir(parents=True)
    runs.claim(source.run, quickstart.get_config().to_dict())
    if begun:
        run_log.begin_from(tmp_path, source.run, source.step, "", source.averages_from)
    lines = report_of(tmp_path, run=RUN._replace(steps=49_500), settings=LONG, source=None if begun else source)
    assert lines["learning"].endswith("consist of 4.9% training and 95.1% initial weights")


@pytest.mark.parametrize(
    "schedule, before, after",
    [("cosine", "0", "50"), ("wsd", "0", "100"), ("constant", "", ""), ("inverse_sqrt", "", "")],
)
def test_a_rehearsal_warns_if_the_learning_rate_jumps_when_a_run_is_extended(tmp_path, caplog, schedule, before, after):
    settings = OPTIMIZER._replace(schedule=schedule, warmup=0)
    steps = 10
    train(tmp_path, steps=steps)
    config = quickstart.get_config().to_dict() | {"steps": steps}
    config["optimizer"] |= {"schedule": schedule, "warmup": 0}
    runs.claim(tmp_path, config)
    report_of(tmp_path, run=RUN._replace(steps=2 * steps), settings=settings)
    line = f"the learning rate jumps from {before} % to {after} % of optimizer.lr, because the schedule '{schedule}'"
    assert (line in caplog.text) == bool(before) == ("jumps" in caplog.text)
    assert ("to warm up again instead, set optimizer.restart=10" in caplog.text) == bool(before)


def test_the_report_of_a_resumed_run_names_its_checkpoint_and_time(tmp_path):
    train(tmp_path, steps=2, log_every=1)
    lines = report_of(tmp_path)
    assert lines["workdir"] == f"{tmp_path}: continues from step 2, whose checkpoint is sound"
    assert lines["time"].startswith("5 steps at ")
    assert "images/s, as last measured: " in lines["time"]


def test_a_rehearsal_skips_damaged_checkpoints_and_names_another_writer(tmp_path, caplog):
    train(tmp_path, steps=2, save_every=1)
    (tmp_path / "checkpoints" / "2" / "checksums" / "0-of-1.json").write_text("{")
    caplog.clear()
    process = hold(tmp_path)
    lines = report_of(tmp_path)
    end(process)
    assert lines["workdir"] == f"{tmp_path}: continues from step 1, whose checkpoint is sound"
    assert "skipping the damaged checkpoint" in caplog.text
    assert lines["in use"].startswith(f"{tmp_path} is being written by process {process.pid} on ")
    # A rehearsal moves no checkpoint.
    assert sorted(restore.steps(tmp_path / "checkpoints")) == [1, 2]


def test_rehearsing_with_another_architecture_than_the_checkpoint_is_an_error(tmp_path):
    train(tmp_path, steps=1)
    wider = TASK._replace(init=lambda key: {**TASK.init(key), "more": {"bias": jnp.zeros(2)}})
    with pytest.raises(ValueError, match=r"another architecture; 1 of \d+ arrays differ"):
        report_of(tmp_path, wider)


def test_a_rehearsal_warns_about_too_little_memory_and_disk_space(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("diffusion_jax.devices.hardware.host_memory", lambda: 10**6)
    usage = shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    report_of(tmp_path, ignore_memory=True)
    assert "a training step may not fit into a device's memory: " in caplog.text
    assert "the disk may fill up: " in caplog.text


def test_the_flag_device_memory_overrides_the_memory_of_local_devices(tmp_path, caplog):
    lines = report_of(tmp_path, device_memory=1e5, ignore_memory=True)
    assert " of 0.0 GB per device, estimated: " in lines["memory"]
    assert "a training step may not fit into a device's memory: " in caplog.text


@pytest.mark.parametrize(
    ("device_memory", "advice"),
    [
        (1e5, "lower batch_size, or set unet.remat=True"),
        (8.5e6, "set optimizer.micro_batch=256, or set unet.remat=True"),
    ],
)
def test_a_step_that_needs_much_more_memory_than_available_is_an_error(tmp_path, device_memory, advice):
    message = f"a training step needs about .* GB: {advice}, or try with --ignore_memory"
    with pytest.raises(ValueError, match=message):
        report_of(tmp_path, run=RUN._replace(batch_size=1024), device_memory=device_memory)


def test_a_workdir_without_write_permission_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: pathlib.Path(path) != tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be written to: choose another"):
        report_of(tmp_path / "run")
