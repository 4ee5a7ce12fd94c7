"""A disk that fills up is one line that says which file, and a code at which one starts again."""

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
    """A command that runs on a disk of so many KiB, and once more when there is room."""
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


def test_of_the_metrics(ended):
    line = ended(64, *TRAIN, "--workdir=DISK/run", again=("--config.steps=2",))
    said = r"error: \[Errno 28\] No space left on device: '(DISK/run/metrics.jsonl|tensorboard)': "
    assert re.fullmatch(said + "make room, and run the same command again", line), line


@pytest.mark.parametrize("size", [40, 400, 1500])
def test_of_a_checkpoint(ended, size):
    few = ("--config.steps=4", "--config.save_every=2")
    line = ended(size, *TRAIN, *few, "--workdir=DISK/run")
    assert line.startswith("error: a checkpoint under DISK/run/checkpoints could not be written: ")
    assert line.endswith(" (is the disk full?). There is no complete checkpoint.")


def test_of_a_store_of_texts(ended, tmp_path):
    weights = tiny_weights.t5_folder(tmp_path / "t5", width=64)
    flags = text_flags(weights, tmp_path / "disk" / "store")
    line = ended(16, "diffusion_jax.precache", *flags)
    said = r"error: \[Errno 28\] No space left on device: 'DISK/store/[^']+': make room, and run "
    assert re.fullmatch(said + "the same command again", line), line


def test_of_pictures(ended, tmp_path):
    with tarfile.open(ROOT / "fixtures/earlier_runs/imagen_cc541fd.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    run = ("sample", f"--workdir={tmp_path}/imagen_cc541fd", "--prompt=a red seven")
    line = ended(8, *run, "--num_images=8", "--out=DISK/out")
    said = r"error: \[Errno 28\] No space left on device: 'DISK/out/[^']+': make room, and run "
    assert re.fullmatch(said + "the same command again", line), line
