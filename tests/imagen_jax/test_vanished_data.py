"""Data that disappear during training end it with a one-line error and a restartable exit code."""

import pytest

from diffusion_jax.examples.digits import rendering as digits
from tests.imagen_jax import commands
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


@pytest.mark.slow
def test_a_tar_missing_at_the_next_start_is_an_error_with_exit_code_2(tmp_path):
    for name in "ab":
        digits.main([f"--out={tmp_path}/tars/{name}.tar", "--num=64", "--format=webdataset"])
    arguments = (
        "train",
        *TINY,
        "--config.data.source=webdataset",
        f"--config.data.path={tmp_path}/tars",
        f"--workdir={tmp_path}/run",
    )
    ended = commands.run(*arguments, "--config.steps=2", devices=1)
    assert ended.code == 0, ended.err
    gone = tmp_path / "tars" / "b.tar"
    gone.unlink()
    ended = commands.run(*arguments, "--config.steps=4", devices=1)
    assert ended.code == 2 and "Traceback" not in ended.err, ended.err
    message = f"the 128 pictures of this run lie in files of which 1 no longer exist, such as {gone}"
    assert f"error: {message}. Restore them, or start a new run" in ended.err
