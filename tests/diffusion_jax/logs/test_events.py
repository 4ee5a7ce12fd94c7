"""Event files, read by TensorBoard itself."""

import gc
import io
import logging
import sys

import numpy as np
from PIL import Image

from diffusion_jax.logs import events, run_log
from tests.diffusion_jax.event_files import hparams, points


def write(workdir, steps, resumed_from=0, **config):
    writer = run_log.MetricWriter(workdir, config, resumed_from)
    for step in steps:
        writer.write_scalars(step, {"loss": step / 4, "loss/sigma_0_to_0.1": step / 8})
    return writer


def test_tensorboard_reads_metrics_pictures_and_the_config(tmp_path):
    config = {"run": {"steps": 7, "prompts": ("a", "b")}, "lr": np.float32(0.5), "flip": True}
    writer = write(tmp_path, [3, 7], **config)
    noise = np.random.default_rng(0).integers(0, 255, (2, 8, 8, 3), np.uint8)
    writer.write_images(7, {"samples": noise})
    folder = tmp_path / events.FOLDER
    # Before close, because a killed run never closes its files.
    assert points(folder, "loss") == [(3, 0.75), (7, 1.75)]
    assert points(folder, "loss/sigma_0_to_0.1") == [(3, 0.375), (7, 0.875)]
    ((step, (_, _, *pictures)),) = points(folder, "samples")  # Width and height come first.
    np.testing.assert_array_equal([Image.open(io.BytesIO(png)) for png in pictures], noise)
    assert step == 7
    assert hparams(folder) == {"run.steps": 7, "run.prompts": "('a', 'b')", "lr": 0.5, "flip": True}
    writer.close()


def test_events_of_a_resumed_run_hold_each_step_once_and_the_latest_config(tmp_path):
    write(tmp_path, [10, 20, 30, 40], lr=1.0).close()
    (path,) = (tmp_path / events.FOLDER).iterdir()
    with path.open("ab") as file:
        file.write(b"torn")  # The run was killed while writing.
    write(tmp_path, [30, 40, 50], resumed_from=20, lr=2.0).close()
    folder = tmp_path / events.FOLDER
    assert [step for step, _ in points(folder, "loss")] == [10, 20, 30, 40, 50]
    assert hparams(folder) == {"lr": 2.0}


def test_a_new_run_in_an_old_workdir_removes_the_old_events(tmp_path):
    write(tmp_path, [10, 20]).close()
    write(tmp_path, [5]).close()
    assert points(tmp_path / events.FOLDER, "loss") == [(5, 1.25)]


def test_without_tensorflow_metrics_are_written_and_one_warning_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with caplog.at_level(logging.WARNING):
        writer = write(tmp_path, [1, 2])
        writer.write_images(2, {"grid": np.zeros((2, 4, 4, 3), np.uint8)})
        writer.close()
    (warning,) = [r.getMessage() for r in caplog.records if "TensorBoard" in r.getMessage()]
    assert warning.endswith("pip install -r requirements.txt")
    assert len(run_log.read_metrics(tmp_path / run_log.METRICS)) == 2
    assert not (tmp_path / events.FOLDER).exists()


def test_the_metric_writer_hides_gpus_from_tensorflow(tmp_path, monkeypatch):
    """Otherwise TensorFlow would reserve all GPU memory at its first operation."""
    import tensorflow as tf  # Slow, so not imported at the top of this file.

    calls = []
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *args: calls.append(args))
    write(tmp_path, [1]).close()
    assert calls == [([], "GPU")]


def test_memory_does_not_grow_with_the_numbers_that_were_written(tmp_path):
    def write(first, last):
        for step in range(first, last):
            writer.write_scalars(step, {"loss": step / 3, "lr": step / 7})
        gc.collect()
        return sys.getallocatedblocks()

    with events.writing(tmp_path) as writer:
        blocks = [write(100 * first, 100 * (first + 1)) for first in range(1, 5)]
    # TensorFlow would keep the step and both values of each line. Other threads add some blocks.
    assert min(np.diff(blocks)) < 100
