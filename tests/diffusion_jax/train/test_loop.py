"""The training loop on a toy system: exact resume, any mesh, and the files of a run."""

import hashlib
import os
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

from diffusion_jax import runs
from diffusion_jax.config.settings import Optimizer, Run
from diffusion_jax.data import pipeline
from diffusion_jax.devices import sharding
from diffusion_jax.draw import program
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.files import checksums, sheets
from diffusion_jax.logs import run_log
from diffusion_jax.train import checkpoint, loop, measuring, out_of_memory, step_report, trace
from diffusion_jax.weights import restore
from tests.diffusion_jax import toy
from tests.diffusion_jax.train import test_checkpoint

RUN = Run(seed=5, steps=7, batch_size=8, sample_every=0, save_every=100, keep_last=2, step_timeout=600)
OPTIMIZER = Optimizer(lr=1e-3, warmup=3, b2=0.99, ema_decays=(0.5, 0.9), ema_warmup=False)
CAPTIONS = tuple(digits.heldout_prompts()[:3])
EXAMPLES = loop.Examples(toy.ENCODER.tokenize(CAPTIONS), CAPTIONS, 2.0)
TASK = toy.task()


def sometimes_nan(task):
    """Make the loss NaN at about every third step, chosen by the first image's key."""

    def loss(params, frozen, batch, keys):
        value, metrics = task.loss(params, frozen, batch, keys)
        factor = jnp.where(jax.random.uniform(keys[0]) < 1 / 3, jnp.nan, 1.0)
        return factor * value, metrics

    return task._replace(loss=loss)


def test_the_default_average_of_a_short_run_follows_the_parameters(tmp_path):
    state = train(tmp_path, settings=Optimizer(lr=1e-2, warmup=0), steps=20)
    apart = lambda other: float(optax.tree.norm(optax.tree.sub(state.params, other)))
    # With a constant decay of 0.9999, 99.8 % of the distance would remain.
    assert apart(state.ema["0.9999"]) < 0.3 * apart(TASK.init(jax.random.key(RUN.seed)))


def train(workdir, task=TASK, sizes=(1, 1, 1), evaluation=None, start=None, settings=OPTIMIZER, options=(), **changes):
    run = RUN._replace(**changes)
    workdir.mkdir(exist_ok=True)
    mesh = sharding.make_mesh(*sizes)
    with toy.batches(run) as batches:
        inputs = loop.RunInputs(task, batches, EXAMPLES, evaluation, start)
        state = loop.train(inputs, run, settings, mesh, workdir, {"a": (1, 2)}, **dict(options))
    return jax.device_get(state)


@pytest.fixture
def order(monkeypatch):
    """Record a hash of the pictures of every batch, in order."""
    digests = []

    def record(batch, sharding):
        digests.append(hashlib.sha256(batch["image"].tobytes()).hexdigest())
        return pipeline.to_global(batch, sharding)

    monkeypatch.setattr(loop, "to_global", record)
    return digests


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_the_step_and_the_nan_report_are_traced_with_the_current_mesh(tmp_path):
    seen = []

    def loss(params, frozen, batch, key):
        seen.append(jax.sharding.get_abstract_mesh())
        value, metrics = TASK.loss(params, frozen, batch, key)
        return value * jnp.nan, metrics

    train(tmp_path / "run", TASK._replace(loss=loss), (1, 2, 1), steps=1)
    assert (tmp_path / "run" / "not_finite.json").exists()
    assert set(seen) == {sharding.make_mesh(1, 2, 1).abstract_mesh} and len(seen) >= 2


