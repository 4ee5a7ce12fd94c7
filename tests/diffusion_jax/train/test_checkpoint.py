"""Checkpoints: exact, in any sharding, complete after a kill, and helpful errors."""

import itertools
import json
import multiprocessing
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from diffusion_jax.devices import sharding
from diffusion_jax.files import checksums
from diffusion_jax.train import checkpoint, optimizer
from diffusion_jax.train.state import init_state
from diffusion_jax.weights import restore
from tests.imagen_jax import commands

TX = optimizer.adamw(optimizer.warmup_constant(1e-3, 10))
RULES = [(r"kernel", P("fsdp", "tensor")), (r"", P())]


class Position:
    """A data iterator that only has a position."""

    def __init__(self, state=b""):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def random_state(step=0, decays=(0.9, 0.9999)):
    """Return a train state with random numbers in every leaf, including counts."""
    params = {"params": {"a": {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16)}}}
    rng = np.random.default_rng(step)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape) * 1000, x.dtype)
    return jax.tree.map(draw, init_state(params, TX, decays))


def place(state, *sizes):
    return jax.device_put(state, sharding.shardings(state, sharding.make_mesh(*sizes), RULES))


def abstract(state):
    spec = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return jax.tree.map(spec, state)


def save(directory, *saved_steps, keep_last=3, **kwargs):
    checkpointer = checkpoint.Checkpointer(directory, keep_last=keep_last, **kwargs)
    for step in saved_steps:
        checkpointer.save(step, random_state(step), Position(str(step).encode()), {"step": step})
    checkpointer.close()


