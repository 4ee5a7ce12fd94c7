"""Benchmarks against torch: both networks compute the same (needs torch)."""

import json

import pytest

from tests.imagen_jax import commands

pytest.importorskip("torch")
pytest.importorskip("diffusers")


@pytest.mark.slow
def test_our_networks_match_torchs_and_each_has_a_ratio_of_times():
    models = ["sd", "encode", "decode", "t5", "clip"]
    ended = commands.run(
        "benchmarks.torch", f"--models={','.join(models)}", "--work=forward", "--width=32", "--rounds=1", devices=1
    )
    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    assert [line["model"] for line in lines] == models
    for line in lines:
        assert line["difference"] < 1e-5 and line["least"] <= line["ratio"] <= line["most"]


def test_an_unknown_model_of_the_torch_benchmark_is_a_one_line_error():
    ended = commands.run("benchmarks.torch", "--models=dcode", devices=1)
    assert ended.code == 2 and "--models is 'dcode': did you mean 'decode'?" in ended.err
