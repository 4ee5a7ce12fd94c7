"""Profiles of GPUs."""

from types import SimpleNamespace

import jax

from benchmarks import measure


def test_a_profile_adds_the_times_of_a_gpus_kernels_by_operation(monkeypatch):
    def event(kernel, milliseconds, operation):
        return SimpleNamespace(
            name=kernel, duration_ns=1e6 * milliseconds, stats=[("hlo_op", operation)]
        )

    events = [
        event("sm90_fprop", 2.0, "cudnn-conv.1"),
        event("sm90_fprop", 4.0, "cudnn-conv.1"),
        event("sm90_fprop", 3.0, "cudnn-conv.2"),
        event("reduce", 1.0, "input_reduce_fusion_12"),
    ]
    stream = SimpleNamespace(name="Stream #16", events=events)
    modules = SimpleNamespace(name="XLA Modules", events=[event("train_step", 9.0, "")])
    planes = [
        SimpleNamespace(name="/device:GPU:0", lines=[stream, modules]),
        SimpleNamespace(name="/host:CPU", lines=[stream]),
    ]
    profile = SimpleNamespace(planes=planes)
    monkeypatch.setattr(jax.profiler.ProfileData, "from_file", lambda path: profile, raising=False)
    calls = []
    result = measure.gpu_kernels(lambda: calls.append(1), calls=2)
    assert len(calls) == 2
    assert result == {
        "total_ms": 5.0,
        "kinds": {"cudnn-conv": 4.5, "input_reduce_fusion": 0.5},
        "longest": [
            (3.0, 1.0, "cudnn-conv.1", "sm90_fprop"),
            (1.5, 0.5, "cudnn-conv.2", "sm90_fprop"),
            (0.5, 0.5, "input_reduce_fusion_12", "reduce"),
        ],
    }