def test_training_continues_if_memory_does_not_suffice_for_a_nan_report(tmp_path, monkeypatch, caplog):
    def watch(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(loop.not_finite, "watch", watch)
    loss = lambda *arguments: (TASK.loss(*arguments)[0] * jnp.nan, {})
    state = train(tmp_path / "run", TASK._replace(loss=loss), steps=2)
    assert int(state.step) == 2 and not (tmp_path / "run" / "not_finite.json").exists()
    assert "could not run again: RESOURCE_EXHAUSTED" in caplog.text


@pytest.mark.parametrize("name", ["muon", "adafactor"])  # The commands resume adamw in test_interrupted.py.
def test_seven_steps_equal_three_and_four_after_resuming_bit_for_bit(tmp_path, order, name):
    task, settings = sometimes_nan(TASK), OPTIMIZER._replace(name=name)
    whole = train(tmp_path / "whole", task, settings=settings)
    assert int(whole.step) == 7 and 0 < int(whole.skipped) < 7
    assert_differ(whole.params, whole.ema["0.5"], whole.ema["0.9"])
    seen = [*order]
    order.clear()
    train(tmp_path / "parts", task, steps=3, settings=settings)
    assert_equal(train(tmp_path / "parts", task, settings=settings), whole)
    assert order == seen and len({*seen}) == 7


def test_given_start_parameters_are_used_only_at_the_first_start(tmp_path):
    start_params = jax.device_get(toy.init(jax.random.key(99)))
    own = train(tmp_path / "own", TASK._replace(init=lambda key: jax.tree.map(jnp.asarray, start_params)))
    state = train(tmp_path / "given", start=lambda: start_params, steps=3)
    state = train(tmp_path / "given", start=lambda: start_params)  # Resumes from its checkpoint.
    assert_equal(state, own)


def test_a_checkpoint_of_step_0_takes_precedence_over_start_parameters(tmp_path):
    """`weights convert` writes such a checkpoint, with the data position at the start."""
    _, _, create, _ = loop.set_up(TASK, RUN, OPTIMIZER, sharding.make_mesh(1, 1, 1))
    for name in ("own", "given"):
        saved = checkpoint.Checkpointer(tmp_path / name / runs.CHECKPOINTS, keep_last=1)
        get_state = lambda: b'{"samples": 0}'
        first = types.SimpleNamespace(get_state=get_state, set_state=lambda state: None)
        saved.save(0, create(jax.random.key(98)), first, {})
        saved.close()
    start_params = jax.device_get(toy.init(jax.random.key(99)))
    state = train(tmp_path / "given", start=lambda: start_params, steps=2)
    assert_equal(state, train(tmp_path / "own", steps=2))


def assert_differ(*trees):
    """Check that trees differ, because averages that are never updated would also be equal."""
    leaves = [np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)]) for tree in trees]
    assert len({leaf.tobytes() for leaf in leaves}) == len(trees)


def test_sigterm_saves_a_checkpoint_and_the_run_resumes_bit_for_bit(tmp_path, monkeypatch, order):
    whole = train(tmp_path / "whole")
    seen = [*order]
    order.clear()
    during_close, compared = [], []
    close, record = checkpoint.Checkpointer.close, loop.to_global

    def kill_at_the_fourth_batch(batch, sharding):
        if len(order) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return record(batch, sharding)

    def watched_close(self):
        during_close.append(signal.getsignal(signal.SIGTERM))
        close(self)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "to_global", kill_at_the_fourth_batch)
        patch.setattr(checkpoint.Checkpointer, "close", watched_close)
        patch.setattr(checksums, "_drop_cache", lambda path: compared.append(path))
        stopped = train(tmp_path / "parts")
    assert int(stopped.step) == 4
    folder = tmp_path / "parts" / runs.CHECKPOINTS
    assert restore.steps(folder) == [4]
    # Checksums are written, but only the next start reads files back, to save time.
    assert list((folder / "4" / checksums.FOLDER).iterdir()) and compared == []
    # A second signal must not end the process while the checkpoint is being written.
    assert during_close != [before] and signal.getsignal(signal.SIGTERM) is before
    assert_equal(train(tmp_path / "parts"), whole)
    assert order == seen


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Return the loss of each step, and the last state."""
    workdir = tmp_path_factory.mktemp("run")
    state = train(workdir, log_every=1)
    return read(workdir), state


def assert_close(actual, expected):
    """Compare states. Batch sums have another order, and Adam divides by the gradient's size."""
    for tree, other in zip((actual.params, actual.ema["0.5"]), (expected.params, expected.ema["0.5"]), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), tree, other)


def test_eight_devices_train_like_one(tmp_path, one_device):
    metrics, expected = one_device
    state = train(tmp_path, sizes=(2, 4, 1), log_every=1)
    losses = [[line["loss"] for line in lines] for lines in (read(tmp_path), metrics)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert_close(state, expected)
    moved = [np.abs(leaf).max() for leaf in jax.tree.leaves(state.opt_state[0].mu)]
    assert min(moved) > 1e-6  # Every parameter has a nonzero gradient.


def test_a_run_can_be_resumed_on_another_mesh(tmp_path, one_device):
    train(tmp_path, sizes=(2, 4, 1), steps=3)
    assert_close(train(tmp_path, sizes=(1, 1, 1)), one_device[1])


def read(workdir):
    return run_log.read_metrics(workdir / run_log.METRICS)


def test_logged_metrics_are_means_since_the_previous_line(tmp_path, one_device):
    each, _ = one_device
    train(tmp_path, log_every=3)
    lines = read(tmp_path)
    assert [line["step"] for line in each] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines] == [3, 6, 7]
    spans = (each[:3], each[3:6], each[6:])
    for name in ("loss", "grad_norm", "param_norm", "lr"):
        expected = [np.mean([line[name] for line in span]) for span in spans]
        np.testing.assert_allclose([line[name] for line in lines], expected, rtol=1e-5)
    np.testing.assert_allclose([line["lr"] for line in each], 1e-3 * np.array([0.25, 0.5, 0.75, 1, 1, 1, 1]), rtol=1e-6)
    assert all(line["skipped"] == 0 and line["images_per_second"] > 0 for line in lines)