def metadata(directory, step):
    return json.loads((directory / str(step) / "metadata" / "metadata").read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoints of steps 10 and 20. Tests must not write to it."""
    directory = tmp_path_factory.mktemp("run")
    save(directory, 10, 20)
    return directory


def test_a_state_is_restored_bit_for_bit_on_other_meshes(tmp_path):
    state, position = random_state(), Position(b"\x00 seven \xff")
    layouts = [(1, 4, 2), (1, 2, 4), (2, 2, 1), (1, 1, 1)]
    for step, (saved_layout, restored_layout) in enumerate(itertools.pairwise(layouts)):
        checkpointer = checkpoint.Checkpointer(tmp_path / str(step), keep_last=1)
        checkpointer.save(7, place(state, *saved_layout), position)
        target, other = abstract(place(state, *restored_layout)), Position()
        restored = checkpointer.restore(target, other)
        checkpointer.close()
        jax.tree.map(np.testing.assert_array_equal, restored, state)
        assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, target)
        assert jax.tree.map(lambda x: x.dtype, restored) == jax.tree.map(lambda x: x.dtype, state)
        assert other.state == position.state


@pytest.mark.parametrize(
    ("which", "get"),
    [
        ("raw", lambda state: state.params),
        ("0.9", lambda state: state.ema["0.9"]),
        ("0.9999", lambda state: state.ema["0.9999"]),
        ("ema", lambda state: state.ema["0.9999"]),  # "ema" selects the largest decay.
    ],
)
def test_parameters_are_loaded_without_the_optimizer(saved, tmp_path, which, get):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    for step in (10, 20):
        shutil.rmtree(tmp_path / str(step) / "optimizer")  # So loading fails if it is read.
    for step, expected in ((10, random_state(10)), (None, random_state(20))):
        target = jax.eval_shape(lambda s=expected: s.params)
        actual = restore.load_params(tmp_path, target, which, step=step)
        jax.tree.map(np.testing.assert_array_equal, actual, get(expected))


def test_parameters_are_loaded_in_the_requested_sharding(saved):
    target = abstract(place(random_state(), 1, 2, 4)).params
    actual = restore.load_params(saved, target, "raw")
    kernel = actual["params"]["a"]["kernel"]
    assert kernel.sharding.spec == P("fsdp", "tensor") and len(kernel.sharding.device_set) == 8
    np.testing.assert_array_equal(kernel, random_state(20).params["params"]["a"]["kernel"])


def test_metadata_and_data_position_are_stored_per_step(saved):
    assert metadata(saved, 20) == {"step": 20}
    assert metadata(saved, 10) == {"step": 10}
    checkpointer, position = checkpoint.Checkpointer(saved, keep_last=3), Position()
    checkpointer.restore(abstract(random_state()), position, step=10)
    checkpointer.close()
    assert position.state == b"10"


def test_keep_last_and_keep_every_select_the_kept_checkpoints(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5, 6, keep_last=2, keep_every=3)
    assert restore.steps(tmp_path) == [3, 5, 6]
    assert not (tmp_path / "deleted").exists()


def test_an_old_step_is_renamed_before_it_is_deleted(tmp_path):
    """If a step was deleted under its own name, a kill could leave a folder that looks complete."""
    checkpointer = checkpoint.Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(1, random_state(1), Position())
    checkpointer.save(2, random_state(2), Position())
    deadline = time.monotonic() + 240
    while (tmp_path / "1").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {path.name for path in (tmp_path / "deleted" / "1").iterdir()} >= {"params", "data"}
    assert restore.steps(tmp_path) == [2]
    checkpointer.close()
    assert not (tmp_path / "deleted").exists()


def test_a_hurried_save_stops_reading_back_checksums(tmp_path, monkeypatch):
    checkpointer, began, read = checkpoint.Checkpointer(tmp_path, 2), threading.Event(), []

    def let_go(path):
        read.append(path.relative_to(tmp_path).parts[0])
        began.set()
        checkpointer._hurried.wait(60)

    monkeypatch.setattr(checksums, "_drop_cache", let_go)
    checkpointer.save(1, random_state(1), Position())
    assert began.wait(60)
    checkpointer.save(2, random_state(2), Position(), read_back=False)
    checkpointer.close()
    assert read == ["1"]
    for step in ("1", "2"):  # The checksums of both are stored.
        assert (tmp_path / step / checksums.FOLDER / "0-of-1.json").exists()
        assert checksums.damage(tmp_path / step) is None


def test_an_existing_checkpoint_of_a_step_is_not_overwritten(tmp_path):
    save(tmp_path, 1)
    checkpointer = checkpoint.Checkpointer(tmp_path, keep_last=3)
    checkpointer.save(1, random_state(99), Position(), {"step": 99})
    checkpointer.close()
    assert metadata(tmp_path, 1) == {"step": 1}


def test_a_state_donated_right_after_saving_is_saved_correctly(tmp_path):
    state = place(random_state(), 1, 4, 2)
    expected = jax.device_get(state)
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    add.lower(state).compile()
    checkpointer = checkpoint.Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(1, state, Position())
    for _ in range(3):
        state = add(state)
    restored = checkpointer.restore(abstract(state), Position())
    checkpointer.close()
    jax.tree.map(np.testing.assert_array_equal, restored, expected)


def test_a_failed_save_raises_at_the_next_call_and_keeps_the_last_checkpoint(tmp_path):
    checkpointer = checkpoint.Checkpointer(tmp_path, keep_last=3)
    checkpointer.save(1, random_state(1), Position(), {"step": 1})
    checkpointer.wait()
    large = init_state({"w": jnp.ones((1024, 4096))}, TX, [0.9])
    checkpointer.save(2, large, Position())
    (tmp_path / "2").touch()  # This file blocks the rename that ends a save.
    assert checkpointer.latest_step() == 1  # Step 2 is still being saved.
    message = r"could not be written: .* \(is the disk full\?\)\. The newest .* is from step 1\."
    with pytest.raises(RuntimeError, match=message):
        checkpointer.save(3, random_state(3), Position())
    assert checkpointer.latest_step() == 1
    checkpointer.save(3, random_state(3), Position(), {"step": 3})
    checkpointer.close()
    assert restore.steps(tmp_path) == [1, 3]


def test_restoring_without_a_checkpoint_is_an_error(tmp_path, saved):
    target = abstract(random_state())
    message = r"no complete checkpoint in .*: train with this workdir, or choose another"
    with pytest.raises(FileNotFoundError, match=message):
        restore.load_params(tmp_path / "nowhere", target.params)
    checkpointer = checkpoint.Checkpointer(tmp_path, keep_last=1)
    assert checkpointer.latest_step() is None
    with pytest.raises(FileNotFoundError, match=message):
        checkpointer.restore(target, Position())
    checkpointer.close()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 5 in .*: choose from \[10,"):
        restore.load_params(saved, target.params, step=5)


def test_restoring_another_architecture_is_an_error_that_names_differences(saved):
    layer = {"kernel": jax.ShapeDtypeStruct((8, 32), jnp.float32)}
    layer |= {name: jax.ShapeDtypeStruct((16,), jnp.float32) for name in ("bias", "scale")}
    with pytest.raises(ValueError, match="has another architecture; 2 of 3") as error:
        restore.load_params(saved, {"params": {"a": layer}}, "raw")
    assert "params/a/kernel ((8, 32), but (8, 16) is saved)" in str(error.value)
    assert "params/a/scale ((16,), but nothing is saved)" in str(error.value)
    assert "use the config that it was trained with" in str(error.value)


def test_averages_are_found_in_a_folder_whose_name_looks_like_a_pattern(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "a[1]")
    for folder in (saved, tmp_path / "a[1]"):
        assert restore.stored(restore.absolute(folder) / "20") == ["0.9", "0.9999"]
    assert restore.stored(restore.absolute(saved) / "none") == []


def test_an_unknown_average_is_an_error_that_lists_the_stored_ones(saved):
    target = jax.eval_shape(lambda: random_state().params)
    message = r"no average '0.99' in .*: choose one of \['raw', '0.9', '0.9999'\]"
    with pytest.raises(ValueError, match=message):
        restore.load_params(saved, target, "0.99")


def test_restoring_with_other_ema_decays_is_an_error(saved):
    checkpointer = checkpoint.Checkpointer(saved, keep_last=3)
    message = r"holds the averages \['0.9', '0.9999'\], but this run has \['0.5'\]"
    with pytest.raises(ValueError, match=message):
        checkpointer.restore(abstract(random_state(decays=[0.5])), Position())
    checkpointer.close()


def test_data_positions_saved_by_several_processes_must_be_equal(tmp_path):
    save(tmp_path, 1)
    shutil.rmtree(tmp_path / "1" / "checksums")  # They would detect the following changes.
    (mine,) = (tmp_path / "1" / "data").glob("process_*")
    for index in range(2):
        shutil.copy(mine, mine.with_name(f"process_{index}-of-2"))
    mine.unlink()
    checkpointer, position = checkpoint.Checkpointer(tmp_path, keep_last=1), Position()
    checkpointer.restore(abstract(random_state()), position)
    assert position.state == b"1"
    mine.with_name("process_1-of-2").write_bytes(b"2")
    with pytest.raises(ValueError, match=r"data positions of 2 processes, .* is now 1: start 2"):
        checkpointer.restore(abstract(random_state()), position)
    checkpointer.close()


def largest(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def damaged_file(step_folder):
    """Flip a bit in the largest file of the optimizer."""
    path = largest(step_folder / "optimizer")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path.relative_to(step_folder)


def test_each_checkpoint_lists_checksums_of_all_its_files(saved):
    for step in (10, 20):
        folder = saved / str(step)
        listed = json.loads((folder / "checksums" / "0-of-1.json").read_text())
        files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "checksums"]
        written = {path.relative_to(folder).as_posix() for path in files}
        late = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # Orbax writes these after the list.
        assert listed.keys() == written - late and len(written) > 10


def test_checksums_are_written_before_a_checkpoint_gets_its_final_name(tmp_path, monkeypatch):
    """Otherwise, a kill in between would leave a checkpoint whose damage cannot be detected."""
    write, seen = checksums.write, []

    def watch(folder):
        write(folder)
        seen.append((restore.steps(tmp_path), (folder / "checksums" / "0-of-1.json").exists()))

    monkeypatch.setattr(checksums, "write", watch)
    save(tmp_path, 10, 20)
    assert seen == [([], True), ([10], True)]


@pytest.mark.parametrize("harm", ["no folder", "no list", "an empty list"])
@pytest.mark.parametrize("step", [10, 20])
def test_a_checkpoint_without_checksums_is_damaged_if_another_has_them(saved, tmp_path, harm, step):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    damaged_file(tmp_path / str(step))
    path = tmp_path / str(step) / "checksums" / "0-of-1.json"
    path.write_text("{}") if harm == "an empty list" else path.unlink()
    if harm == "no folder":
        path.parent.rmdir()
    reason = "checksums: missing, alth" if harm == "no folder" else "params/.*: it has no checksum"
    with pytest.raises(restore.Damaged, match=rf"{step} is damaged \({reason}"):
        restore.load_params(tmp_path, jax.eval_shape(lambda: random_state().params), "raw", step)
    assert restore.newest_sound(tmp_path) == 30 - step


def test_old_checkpoints_without_checksums_are_read_with_one_warning(saved, tmp_path, caplog):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    for step in ("10", "20"):
        shutil.rmtree(tmp_path / step / "checksums")
        path = tmp_path / step / "_CHECKPOINT_METADATA"
        path.write_text(path.read_text().replace(restore.LISTED, "other"))
    assert [restore.newest_sound(tmp_path) for _ in range(2)] == [20, 20]
    assert caplog.text.count(f"checkpoints in {tmp_path} have no checksums: damage to them") == 1
    save(tmp_path, 30)  # The current version continues the run.
    damaged_file(tmp_path / "30")
    assert restore.newest_sound(tmp_path) == 20


def test_training_resumes_from_the_newest_undamaged_checkpoint(tmp_path, caplog):
    save(tmp_path, 10, 20, 30)
    names = [damaged_file(tmp_path / step) for step in ("20", "30")]
    checkpointer, position = checkpoint.Checkpointer(tmp_path, keep_last=3), Position()
    messages = [record.getMessage() for record in caplog.records]
    for step, name in zip((20, 30), names, strict=True):
        passing = f"skipping the damaged checkpoint {tmp_path / str(step)} ({name}: its bytes"
        assert sum(line.startswith(passing) for line in messages) == 1
        moved = f"moved a checkpoint to {tmp_path}/damaged/{step}"
        assert f"{moved}; continuing from step 10" in messages
    assert checkpointer.latest_step() == 10
    restored = checkpointer.restore(abstract(random_state()), position)
    jax.tree.map(np.testing.assert_array_equal, restored, random_state(10))
    assert position.state == b"10"
    checkpointer.save(20, random_state(20), Position())
    checkpointer.close()
    assert restore.newest_sound(tmp_path) == 20 and restore.steps(tmp_path) == [10, 20]
    assert sorted(path.name for path in (tmp_path / "damaged").iterdir()) == ["20", "30"]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_restart(tmp_path):
    save(tmp_path, 10)
    name = damaged_file(tmp_path / "10")
    with pytest.raises(restore.Damaged, match=rf"all checkpoints in .* are damaged \(step 10: {name}"):
        checkpoint.Checkpointer(tmp_path, keep_last=3)
    assert restore.steps(tmp_path) == [10]


def test_weights_are_loaded_from_the_newest_checkpoint_with_undamaged_weights(tmp_path, caplog):
    save(tmp_path, 10, 20)
    damaged_file(tmp_path / "20")  # Damages only the optimizer, which is not read.
    target = jax.eval_shape(lambda: random_state().params)
    load = lambda which, step=None: restore.load_params_and_step(tmp_path, target, which, step)
    assert load("ema")[1] == 20 and "damaged" not in caplog.text
    (tmp_path / "20" / "ema_0.9999" / "_METADATA").write_text("{}")
    params, step = load("ema")
    assert step == 10 and "ema_0.9999/_METADATA: 2 bytes, but" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, params, random_state(10).ema["0.9999"])
    assert load("raw")[1] == 20
    message = r"20 is damaged \(ema_0.9999/_METADATA: .*choose another of \[10, 20\], or name no step"
    with pytest.raises(restore.Damaged, match=message):
        load("ema", 20)


# If one read fails, the others report to an event loop that is already closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("harm", ["cut", "vanish", "empty metadata"])
def test_a_damaged_checkpoint_without_checksums_is_a_one_line_error(tmp_path, harm):
    save(tmp_path, 10)
    shutil.rmtree(tmp_path / "10" / "checksums")
    path = largest(tmp_path / "10" / "params" / "d")
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:10])
    elif harm == "vanish":
        path.unlink()
    else:
        (tmp_path / "10" / "params" / "_METADATA").write_text("")
    target = jax.eval_shape(lambda: random_state().params)
    with pytest.raises(restore.Damaged, match=r"10 cannot be read \(.*from the previous") as error:
        restore.load_params(tmp_path, target, "raw")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("call", ["steps", "_clear_deleted", "read_back"])
def test_a_bucket_that_denies_access_during_a_save_is_one_line(tmp_path, monkeypatch, call):
    """`steps` lists the folder before the save. The others read and delete after it."""
    checkpointer = checkpoint.Checkpointer(tmp_path, keep_last=3)

    def denied(*_, **__):
        raise PermissionError("s3://bkt: the token has expired\nrequest 7")

    owner = {"steps": restore, "_clear_deleted": checkpointer, "read_back": checksums}[call]
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, denied)
        said = r"could not be written: s3://bkt: the token has expired \(have the credentials "
        with pytest.raises(checkpoint.NotSaved, match=said):
            checkpointer.save(10, random_state(10), Position())
            checkpointer.wait()
    checkpointer.close()


def save_until_killed(directory, started):
    """Send the restored step, and then save states in which every number equals the step.

    Each state is saved again immediately as the next step.
    """
    params = {f"w{i}": jnp.zeros((256, 1024)) for i in range(8)}
    state, position = init_state(params, TX, [0.9]), Position(b"0")
    checkpointer = checkpoint.Checkpointer(directory, keep_last=2)
    start = checkpointer.latest_step() or 0
    if start:
        state = checkpointer.restore(abstract(state), position)
        assert all(bool((x == start).all()) for x in jax.tree.leaves(state)), start
        assert position.state == str(start).encode(), (position.state, start)
    started.send(start)
    for step in range(start + 1, start + 1000):
        state = jax.tree.map(lambda x, step=step: jnp.full_like(x, step), state)
        position.state = str(step).encode()
        checkpointer.save(step, state, position)


def wait_for_unfinished(directory, step, process):
    """Wait until the save of `step` or of a later step has started."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.is_alive():
        names = [path.name for path in directory.glob("*tmp*")]
        if any(int(name.split(".")[0]) >= step for name in names):
            return
        time.sleep(0.001)
    raise AssertionError(f"no save of step {step} was seen")


@pytest.mark.slow
def test_a_run_killed_while_saving_resumes_from_the_last_complete_checkpoint(tmp_path):
    target = {f"w{i}": jax.ShapeDtypeStruct((256, 1024), jnp.float32) for i in range(8)}
    latest = 0
    # The number of saves before the kill, and the seconds from the start of the last save.
    for saves, delay in ((1, 0.0), (2, 0.0), (3, 0.02), (4, 0.06), (4, 0.15)):
        started, sender = multiprocessing.Pipe(duplex=False)
        child = commands.fork(save_until_killed, tmp_path, sender)
        sender.close()
        with started:
            assert started.recv() == latest  # The child has restored and checked this step.
        wait_for_unfinished(tmp_path, latest + saves, child)
        time.sleep(delay)
        child.kill()
        child.join()
        whole = restore.steps(tmp_path)
        for step, which in itertools.product(whole, ("raw", "0.9")):
            loaded = restore.load_params(tmp_path, target, which, step=step)
            jax.tree.map(lambda x, step=step: np.testing.assert_array_equal(x, step), loaded)
        reached, latest = latest, max(whole, default=0)
        assert latest >= reached + saves - 1

    save(tmp_path, latest + 9, keep_last=2)  # The next save removes unfinished ones.
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [latest, latest + 9]
