"""Our networks and torch's, which are timed in turns: both compute the same (needs torch)."""

import json

import pytest

from tests.imagen_jax import commands

pytest.importorskip("torch")
pytest.importorskip("diffusers")


@pytest.mark.slow
def test_the_networks_are_equal_and_each_kind_of_work_has_a_ratio():
    models = ["sd", "encode", "decode", "t5", "clip"]
    ended = commands.run(
        "benchmarks.torch", f"--models={','.join(models)}", "--work=forward", "--width=32",
        "--rounds=1", devices=1,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    assert [line["model"] for line in lines] == models
    for line in lines:
        assert line["difference"] < 1e-5 and line["least"] <= line["ratio"] <= line["most"]


def test_a_model_that_is_not_known_is_one_line():
    ended = commands.run("benchmarks.torch", "--models=dcode", devices=1)
    assert ended.code == 2 and "--models is 'dcode': did you mean 'decode'?" in ended.err
