"""XLA's choices of GPU kernels are stored in the workdir, and loaded when a run is resumed."""

import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from absl import logging

from diffusion_jax.logs import run_log
from diffusion_jax.train import autotuning

DUMP, LOAD = "xla_gpu_dump_autotune_results_to", "xla_gpu_load_autotune_results_from"
ONLY = "xla_gpu_exclude_nondeterministic_ops"


@pytest.fixture
def _on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def test_on_a_cpu_autotuning_sets_and_writes_nothing(tmp_path):
    tuned = autotuning.find(tmp_path, deterministic=True)
    autotuning.keep(tmp_path, tuned)
    assert tuned == autotuning.Autotuning({}) and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_on_a_gpu")
def test_kernel_choices_are_written_at_the_first_start_and_loaded_later(tmp_path):
    first = autotuning.find(tmp_path, deterministic=True)
    assert first.options == {ONLY: True, DUMP: str(first.written)} and first.loaded == ""
    # In place of XLA, which writes it while compiling.
    pathlib.Path(str(first.written)).write_text("kernel 7")
    autotuning.keep(tmp_path, first)
    assert first.written is not None and not first.written.parent.exists()
    digest = hashlib.sha256(b"kernel 7").hexdigest()[:16]
    name = f"autotuning_{run_log.version('jaxlib')}_cpu_{digest}.txt"
    assert (tmp_path / name).read_text() == "kernel 7"
    second = autotuning.find(tmp_path, deterministic=False)
    assert second.options == {ONLY: False, LOAD: str(tmp_path / name)}
    assert second.loaded == name
    autotuning.keep(tmp_path, second)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(
    "name", ["autotuning_0.0.1_cpu_abc.txt", f"autotuning_{run_log.version('jaxlib')}_H200_abc.txt"]
)
def test_kernel_choices_of_another_jaxlib_or_gpu_are_ignored_with_a_warning(name, tmp_path, caplog):
    (tmp_path / name).write_text("kernel 7")
    with caplog.at_level(logging.WARNING):
        tuned = autotuning.find(tmp_path, deterministic=True)
    assert LOAD not in tuned.options and DUMP in tuned.options
    assert f"{name} was written by another jaxlib or for another kind of GPU" in caplog.text


def test_the_installed_jaxlib_accepts_the_autotuning_options(tmp_path):
    options = {ONLY: True, DUMP: str(tmp_path / "chosen.txt")}
    program = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile(compiler_options=options)
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_unknown"):
        jax.jit(jnp.sin).lower(1.0).compile(compiler_options={"xla_gpu_unknown": True})


@pytest.mark.parametrize("deterministic", [True, False])
def test_all_gradients_of_cudnn_attention_are_marked_as_deterministic(deterministic):
    """XLA marks only the first of several equal calls, and then fails at the others."""
    config = json.dumps({"cudnn_fmha_backend_config": {"fmha_scale": 0.125}})

    def step(x):
        for name in ("__cudnn$fmhaSoftmax", *2 * ["__cudnn$fmhaSoftmaxBackward"]):
            call = jax.ffi.ffi_call(
                name, jax.ShapeDtypeStruct(x.shape, x.dtype), custom_call_api_version=2, legacy_backend_config=config
            )
            x = jax.lax.cond(x[0] > 0, call, jnp.sin, x)  # Calls within other operations count too.
        return x

    lowered = jax.jit(step).lower(jnp.ones(3))
    # CPUs do not know this call.
    with pytest.raises(jax.errors.JaxRuntimeError, match="fmhaSoftmax"):
        autotuning.compile_step(lowered, {ONLY: deterministic})
    assert lowered.as_text().count("fmha_scale") == 3
    assert lowered.as_text().count("force_deterministic") == (2 if deterministic else 0)
