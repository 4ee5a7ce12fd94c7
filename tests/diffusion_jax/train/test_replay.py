"""Replaying steps: equal metrics from any checkpoint, per-example values, and errors."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

from diffusion_jax import runs
from diffusion_jax.config.settings import Optimizer, Run
from diffusion_jax.devices import sharding
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.logs import run_log
from diffusion_jax.train import loop, replay, replay_command, state
from diffusion_jax.weights import restore
from tests.diffusion_jax import toy, training_noise

RUN = Run(steps=9, batch_size=8, seed=5, log_every=2, sample_every=0, save_every=3, keep_last=9)
OPTIMIZER = Optimizer(lr=1e-3, warmup=3, ema_decays=(0.5,), micro_batch=2)
TASK = toy.task()
MESH = (1, 2, 1)


opened = functools.partial(toy.batches, RUN, flip=True)


def replayed(workdir, step, pictures=None):
    with opened(pictures) as batches:
        inputs, mesh = loop.RunInputs(TASK, batches), sharding.make_mesh(*MESH)
        return replay.replay(inputs, RUN, OPTIMIZER, mesh, workdir, step)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run that ended at step 7 and was extended to step 9."""
    folder, mesh = tmp_path_factory.mktemp("run"), sharding.make_mesh(*MESH)
    for steps in (7, 9):
        with opened() as batches:
            run = RUN._replace(steps=steps)
            loop.train(loop.RunInputs(TASK, batches), run, OPTIMIZER, mesh, folder, {"steps": steps})
    return folder


@pytest.fixture(scope="module")
def fifth(workdir):
    return replayed(workdir, 5)


def test_windows_span_the_steps_that_each_logged_line_averages(workdir, tmp_path):
    spans = [(window.first, window.last) for window in replay.windows(workdir)]
    assert spans == [(0, 2), (2, 4), (4, 6), (6, 7), (7, 8), (8, 9)]
    (tmp_path / run_log.METRICS).write_text("".join(run_log.metrics_line(s, {"grad_norm": 1.0}) for s in (4, 8)))
    for first_step in (0, 6, 5, 7):  # The restart from step 5 removed later lines.
        run_log.write_manifest(tmp_path, {}, 0, first_step)
    assert [window[:2] for window in replay.windows(tmp_path)] == [(0, 4), (7, 8)]


@pytest.mark.parametrize(
    ("step", "checkpoint", "lines"), [(1, None, [(0, 2)]), (4, None, [(0, 2), (2, 4)]), (8, 7, [(7, 8)])]
)
def test_replayed_metrics_equal_the_log_bit_for_bit(workdir, step, checkpoint, lines):
    result = replayed(workdir, step)
    assert result.checkpoint == checkpoint
    assert [(line.first, line.last) for line in result.compared] == lines
    for line in result.compared:
        assert line.differ == {}
        assert {"loss", "grad_norm", "lr", "param_norm", "skipped"} < set(line.equal)


def test_replay_starts_from_the_last_checkpoint_before_the_logged_line(workdir, fifth, tmp_path):
    """Step 5 belongs to the line for steps 5 and 6; the last checkpoint before it is step 3."""
    assert fifth.checkpoint == 3
    assert [line[:2] for line in fifth.compared] == [(4, 6)] and not fifth.compared[0].differ
    copy = shutil.copytree(workdir, tmp_path / "run")
    shutil.rmtree(copy / runs.CHECKPOINTS / "3")
    earlier = replayed(copy, 5)
    assert earlier.checkpoint is None and len(earlier.compared) == 3
    assert earlier.metrics == fifth.metrics and earlier.examples == fifth.examples


def test_losses_of_examples_and_norms_of_modules_combine_to_the_metrics(fifth):
    losses = [example["loss"] for example in fifth.examples]
    # Two programs sum float32 numbers in different orders.
    np.testing.assert_allclose(np.mean(losses), fifth.metrics["loss"], rtol=1e-5)
    assert set(fifth.modules) == {"pixels", "text", "time", "out"}
    squares = sum(norm**2 for norm in fifth.modules.values())
    np.testing.assert_allclose(squares**0.5, fifth.metrics["grad_norm"], rtol=1e-5)


