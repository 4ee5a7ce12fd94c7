"""Timing of steps, and what a GPU reports meanwhile."""

import time
from types import SimpleNamespace

import jax

from benchmarks import measure, step


def test_two_calls_are_in_flight_and_each_duration_ends_with_a_call():
    made = []
    durations = measure.in_flight(lambda: made.append(time.sleep(0.01)), steps=5, seconds=0)
    assert len(durations) == 5 and len(made) == 7
    assert min(durations) >= 0.01


def test_without_a_number_of_steps_calls_are_timed_until_the_seconds_have_passed():
    durations = measure.in_flight(lambda: time.sleep(0.01), steps=0, seconds=0.1)
    assert sum(durations[:-1]) < 0.1 <= sum(durations)


def test_rates_are_medians_of_the_first_and_last_hundred_steps():
    timing = step.Timing([1.0] * 120 + [2.0] * 130, 0, 0, 0, 0, 0)
    assert (timing.first, timing.median) == (1.0, 2.0)
    assert step.Timing([3.0, 1.0, 4.0], 0, 0, 0, 0, 0).first == 2.0


def test_power_and_clock_are_medians_of_the_second_half_of_nvidia_smis_readings(tmp_path, monkeypatch):
    rows = "100.0, 1980\n300.0, 1900\n698.0, 1500\n700.0, 1400\n699.0, 1300\n"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{rows}'\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with measure.gpu_power() as power:
        while not power and not (tmp_path / "read").exists():
            time.sleep(0.2)  # The readings are in the pipe once the shell has started.
            (tmp_path / "read").touch()
    assert power == {"watts": 699.0, "mhz": 1400.0}


def test_without_nvidia_smi_no_power_is_reported(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with measure.gpu_power() as power:
        pass
    assert power == {}


def test_a_profile_adds_the_times_of_a_gpus_kernels_by_operation(monkeypatch):
    def event(kernel, milliseconds, operation):
        return SimpleNamespace(name=kernel, duration_ns=1e6 * milliseconds, stats=[("hlo_op", operation)])

    events = [
        event("sm90_fprop", 2.0, "cudnn-conv.1"),
        event("sm90_fprop", 4.0, "cudnn-conv.1"),
        event("sm90_fprop", 3.0, "cudnn-conv.2"),
        event("reduce", 1.0, "input_reduce_fusion_12"),
    ]
    stream = SimpleNamespace(name="Stream #16", events=events)
    modules = SimpleNamespace(name="XLA Modules", events=[event("train_step", 9.0, "")])
    gpu, host = ("/device:GPU:0", [stream, modules]), ("/host:CPU", [stream])
    profile = SimpleNamespace(planes=[SimpleNamespace(name=name, lines=lines) for name, lines in (gpu, host)])
    monkeypatch.setattr(jax.profiler.ProfileData, "from_file", lambda path: profile, raising=False)
    calls = []
    result = measure.gpu_kernels(lambda: calls.append(1), calls=2)
    assert len(calls) == 2
    longest = [(3.0, 1.0, "cudnn-conv.1", "sm90_fprop"), (1.5, 0.5, "cudnn-conv.2", "sm90_fprop")]
    longest.append((0.5, 0.5, "input_reduce_fusion_12", "reduce"))
    kinds = {"cudnn-conv": 4.5, "input_reduce_fusion": 0.5}
    assert result == {"total_ms": 5.0, "kinds": kinds, "longest": longest}
