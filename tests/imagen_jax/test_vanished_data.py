"""Data that go away end a training in one line, with a code at which one starts again."""

import time

import pytest

from diffusion_jax.data import digits
from diffusion_jax.machine import log
from tests.imagen_jax import commands
from tests.imagen_jax.conftest import TINY


@pytest.mark.slow
def test_a_tar_that_vanishes_is_named_in_one_line(tmp_path):
    tar, workdir = tmp_path / "a.tar", tmp_path / "run"
    digits.main([f"--out={tar}", "--num=64", "--format=webdataset"])
    outputs = tmp_path / "out", tmp_path / "err"
    process = commands.start(
        "train", *TINY, "--config.data.source=webdataset", f"--config.data.path={tar}",
        "--config.steps=1000000", f"--workdir={workdir}", devices=1, outputs=outputs,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (workdir / log.METRICS).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    tar.unlink()
    process.join(120)
    said = outputs[1].read_text()
    assert process.exitcode == 1, said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert (
        line == f"error: [Errno 2] No such file or directory: '{tar}'" and "Traceback" not in said
    )
