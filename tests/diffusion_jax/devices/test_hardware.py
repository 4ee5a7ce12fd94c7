"""Peak FLOP/s per device kind, and utilization computed by hand."""

import types

import jax
import pytest

from diffusion_jax.devices import hardware

GPUS = {"H100 80GB HBM3": 989.4, "H100 PCIe": 756, "H200": 989.4, "A100-SXM4-80GB": 312, "B200": 2250, "GB200": 2500}
TPUS = {"TPU v4": 275, "TPU v5 lite": 197, "TPU v5": 459, "TPU v5p": 459, "TPU v6 lite": 918, "TPU7x": 1153.5}
PEAKS = {f"NVIDIA {kind}": peak for kind, peak in GPUS.items()} | TPUS | {"AMD Instinct MI300X": 1307.4}


@pytest.mark.parametrize("kind", PEAKS)
def test_peak_flops_match_the_data_sheets_dense_bfloat16_numbers(kind):
    assert hardware.peak_flops(kind) == PEAKS[kind] * 1e12


def test_an_unknown_device_has_no_peak_and_no_utilization():
    assert hardware.peak_flops("cpu") is None
    assert hardware.utilization(1e12, 1.0, "cpu", 8) is None


def test_utilization_counts_all_devices():
    # 312 TFLOP in 0.5 s on four devices with 312 TFLOP/s each.
    assert hardware.utilization(312e12, 0.5, "NVIDIA A100-SXM4-40GB", 4) == 0.5


def test_the_cpu_does_not_report_memory():
    assert hardware.memory(jax.devices()[0]) is None


def test_memory_without_a_peak_reports_the_used_bytes_as_peak():
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 3, "bytes_limit": 9})
    assert hardware.memory(device) == hardware.Memory(used=3, peak=3, limit=9)