def test_losses_by_noise_level_average_to_the_loss(tmp_path, monkeypatch):
    totals = []
    monkeypatch.setattr(step_report, "noise_level_means", lambda total: totals.append(total) or {})
    train(tmp_path, log_every=4)
    losses = [line["loss"] for line in read(tmp_path)]
    np.testing.assert_array_equal([t["level_count"].sum() for t in totals], [4 * 8, 3 * 8])
    means = [t["level_loss"].sum() / t["level_count"].sum() for t in totals]
    np.testing.assert_allclose(means, losses, rtol=1e-5)


@pytest.fixture
def clock(monkeypatch):
    """Replace the time by one that only calls of some functions advance. Two CPU cores are busy."""
    now = [0.0]

    def slow(owner, name, seconds):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            now[0] += seconds
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name, seconds in (
        (loop, "to_global", 1),
        (loop, "starting_state", 3),
        (loop, "compiled", 20),
        (sheets, "contact_sheet", 100),
        (checkpoint.Checkpointer, "save", 1000),
    ):
        slow(owner, name, seconds)
    for module in (step_report, loop):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(time=lambda: now[0], process_time=lambda: 2 * now[0]))


@pytest.mark.usefixtures("clock")
def test_the_speed_excludes_drawing_and_saving_whose_seconds_are_in_the_manifest(tmp_path):
    train(tmp_path, steps=6, log_every=2, save_every=4, sample_every=3)
    # One second per batch of 8. The first batch was loaded before the clock started.
    assert [line["images_per_second"] for line in read(tmp_path)] == [16, 8, 8]
    assert [line["cpu_seconds_per_step"] for line in read(tmp_path)] == [1, 2, 2]
    (start,) = run_log.read_manifest(tmp_path)
    # The first of the batches, each of which takes a second, is there before the first step.
    expected = {"starting": 3 + 1, "compiling": 20, "saving": 2000, "drawing and scoring": 200}
    assert start["seconds"] == {**expected, "checking": 0}


def test_sample_sheets_show_the_averaged_weights_with_fixed_seeds(tmp_path):
    state = train(tmp_path, steps=3, sample_every=2)
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert names == ["step_00000002.png", "step_00000003.png"]
    draw = program.make_draw(TASK.sample, TASK.frozen, sharding.make_mesh(1, 1, 1))
    images = draw(state.ema["0.9"], EXAMPLES.batch, [5, 6, 7], np.full(3, 2, np.float32))
    with Image.open(tmp_path / "samples" / names[1]) as sheet:
        np.testing.assert_array_equal(sheet, sheets.contact_sheet(sheets.to_uint8(images), CAPTIONS))


def test_pictures_that_are_not_finite_are_not_written_as_a_sheet(tmp_path, caplog):
    task = TASK._replace(sample=lambda *arguments: TASK.sample(*arguments).at[1].set(jnp.nan))
    train(tmp_path, task, steps=2, sample_every=2)
    assert not (tmp_path / "samples").exists()
    assert "step 2: pictures are not finite; no sheet is saved" in caplog.text


def test_the_manifest_is_written_before_the_first_step(tmp_path, monkeypatch):
    def no_data(self):
        raise OSError("the disk is gone")

    monkeypatch.setattr(pipeline.Batches, "__next__", no_data)
    with pytest.raises(OSError, match="the disk is gone"):
        train(tmp_path)
    (run,) = run_log.read_manifest(tmp_path)
    assert (run["seed"], run["first_step"], run["config"]) == (5, 0, {"a": [1, 2]})
    assert not (tmp_path / run_log.METRICS).exists()


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch):
    whole = train(tmp_path, steps=2, log_every=1)
    monkeypatch.setattr(loop, "make_step", None)
    assert_equal(train(tmp_path, steps=2), whole)
    assert [line["step"] for line in read(tmp_path)] == [1, 2]
    assert [run["first_step"] for run in run_log.read_manifest(tmp_path)] == [0, 2]


