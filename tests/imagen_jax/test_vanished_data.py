"""Data that go away end a training in one line, with a code at which one starts again."""

import pytest

from diffusion_jax.examples.digits import pictures as digits
from tests.imagen_jax.conftest import TINY
from tests.processes import Group


@pytest.mark.slow
def test_a_tar_that_vanishes_is_named_in_one_line(tmp_path):
    tar, workdir = tmp_path / "a.tar", tmp_path / "run"
    digits.main([f"--out={tar}", "--num=64", "--format=webdataset"])
    group = Group(
        tmp_path / "said", 1, "train", *TINY, "--config.data.source=webdataset",
        f"--config.data.path={tar}", "--config.steps=1000000", f"--workdir={workdir}",
    )  # fmt: skip
    group.wait_for_step(workdir, 1)
    tar.unlink()
    assert group.end() == [1], group.said()
    said = group.said()
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert (
        line == f"error: [Errno 2] No such file or directory: '{tar}'" and "Traceback" not in said
    )
