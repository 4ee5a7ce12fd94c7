"""A full disk is a one-line error that names the file, with an exit code that allows a restart."""

import re
import tarfile

import pytest

from tests.campaign import rounds
from tests.campaign.subjects import text_flags
from tests.diffusion_jax.text import tiny_weights
from tests.imagen_jax import commands
from tests.imagen_jax.conftest import TINY
from tests.test_bad_input import ROOT

pytestmark = pytest.mark.slow
TRAIN = ("train", *TINY, "--config.save_every=1000000", "--config.steps=1000000")


@pytest.fixture
def ended(tmp_path):
    """Return a function that runs a command on a disk of some KiB, and again with more space."""
    if not rounds.can_mount():
        pytest.skip("a small disk takes root to mount")

    def run(size, *arguments, again=()):
        folder = tmp_path / "disk"
        with rounds.disk(folder, 1024 * size) as grow:
            first = commands.run(*(a.replace("DISK", str(folder)) for a in arguments), devices=1)
            grow()
            more = (a.replace("DISK", str(folder)) for a in (*arguments, *again))
            second = commands.run(*more, devices=1)
        assert second.code == 0, second.err
        assert first.code == 1 and "Traceback" not in first.err, first.err
        (line,) = [line for line in first.err.splitlines() if line.startswith("error: ")]
        return line.replace(str(folder), "DISK")

    return run


@pytest.mark.parametrize(
    ("size", "file"), [(40, "DISK/run/manifest.json"), (64, "(DISK/run/metrics.jsonl|tensorboard)")]
)
def test_a_disk_too_full_for_a_runs_small_files_is_a_one_line_error(ended, size, file):
    line = ended(size, *TRAIN, "--workdir=DISK/run", again=("--config.steps=2",))
    expected = rf"error: \[Errno 28\] No space left on device: '{file}': "
    assert re.fullmatch(expected + "make room, and run the same command again", line), line


@pytest.mark.parametrize("size", [400, 1500])
def test_a_disk_too_full_for_a_checkpoint_is_a_one_line_error(ended, size):
    few = ("--config.steps=4", "--config.save_every=2")
    line = ended(size, *TRAIN, *few, "--workdir=DISK/run")
    assert line.startswith("error: a checkpoint under DISK/run/checkpoints could not be written: ")
    assert line.endswith(" (is the disk full?). There is no complete checkpoint.")


def test_a_disk_too_full_for_a_store_of_texts_is_a_one_line_error(ended, tmp_path):
    weights = tiny_weights.t5_folder(tmp_path / "t5", width=64)
    flags = text_flags(weights, tmp_path / "disk" / "store")
    line = ended(16, "diffusion_jax.precache", *flags)
    expected = r"error: \[Errno 28\] No space left on device: 'DISK/store/[^']+': make room, and run "
    assert re.fullmatch(expected + "the same command again", line), line


def test_a_disk_too_full_for_a_sweep_is_a_one_line_error(ended, tmp_path):
    with tarfile.open(ROOT / "fixtures/earlier_runs/imagen_cc541fd.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    run = ("evaluate", f"--workdir={tmp_path}/imagen_cc541fd", "--guidance=1", "--num_heldout=1")
    line = ended(8, *run, "--batch_size=32", "--out=DISK/out")
    expected = r"error: \[Errno 28\] No space left on device: 'DISK/out/[^']+': make room, and run "
    assert re.fullmatch(expected + "the same command again", line), line


def test_a_disk_too_full_for_pictures_is_a_one_line_error(ended, tmp_path):
    with tarfile.open(ROOT / "fixtures/earlier_runs/imagen_cc541fd.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    run = ("sample", f"--workdir={tmp_path}/imagen_cc541fd", "--prompt=a red seven")
    line = ended(8, *run, "--num_images=8", "--out=DISK/out")
    expected = r"error: \[Errno 28\] No space left on device: 'DISK/out/[^']+': make room, and run "
    assert re.fullmatch(expected + "the same command again", line), line