def test_checkpoints_hold_the_train_state_without_frozen_weights(tmp_path):
    train(tmp_path, steps=5, save_every=2, keep_every=2, keep_last=1)
    folder = tmp_path / runs.CHECKPOINTS
    assert restore.steps(folder) == [2, 4, 5]
    items = {path.name for path in (folder / "5").iterdir() if path.is_dir()}
    assert items == {"params", "ema_0.5", "ema_0.9", "optimizer", "data", "metadata", "checksums"}
    assert test_checkpoint.metadata(folder, 5) == {"a": [1, 2]}


def test_metrics_of_repeated_steps_replace_the_old_ones(tmp_path):
    train(tmp_path, steps=4, log_every=1, save_every=2)
    (tmp_path / runs.CHECKPOINTS / "4").rename(tmp_path / "4")  # Like a kill before the last save.
    first = read(tmp_path)
    train(tmp_path, steps=4, log_every=1)
    again = read(tmp_path)
    assert [line["step"] for line in again] == [1, 2, 3, 4]
    assert [line["loss"] for line in again] == [line["loss"] for line in first]


def test_scores_during_training_use_the_average_every_n_images_and_at_the_end(tmp_path):
    seen = []

    def score(draw, params):
        seen.append(params)
        return {"evaluation/mean": float(jax.tree.leaves(params)[0].mean())}

    state = train(tmp_path, steps=5, evaluation=loop.Scoring(16, score))
    lines = [line for line in read(tmp_path) if "evaluation/mean" in line]
    assert [line["step"] for line in lines] == [2, 4, 5]  # 16 images are two batches of 8.
    jax.tree.map(np.testing.assert_array_equal, seen[-1], state.ema["0.9"])