def test_each_row_has_its_own_noise_picture_and_text(fifth):
    keys = state.image_keys(jax.random.key(RUN.seed), 4, 8)
    expected = np.exp(1.2 * training_noise.normal(keys, training_noise.SIGMA, 1)[:, 0] - 1.2)
    np.testing.assert_allclose([x["sigma"] for x in fifth.examples], expected, rtol=1e-6)
    with opened() as batches:
        batch = [next(batches) for _ in range(5)][-1]
        names = batches.names(range(8))
    np.testing.assert_array_equal(fifth.pictures, batch["image"])
    assert [x["name"] for x in fifth.examples] == names
    texts = toy.ENCODER.tokenize([x["text"] for x in fifth.examples])
    np.testing.assert_array_equal(texts["text_ids"], batch["text_ids"])


class Repainted(digits.Digits):
    """The same pictures in other colours."""

    def read(self, indices, places=None):
        images, texts = super().read(indices, places)
        return 255 - images, texts


class Fewer(digits.Digits):
    """Digits without the last picture."""

    def __len__(self):
        return super().__len__() - 1


def test_replay_with_changed_pictures_reports_different_metrics(workdir):
    result = replayed(workdir, 8, Repainted(toy.SIZE))
    (line,) = result.compared
    assert {"loss", "grad_norm", "param_norm"} <= set(line.differ)
    assert line.differ["loss"][1] == result.metrics["loss"] != line.differ["loss"][0]
    text = dict(replay_command.report(workdir, result, ""))
    assert text["logged"].startswith("step 8: different: ") and " loss was " in text["logged"]
    assert text["changed"].endswith("probably the data or the initial weights")


def test_replaying_an_unknown_step_or_other_data_is_an_error(workdir, tmp_path):
    with pytest.raises(ValueError, match=rf"--step=10: {workdir} has the steps 1 to 9"):
        replayed(workdir, 10)
    with pytest.raises(ValueError, match=r"but the data are now {'seed': 5, 'pictures': "):
        replayed(workdir, 8, Fewer(toy.SIZE))
    copy = shutil.copytree(workdir, tmp_path / "run")
    for path in (copy / runs.CHECKPOINTS / "3").rglob("d/*"):
        path.write_bytes(b"")
    with pytest.raises(restore.Damaged, match=r"all checkpoints in .* are damaged"):
        replayed(copy, 5)


def test_the_replay_report_lists_all_parts_with_the_largest_loss_first(workdir, fifth, tmp_path):
    rows = replay_command.report(workdir, fifth, "")
    text = dict(rows)
    assert text["step"] == "5, replayed from the checkpoint of step 3"
    assert text["logged"].startswith("steps 5 to 6: ") and "equal, bit for bit" in text["logged"]
    assert text["loss"] == str(fifth.metrics["loss"])
    worst = max(fifth.examples, key=lambda example: example["loss"])
    listed = [name for name, _ in rows if name.startswith("  row")]
    assert len(listed) == 8 and listed[0] == f"  row {worst['row']}"
    replay_command.write(tmp_path / "replay", fifth)
    saved = json.loads((tmp_path / "replay" / "step_00000005.json").read_text())
    assert saved["modules"] == fifth.modules and saved["examples"] == fifth.examples
    sheet = np.asarray(Image.open(tmp_path / "replay" / "step_00000005.png"))
    picture = Image.fromarray(fifth.pictures[worst["row"]])
    enlarged = picture.resize((128, 128), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(sheet[4:132, 4:132], enlarged)


def test_replay_names_changed_config_fields_and_versions(tmp_path, monkeypatch):
    run_log.write_manifest(tmp_path, {"steps": 5, "mesh": {"fsdp": 2}}, 3, 0)
    now = {"steps": 9, "mesh": {"fsdp": 2}}
    assert replay.changes(tmp_path, 1, now) == ""
    assert replay.changes(tmp_path, 1, {"mesh": {"fsdp": 4}}) == "config.mesh.fsdp was 2 and is 4"
    monkeypatch.setattr(run_log, "version", lambda package: "9.9")
    assert f"versions.jax was {jax.__version__} and is 9.9" in replay.changes(tmp_path, 1, now)
    assert replay.changes(tmp_path / "nothing", 1, now) == ""
