"""The bug report: what it holds, and that its rates count the right operations."""

import json

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax import doctor
from tests.imagen_jax import commands


@pytest.mark.parametrize(
    ("make", "sizes", "flops"),
    [(doctor.matmul, (64,), 2 * 64**3), (doctor.conv, (2, 8), 2 * 2 * 64**2 * 9 * 8**2)],
)
def test_the_operations_are_those_of_the_program(make, sizes, flops):
    run, said = make(*sizes, jnp.float32)
    assert said == flops
    assert jax.jit(run).lower().cost_analysis()["flops"] == pytest.approx(flops, rel=1e-6)


def test_a_rate_is_operations_by_time(monkeypatch):
    clock = iter([10.0, 10.1, 10.3, 10.6, 11.0])  # Start, asked thrice whether to go on, end.
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: next(clock))
    assert doctor.rate(lambda: jnp.zeros(()), 3.0) == 8 * 3.0 / 1.0


def test_what_fails_is_said_in_a_line():
    outcomes = doctor.attention()
    assert outcomes["xla"] == "works"
    assert outcomes["cudnn"] != "works" and "\n" not in outcomes["cudnn"]


def test_the_command_prints_what_is_here():
    ended = commands.run("diffusion_jax.doctor", "--json", devices=2)
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert f"jax:    {jax.__version__}" in report["jax"]
    assert report["versions"]["flax"] == flax.__version__
    assert [device["kind"] for device in report["devices"]] == ["cpu", "cpu"]
    assert "host_platform_device_count=2" in report["environment"]["XLA_FLAGS"]
    rates = report["rates"]
    assert rates["peak"] is None and np.isfinite(rates["matmul"]) and rates["conv"] > 1e-4
    lines = doctor.text(report)
    assert lines.startswith(f"jax:    {jax.__version__}\n")
    assert f"\n  flax: {flax.__version__}\n" in lines and "\n  peak: null\n" in lines
    assert "\n- id: 1\n  kind: cpu\n  process: 0\n" in lines
