"""Power-function averages against the paper and brute force, and the snapshots of a run."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from diffusion_jax import runs
from diffusion_jax.devices import sharding
from diffusion_jax.files import manifest
from diffusion_jax.train import checkpoint, memory
from diffusion_jax.train.state import init_state, make_train_step
from diffusion_jax.weights import power_averages, restore
from tests.diffusion_jax.train import test_loop, test_state
from tests.imagen_jax import commands

STEPS, WIDTHS = 480, (0.05, 0.1)
POWERS = test_loop.OPTIMIZER._replace(ema_widths=WIDTHS, snapshot_every=2)


def profile(width, steps):
    """Return the coefficient of each step: increments of (k / steps)^(gamma + 1)."""
    ends = (np.arange(steps + 1) / steps) ** (power_averages.exponent(width) + 1)
    return np.diff(ends)


def test_exponents_match_the_paper():
    np.testing.assert_allclose([power_averages.exponent(w) for w in WIDTHS], [16.97, 6.94], atol=5e-3)
    # The width is the standard deviation of the profile.
    for width in (0.01, 0.05, 0.1, 0.2, 0.28):
        times, counts = np.arange(1, 200_001) / 200_000, profile(width, 200_000)
        mean = counts @ times
        assert np.sqrt(counts @ (times - mean) ** 2) == pytest.approx(width, rel=1e-4)


def test_combination_matches_least_squares_over_the_profiles():
    steps, widths = [3000, 4000, 4000], [0.05, 0.1, 0.2]
    counts, distance = power_averages.combination(steps, widths, 4000, 0.12)
    each = [np.pad(profile(w, s), (0, 4000 - s)) for s, w in zip(steps, widths, strict=True)]
    # The paper's closed form integrates profiles; a sum over 4,000 steps is close. The last
    # coefficient makes the sum 1.
    first = np.stack([one - each[2] for one in each[:2]], 1)
    expected, *_ = np.linalg.lstsq(first, profile(0.12, 4000) - each[2], rcond=None)
    np.testing.assert_allclose(counts, [*expected, 1 - expected.sum()], atol=2e-4)
    left = counts @ np.stack(each) - profile(0.12, 4000)
    expected = np.linalg.norm(left) / np.linalg.norm(profile(0.12, 4000))
    assert distance == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("width", [0.05, 0.1, 0.2])
def test_an_average_that_began_later_starts_at_the_parameters_of_this_step(width):
    steps, widths, begun = [3000, 4000, 4000, 3200], [0.05, 0.05, 0.2, 0.1], [0, 2500, 3000, 3000]
    counts, distance = power_averages.combination(steps, widths, 4000, width, begun)
    each = np.stack([np.pad(profile(w, s), (0, 4000 - s)) for s, w in zip(steps, widths, strict=True)])
    for one, first in zip(each, begun, strict=True):
        one[max(0, first - 1)] += one[: max(0, first - 1)].sum()
        one[: max(0, first - 1)] = 0
    target = profile(width, 4000)
    expected = np.linalg.norm(counts @ each - target) / np.linalg.norm(target)
    assert distance == pytest.approx(expected, abs=1e-3)  # The closed form integrates.
    bordered = np.block([[each @ each.T, np.ones((4, 1))], [np.ones((1, 4)), np.zeros((1, 1))]])
    best = np.linalg.solve(bordered, np.append(each @ target, 1))[:4]
    assert distance == pytest.approx(np.linalg.norm(best @ each - target) / np.linalg.norm(target), abs=1e-3)


def test_the_manifest_shows_when_the_averages_of_a_continued_run_began(tmp_path):
    entry = lambda step, *widths: {
        "start": "2026-01-01T00:00:00+00:00",
        "first_step": step,
        "config": {"batch_size": 1, "optimizer": {"ema_widths": widths}},
    }
    entries = [entry(0), entry(100, 0.2), entry(200), entry(300, 0.1, 0.2)]
    entries.append(entry(400, 0.1, 0.2, 0.05))
    write = lambda content: (tmp_path / manifest.MANIFEST).write_text(json.dumps(content))
    write({"runs": entries})
    assert manifest.read_widths_from(tmp_path) == {0.1: 300, 0.2: 300, 0.05: 400}
    root = restore.absolute(tmp_path / "checkpoints")
    sources = [(500, root, "power-0.1"), (500, root, "power-0.2")]
    counts, error = restore.combination(root, sources, 500, 0.1)
    expected = power_averages.combination([500] * 2, [0.1, 0.2], 500, 0.1, [300] * 2)
    np.testing.assert_allclose(counts, expected[0])
    assert error == expected[1] > 0.01
    # A LoRA that was added at step 300 has averages over the steps since then.
    write({"runs": entries, "continued_from": {"run": "a", "step": 300, "averages_from": 300}})
    counts, error = restore.combination(root, [(400, root, "power-0.1"), *sources], 500, 0.1)
    np.testing.assert_allclose(counts, [0, 1, 0], atol=1e-9)
    counts, _ = restore.combination(root, [(400, root, "power-0.1"), *sources], 500, 0.12)
    of_200 = power_averages.combination([100, 200, 200], [0.1, 0.1, 0.2], 200, 0.12)
    np.testing.assert_allclose(counts, of_200[0])


def test_coefficients_sum_to_1_with_few_snapshots():
    for steps, widths in (([100], [0.05]), ([50, 50, 100, 100], [0.05, 0.1] * 2)):
        counts, distance = power_averages.combination(steps, widths, 100, 0.2)
        assert counts.sum() == pytest.approx(1, abs=1e-12) and distance > 0.1
    counts, distance = power_averages.combination([0, 0], [0.05, 0.1], 0, 0.07)
    assert (counts.tolist(), distance) == ([1, 0], 0)


@pytest.mark.parametrize(
    ("text", "stored", "name"),
    [
        ("0.10", (), "power-0.1"),
        ("power-0.1", (), "power-0.1"),
        ("0.1", ("0.1",), "0.1"),
        ("0.9999", (), "0.9999"),
        ("0.5", (), "0.5"),
        ("raw", (), "raw"),
        ("ema", (), "ema"),
        ("0", (), "0"),
        ("nan", (), "nan"),
        ("power-2", (), "power-2"),
        ("0.28", (), "power-0.28"),
        ("0.281", (), "0.281"),  # The same as in optimizer.ema_widths.
    ],
)
def test_canonical_reads_a_small_number_as_a_width_unless_it_is_a_stored_decay(text, stored, name):
    assert power_averages.canonical(text, stored) == name


def test_order_sorts_widths_before_decays_with_the_largest_last():
    names = ["0.9999", "power-0.1", "0.99", "power-0.05"]
    assert sorted(names, key=power_averages.order) == ["power-0.05", "power-0.1", "0.99", "0.9999"]


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """Return the parameters at every step [steps, 6], the last state and the checkpoint folder."""
    params, frozen, batches = test_state.line_problem()
    tx, folder = test_state.make_tx(lr=0.02), tmp_path_factory.mktemp("walk")

    def loss(params, frozen, batch, keys):
        value, extra = test_state.line_loss(params, frozen, batch, keys)
        lost = jax.random.uniform(jax.random.fold_in(keys[0], 1)) < 0.1
        return jnp.where(lost, jnp.nan, 1.0) * value, extra

    step_fn = jax.jit(make_train_step(loss, tx, (0.5,), WIDTHS))
    state, every = init_state(params, tx, (0.5,), WIDTHS), []
    snapshots = checkpoint.Snapshots(folder / restore.SNAPSHOTS, 0)
    for step in range(1, STEPS + 1):
        state, _ = step_fn(state, frozen, batches[step % len(batches)], test_state.KEY)
        every.append(flat(state.params))
        if step % 40 == 0:
            snapshots.save(step, state)
    snapshots.close()
    assert 20 < int(state.skipped) < 100
    return np.stack(every), state, folder / runs.CHECKPOINTS


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)


def error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def test_an_ema_width_above_0_28_is_an_error(walked):
    message = r"no average '0\.281' .*\['power-0\.05', 'power-0\.1', 'a width up to 0\.28'\]"
    with pytest.raises(ValueError, match=message):
        restore.items_of(epath.Path(walked[2].parent / restore.SNAPSHOTS / "480"), "0.281")


@pytest.mark.parametrize("width", WIDTHS)
def test_stored_averages_match_the_weighted_mean_of_all_steps(walked, width):
    every, state, _ = walked
    assert error(flat(state.ema[power_averages.power_name(width)]), profile(width, STEPS) @ every) < 3e-6


@pytest.mark.parametrize(("width", "step"), [(0.04, STEPS), (0.05, 240), (0.08, STEPS), (0.12, 240), (0.15, STEPS)])
def test_any_width_is_reconstructed_from_snapshots_within_1e_3(walked, width, step):
    every, state, folder = walked
    shapes = jax.eval_shape(lambda: state.params)
    params, at = restore.load_params_and_step(folder, shapes, str(width), step)
    assert at == step and jax.tree.leaves(params)[0].dtype == jnp.float32
    expected = profile(width, step) @ every[:step]
    assert error(flat(params), expected) < 1e-3
    others = [error(profile(w, step) @ every[:step], expected) for w in (width * 0.8, width / 0.8)]
    assert min(others) > 2e-3  # Other widths are clearly different.


def test_snapshots_of_a_sharded_state_give_the_same_averages(walked, tmp_path):
    _, state, folder = walked
    mesh = sharding.make_mesh(1, 4, 2)
    rules = [(r"", sharding.P())]
    placed = jax.device_put(state, sharding.shardings(state, mesh, rules))
    shutil.copytree(folder.parent / restore.SNAPSHOTS, tmp_path / restore.SNAPSHOTS)
    snapshots = checkpoint.Snapshots(tmp_path / restore.SNAPSHOTS, STEPS - 1)
    snapshots.save(STEPS, placed)
    snapshots.close()
    shapes = jax.eval_shape(lambda: state.params)
    target = sharding.placed(shapes, sharding.shardings(shapes, mesh, rules))
    make = lambda root: restore.load_params(root / runs.CHECKPOINTS, target, "0.07", STEPS)
    jax.tree.map(np.testing.assert_array_equal, make(tmp_path), make(folder.parent))
    assert len(jax.tree.leaves(make(tmp_path))[0].sharding.device_set) == 8


def test_a_damaged_snapshot_is_skipped_with_a_warning(walked, tmp_path, caplog):
    every, state, folder = walked
    shutil.copytree(folder.parent / restore.SNAPSHOTS, tmp_path / restore.SNAPSHOTS)
    item = tmp_path / restore.SNAPSHOTS / "320" / "ema_power-0.05"
    victim = max((p for p in item.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1] + b"!")
    shapes = jax.eval_shape(lambda: state.params)
    params = restore.load_params(tmp_path / runs.CHECKPOINTS, shapes, "0.07", STEPS)
    assert error(flat(params), profile(0.07, STEPS) @ every) < 1e-3
    assert "skipping the damaged snapshot" in caplog.text


def arrays(workdir, step, name="ema_power-0.05"):
    root = restore.absolute(workdir) / restore.SNAPSHOTS / str(step)
    shapes = restore.shapes(root, name)
    return restore.load_items(root, {name: shapes})[name]


@pytest.mark.gate
@pytest.mark.slow
def test_a_resumed_run_writes_the_same_snapshots(tmp_path):
    task, how = test_loop.sometimes_nan(test_loop.TASK), {"settings": POWERS, "save_every": 3, "keep_last": 9}
    train = lambda name, **changes: test_loop.train(tmp_path / name, task, **how, **changes)
    whole = train("whole")
    train("parts", steps=5)
    checkpoints, snapshots = (tmp_path / "parts" / n for n in (runs.CHECKPOINTS, restore.SNAPSHOTS))
    shutil.rmtree(checkpoints / "5")  # Like a run that was killed before writing it.
    (snapshots / "9.orbax-checkpoint-tmp").mkdir()
    assert restore.steps(snapshots) == [2, 4, 5]
    jax.tree.map(np.testing.assert_array_equal, train("parts"), whole)
    assert restore.steps(snapshots) == [2, 4, 6, 7]
    assert restore.steps(tmp_path / "whole" / restore.SNAPSHOTS) == [2, 4, 6, 7]
    for step in (2, 4, 6, 7):
        pair = [arrays(tmp_path / name, step) for name in ("whole", "parts")]
        jax.tree.map(np.testing.assert_array_equal, *pair)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3)  # float16.
    jax.tree.map(close, arrays(tmp_path / "parts", 7), whole.ema["power-0.05"])
    # Between two snapshots, the averages in the checkpoint are used.
    assert [at for at, *_ in restore.traces(restore.absolute(checkpoints), 3)] == [2, 2, 3, 3]


def test_the_disk_estimate_counts_two_bytes_per_parameter_of_a_snapshot():
    params = {"a": jnp.zeros((10, 10))}
    state = init_state(params, test_state.make_tx(), (0.9,), WIDTHS)
    settings = test_loop.OPTIMIZER._replace(ema_widths=WIDTHS)
    run = test_loop.RUN._replace(steps=100, keep_last=3)
    usage = memory.disk(run, settings, state)
    # A snapshot every 4 of 100 steps, with 100 parameters, two widths and two bytes per number.
    assert (usage.snapshots, usage.snapshot, usage.checkpoints) == (25, 400, 3)
    assert usage.checkpoint == 4 * (6 * 100 + 5)
    assert usage.total == 3 * usage.checkpoint + 25 * 400
    none = memory.disk(run, test_loop.OPTIMIZER, state)
    assert (none.snapshots, none.total) == (0, 3 * usage.checkpoint)


@pytest.mark.slow
def test_other_ema_widths_can_be_evaluated_sampled_and_written_to_a_folder(tmp_path):
    work, made = tmp_path / "run", tmp_path / "made"
    small = commands.config_flags(
        "steps=12 batch_size=8 unet.embed_dim=32 unet.image_size=8 unet.cond_dim=32 sample_every=0 "
        "optimizer.warmup=0 data.heldout=0.01 heldout.records=8 optimizer.ema_widths=(0.05,0.1)"
    )
    told = commands.run("train", "--config=configs/quickstart.py", f"--workdir={work}", *small, devices=1)
    assert told.code == 0, told.err
    assert ", 12 snapshots of " in told.out and "GB are free" in told.out
    listed = commands.run("diffusion_jax.averages", f"--workdir={work}", devices=1)
    assert listed.code == 0, listed.err
    lines = {line[:14].strip(): line[15:] for line in listed.out.splitlines()}
    assert lines["snapshots"].endswith("of steps 1 to 12") and lines["width 0.05"] == "error 0 %, rounding factor 1"
    assert lines["stored"] == "power-0.05, power-0.1"
    wrote = commands.run("diffusion_jax.averages", f"--workdir={work}", "--width=0.07", f"--out={made}", devices=1)
    assert wrote.code == 0, wrote.err
    losses = commands.run("diffusion_jax.heldout", f"--workdir={work}", "--ema=0.07,0.05,raw,0.999", devices=1)
    rows = [json.loads(line) for line in losses.out.splitlines()]
    names, values = zip(*((row["weights"], row["loss"]) for row in rows), strict=True)
    assert names == ("ema_power-0.07", "ema_power-0.05", "raw", "ema_0.999")
    alone = commands.run("diffusion_jax.heldout", f"--workdir={made}", devices=1)
    assert json.loads(alone.out)["loss"] == values[0] and len({*values}) == 4
    for folder, ema in ((work, ["--ema=0.07"]), (made, [])):
        flags = (f"--workdir={folder}", *ema, "--prompt=a red seven", f"--out={tmp_path / folder.name}_png")
        drawn = commands.run("sample", *flags, devices=1)
        assert drawn.code == 0, drawn.err
    pictures = [(tmp_path / f"{n}_png" / "sheet.png").read_bytes() for n in ("run", "made")]
    assert pictures[0] == pictures[1]
    flags = (f"--workdir={work}", "--ema=0.05,0.10,0.15,0.999", "--guidance=2", "--num_heldout=1")
    swept = commands.run("evaluate", *flags, devices=1)
    assert swept.code == 0, swept.err
    table = (work / "evaluation" / "step_00000012" / "sweep.csv").read_text()
    averaged = [line.split(",")[2] for line in table.splitlines()[1:]]
    assert averaged == ["power-0.05", "power-0.1", "power-0.15", "0.999"]
    assert "power-0.15" in (work / "report.html").read_text()
