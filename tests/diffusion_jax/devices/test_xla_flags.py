"""XLA_FLAGS are checked before XLA could end the process because of an unknown flag."""

import subprocess
import sys

import pytest

from diffusion_jax.devices import xla_flags


def test_an_unknown_xla_flag_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_async_collectives=true")
    with pytest.raises(ValueError, match=r"XLA_FLAGS holds --xla_gpu_enable_async_collectives"):
        xla_flags.check()


def test_all_flags_listed_as_known_are_accepted_by_jaxlib(monkeypatch):
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
