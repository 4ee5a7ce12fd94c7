"""The report of diffusion_jax.doctor."""

import json

import flax
import jax
import numpy as np

from diffusion_jax import doctor
from tests.imagen_jax import commands


def test_doctor_reports_versions_devices_environment_and_checks():
    ended = commands.run("diffusion_jax.doctor", "--json", devices=2, before=commands.check_little)
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert f"jax:    {jax.__version__}" in report["jax"]
    assert report["versions"]["flax"] == flax.__version__
    assert [device["kind"] for device in report["devices"]] == ["cpu", "cpu"]
    assert "host_platform_device_count=2" in report["environment"]["XLA_FLAGS"]
    assert report["set_here"] == {}  # Without libtpu and GPU plugins, nothing is set.
    assert {row["verdict"] for row in report["checks"]} == {"right"}
    rates = report["rates"]
    assert rates["peak"] is None and np.isfinite(rates["matmul"]) and rates["conv"] > 1e-4
    lines = doctor.text(report)
    assert lines.startswith(f"jax:    {jax.__version__}\n")
    assert f"\n  flax: {flax.__version__}\n" in lines and "\n  peak: null\n" in lines
    assert "\n- id: 1\n  kind: cpu\n  process: 0\n" in lines
    assert "\nsum over 2 devices                   right  gb_per_s " in lines
    report["checks"][2]["verdict"] = "wrong"
    assert doctor.text(report).endswith(f"\nfailed or slow checks: {report['checks'][2]['check']}")
    assert lines.endswith("\nall checks are right")
