"""Checks of a device, each against an operation that is wrong, slow or missing on purpose."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.devices import checks
from diffusion_jax.devices.checks import Check
from diffusion_jax.nn import attention
from tests.imagen_jax import commands


@pytest.fixture(scope="module")
def cpu():
    return jax.local_devices()[0]


def test_every_operation_passes_on_the_cpu(cpu, monkeypatch):
    monkeypatch.setattr(checks, "seconds", commands.call_once)
    rows = {row["check"]: row for row in checks.on(cpu)}
    assert {row["verdict"] for row in rows.values()} == {"right"}
    errors = {name: row["error"] for name, row in rows.items() if "error" in row}
    # bfloat16 rounds by up to 0.004. An error below 1e-3 would mean float32 was compared.
    assert all(1e-3 < error < 0.02 for error in errors.values()), errors
    assert "attention blockwise (256, 333, 64)" in errors and "upload" in rows
    assert f"sum over {jax.local_device_count()} devices" in rows


def test_a_wrong_gradient_is_reported(cpu):
    @jax.custom_vjp
    def double(x):
        return 2 * x

    def backward(_, cotangent):
        return (cotangent * (1.9 if cotangent.dtype == jnp.bfloat16 else 2),)

    double.defvjp(lambda x: (double(x), None), backward)
    row = checks._row(Check("double", double, [(8, 8)]), cpu, {})
    assert row["verdict"] == "wrong" and row["error"] == pytest.approx(0.05, abs=0.01)


def test_nan_is_reported_as_wrong(cpu):
    holes = lambda x: jnp.where(x.dtype == jnp.bfloat16, jnp.nan, 1.0) * x
    assert checks._row(Check("holes", holes, [(8,)]), cpu, {})["verdict"] == "wrong"


def test_an_operation_that_raises_is_reported_with_its_error(cpu):
    def refused(x):
        raise NotImplementedError("no such algorithm\nwith more lines")

    row = checks._row(Check("refused", refused, [(8,)]), cpu, {})
    assert row["verdict"] == "does not run: NotImplementedError: no such algorithm"


def test_a_kernel_over_1_5_times_slower_than_the_plain_operation_is_reported(cpu, monkeypatch):
    monkeypatch.setattr(checks, "seconds", lambda *_: 3e-3)
    check = Check("kernel", lambda x: x * 2.0, [(8,)], plain="plain")
    slow = checks._row(check, cpu, {"plain": 1.9})  # 3 ms are 1.58 times 1.9 ms.
    assert slow["verdict"] == "slow: xla takes 1.9 ms"
    fast = checks._row(check, cpu, {"plain": 2.1})  # 3 ms are 1.43 times 2.1 ms.
    assert fast["verdict"] == "right"


def test_each_platform_is_checked_with_its_own_attention_kernels():
    own = {"cpu": {"xla", "blockwise"}, "tpu": {"xla", "blockwise", "splash"}, "gpu": {"xla", "blockwise", "cudnn"}}
    for platform, expected in own.items():
        names = [check.name.split() for check in checks.checks(platform)]
        assert {words[1] for words in names if words[0] == "attention"} == expected
    assert set(attention.IMPLEMENTATIONS) == {"auto"}.union(*own.values())


@pytest.mark.parametrize(
    ("make", "sizes", "flops"), [(checks.matmul, (64,), 2 * 64**3), (checks.conv, (2, 8), 2 * 2 * 64**2 * 9 * 8**2)]
)
def test_the_stated_flops_match_xlas_cost_analysis(make, sizes, flops):
    run, stated = make(*sizes, jnp.float32)
    assert stated == flops
    cost = jax.jit(run).lower().cost_analysis()
    assert cost and cost["flops"] == pytest.approx(flops, rel=1e-6)


def test_seconds_measures_one_call_without_compilation(monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def run():
        clock[0] += 0.01 if calls else 7.0  # The first call compiles.
        calls.append(0)
        return np.zeros(())

    assert checks.seconds(run, 0.05) == pytest.approx(0.01) and len(calls) == 9


def test_operations_outside_of_jit_are_compared_with_numpy(monkeypatch):
    device = jax.devices()[0]
    assert {row["verdict"] for row in checks.outside_jit(device)} == {"right"}
    monkeypatch.setattr(jnp, "ones", lambda *a: jnp.zeros(*a))
    wrong = [row for row in checks.outside_jit(device) if row["verdict"] != "right"]
    assert [row["check"] for row in wrong] == ["addition, outside of jit"]
    assert wrong[0]["verdict"] == f"wrong: use another version of jax than {jax.__version__}"
