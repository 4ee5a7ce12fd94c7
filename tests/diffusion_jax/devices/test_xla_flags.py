"""XLA_FLAGS are checked before XLA ends the process over one of them."""

import subprocess
import sys

import pytest

from diffusion_jax.devices import xla_flags


def test_a_flag_that_jaxlib_does_not_know_is_named(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_async_collectives=true")
    with pytest.raises(ValueError, match=r"XLA_FLAGS holds --xla_gpu_enable_async_collectives"):
        xla_flags.check()


def test_the_flags_that_need_no_trial_are_known(monkeypatch):
    tried = subprocess.run(
        [sys.executable, "-c", xla_flags.TRIAL],
        env={"XLA_FLAGS": " ".join(f"--{name}={_value(name)}" for name in xla_flags.KNOWN)},
        capture_output=True,
        text=True,
    )
    assert tried.returncode == 0, tried.stderr
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere --xla_backend_optimization_level=0")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a trial"))
    xla_flags.check()


def _value(name):
    return "" if name == "xla_dump_to" else 1
