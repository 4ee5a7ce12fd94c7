"""Data that disappear during training end it with a one-line error and a restartable exit code."""

import pytest

from diffusion_jax.examples.digits import rendering as digits
from tests.imagen_jax.conftest import TINY
from tests.processes import Group


@pytest.mark.slow
def test_a_tar_deleted_during_training_is_a_one_line_error(tmp_path):
    tar, workdir = tmp_path / "a.tar", tmp_path / "run"
    digits.main([f"--out={tar}", "--num=64", "--format=webdataset"])
    group = Group(
        tmp_path / "output",
        1,
        "train",
        *TINY,
        "--config.data.source=webdataset",
        f"--config.data.path={tar}",
        "--config.steps=1000000",
        f"--workdir={workdir}",
    )
    group.wait_for_step(workdir, 1)
    tar.unlink()
    assert group.end() == [1], group.printed()
    errors = group.printed()
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert line == f"error: [Errno 2] No such file or directory: '{tar}'" and "Traceback" not in errors
