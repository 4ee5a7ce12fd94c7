"""The table of few steps, from a run of the quick start."""

import tarfile

import pytest

from tests.imagen_jax import commands
from tests.imagen_jax.test_earlier_runs import PACKED


@pytest.mark.slow
def test_every_sampler_and_number_of_steps_has_a_line(tmp_path):
    with tarfile.open(PACKED / "imagen_de86e1f.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    run = tmp_path / "imagen_de86e1f"
    arguments = (f"--run={run}", "--steps=1,2", "--samplers=ddim,heun")
    ended = commands.run("benchmarks.few_steps", *arguments, devices=1)
    assert ended.code == 0, ended.err
    rows = [line.split("|")[1:-1] for line in ended.out.splitlines() if line.startswith("| ")]
    assert [(name.strip(), steps.strip()) for name, steps, *_ in rows[1:]] == [
        ("ddim", "1"), ("ddim", "2"), ("heun", "1"), ("heun", "2"),
    ]  # fmt: skip
    for *_, milliseconds, right in rows[1:]:
        assert float(milliseconds) > 0 and 0 <= float(right.strip(" %")) <= 100


def test_an_unknown_sampler_is_one_line():
    ended = commands.run("benchmarks.few_steps", "--run=x", "--samplers=dim", devices=1)
    assert ended.code == 2 and "--samplers is 'dim': did you mean 'ddim'?" in ended.err