def test_running_out_of_memory_while_drawing_does_not_stop_training(tmp_path, caplog):
    saved = []

    def too_large(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    def score(draw, params):
        # The checkpoint is saved first, possibly still in the background.
        names = [path.name.partition(".")[0] for path in (tmp_path / runs.CHECKPOINTS).iterdir()]
        saved.append(max(map(int, names)))
        return {"evaluation/mean": 1.0}

    changes = {"steps": 4, "sample_every": 2, "save_every": 2}
    task = TASK._replace(sample=too_large)
    state = train(tmp_path, task, evaluation=loop.Scoring(16, score), **changes)
    assert state.step == 4 and saved == [2, 4]
    for step in (2, 4):
        assert f"samples of step {step} do not fit in the memory and are left out" in caplog.text
    names = [(line["step"], name) for line in read(tmp_path) for name in line]
    assert [step for step, name in names if name == "out_of_memory/samples"] == [2, 4]
    assert [step for step, name in names if name == "evaluation/mean"] == [2, 4]
    assert not (tmp_path / "samples").exists()
    # Drawing is not tried again.
    train(tmp_path, task, evaluation=loop.Scoring(16, score), **changes)
    assert len([line for line in read(tmp_path) if "out_of_memory/samples" in line]) == 2


def test_scores_that_killed_the_process_twice_are_skipped(tmp_path, caplog):
    class Killed(BaseException):
        pass

    def kill(draw, params):
        raise Killed

    changes = {"steps": 4, "save_every": 4}
    for _ in range(2):
        assert "are left out" not in caplog.text
        with pytest.raises(Killed):
            train(tmp_path, evaluation=loop.Scoring(16, kill), **changes)
    scoring = loop.Scoring(16, lambda draw, params: {"evaluation/mean": 1.0})
    train(tmp_path, evaluation=scoring, **changes)
    assert "evaluation of step 2 are left out: the process ended 2 times" in caplog.text
    assert [line["step"] for line in read(tmp_path) if "evaluation/mean" in line] == [4]
    assert not (tmp_path / measuring.MEASURING).exists()


def test_missing_sheets_and_scores_are_made_when_a_run_is_resumed(tmp_path):
    changes = {"save_every": 2, "sample_every": 0}
    train(tmp_path, steps=4, **changes)
    scoring = loop.Scoring(16, lambda draw, params: {"evaluation/mean": 1.0})
    for _ in range(2):  # At the second start, nothing is missing.
        train(tmp_path, steps=4, evaluation=scoring, **changes | {"sample_every": 2})
    assert [line["step"] for line in read(tmp_path) if "evaluation/mean" in line] == [4]
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_00000004.png"]


def test_a_run_ends_once_the_steps_of_all_starts_have_taken_the_cpu_time(tmp_path):
    reached = lambda seconds: train(tmp_path, steps=6, options={"cpu_seconds": seconds}).step
    assert reached(1e-6) == 1
    spent = run_log.read_cpu_seconds(tmp_path, 1)
    assert spent == read(tmp_path)[0]["cpu_seconds_per_step"] > 1e-4
    assert (reached(spent), reached(spent + 1e-6)) == (1, 2)  # At first, nothing is left to train.
    assert train(tmp_path, steps=6).step == 6
    later = run_log.read_cpu_seconds(tmp_path, 6)
    assert later > run_log.read_cpu_seconds(tmp_path, 2) > spent


def test_examples_are_drawn_in_batches(tmp_path, monkeypatch):
    drawn = []

    def sample(params, frozen, batch, keys, guidance):
        drawn.append(len(keys))
        return TASK.sample(params, frozen, batch, keys, guidance)

    sheets_of = []
    for most in (64, 2):
        monkeypatch.setattr(f"{__name__}.EXAMPLES", EXAMPLES._replace(most=most))
        folder = tmp_path / str(most)
        train(folder, TASK._replace(sample=sample), steps=1, sample_every=1)
        sheets_of.append(np.asarray(Image.open(folder / "samples/step_00000001.png"), int))
    assert drawn == [3, 2]  # Traced once per batch size.
    assert np.abs(sheets_of[0] - sheets_of[1]).max() <= 1


def test_profile_steps_traces_the_requested_steps(tmp_path):
    train(tmp_path, steps=5, options={"trace": trace.Trace(tmp_path / trace.FOLDER, range(2, 4))})
    (file,) = (tmp_path / trace.FOLDER).rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    assert [dict(e.stats)["step_num"] for e in events if e.name == "train"] == [2, 3]
    assert "data" in {event.name for event in events}


@pytest.mark.parametrize("text", ["0:3", "5:5", "7:3", "1:2:3", "a", "-1"])
def test_an_invalid_profile_steps_is_an_error(text):
    with pytest.raises(ValueError, match=f"--profile_steps={text}: write FIRST:END"):
        trace.parse(text)
    assert (trace.parse("100:105"), trace.parse("7"), list(trace.parse(""))) == (range(100, 105), range(7, 8), [])


def test_an_out_of_memory_error_lists_the_largest_parts_and_suggests_a_setting(tmp_path):
    def greedy(params, frozen, batch, keys):
        loss, metrics = TASK.loss(params, frozen, batch, keys)
        return loss + jnp.sort(jax.random.uniform(keys[0], (2**42,)))[3], metrics

    with pytest.raises(out_of_memory.OutOfMemory) as refused:
        train(tmp_path, task=TASK._replace(loss=greedy), sizes=(2, 1, 1))
    message = str(refused.value)
    assert "largest parts are: the step's temporaries 65536.0" in message and "ema 0.0" in message
    assert "processes 4 samples per device: try --config.optimizer.micro_batch=2" in message
    assert (tmp_path / out_of_memory.PROFILE).stat().st_size > 100


def test_tensorflow_is_imported_while_the_step_compiles(tmp_path, monkeypatch):
    order, compiled_all = [], loop.compiled_all
    monkeypatch.setattr(loop.events, "import_beside", lambda: order.append("import"))
    compiling = lambda *args: order.append("compile") or compiled_all(*args)
    monkeypatch.setattr(loop, "compiled_all", compiling)
    train(tmp_path, steps=1)
    assert order == ["import", "compile"]


def test_the_step_is_compiled_with_the_options_for_exact_resume(tmp_path, monkeypatch):
    """Options for GPUs, which a CPU's compiler accepts and ignores."""
    options, stored = {"xla_gpu_exclude_nondeterministic_ops": True}, []
    tuned = loop.autotuning.Autotuning(options, "autotuning_1.txt")
    monkeypatch.setattr(loop.autotuning, "find", lambda workdir, deterministic: tuned)
    monkeypatch.setattr(loop.autotuning, "keep", lambda *args: stored.append(args))
    compiled, used = loop.compiled, []
    monkeypatch.setattr(loop, "compiled", lambda *args: used.append(args[-1]) or compiled(*args))
    train(tmp_path, steps=1)
    assert used == [options] and stored == [(tmp_path, tuned)]
    assert run_log.read_manifest(tmp_path)[0]["autotuning"] == "autotuning_1.txt"
