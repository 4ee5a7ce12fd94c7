"""Programs compiled for accelerators without the hardware."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from launch import accelerators
from launch.planner import compiling, gpu
from tests.imagen_jax import commands

_GPU = """
import functools
import jax, numpy as np
import jax.numpy as jnp
from diffusion_jax.devices import sharding
from diffusion_jax.nn import attention
from jax.sharding import AxisType, Mesh
from launch import accelerators
from launch.planner import compiling, gpu

compiling.prepare(1)
device = gpu.devices(accelerators.parse("h100:1"))
mesh = Mesh(np.array(device).reshape(1, 1, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
array = lambda *shape: jax.ShapeDtypeStruct(
    shape, jnp.bool_ if len(shape) == 2 else jnp.bfloat16, sharding=sharding.replicated(mesh)
)
attend = functools.partial(attention.attend, implementation="{implementation}")
gradient = lambda q, k, v, mask, out: jax.vjp(lambda *qkv: attend(*qkv, mask), q, k, v)[1](out)
q, k = array(2, 256, 2, 64), array(2, 333, 2, 64)
program = jax.jit(sharding.ambient(mesh, gradient)).lower(q, k, k, array(2, 77), q).compile()
print(gpu.kernels(program.as_text()))
"""


def run(*command):
    return subprocess.run([sys.executable, *command], cwd=commands.ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["auto", "cudnn"])
def test_attention_compiled_for_an_h100_uses_cudnn(implementation):
    if missing := gpu.missing(accelerators.parse("h100:1")):
        pytest.skip(missing)
    if not gpu.has_cudnn():
        pytest.skip("cuDNN (the extra plan-gpu) is not installed")
    ended = run("-c", _GPU.format(implementation=implementation))
    assert ended.returncode == 0, ended.stderr
    assert "fmhaSoftmaxBackward" in ended.stdout


def test_compilation_is_repeated_without_triton_if_it_finds_no_tile_sizes(monkeypatch):
    class Compiled:
        as_text = staticmethod(lambda: "ENTRY")
        memory_analysis = staticmethod(lambda: SimpleNamespace(temp_size_in_bytes=7))

    class Lowered:
        as_text = staticmethod(lambda: "stablehlo.dot_general")

        def compile(self, **options):
            tried.append(options)
            if not options:
                raise jax.errors.JaxRuntimeError("Couldn't find output tile sizes")
            return Compiled()

    tried: list = []
    lowered: Any = Lowered()
    monkeypatch.setattr(compiling, "cached", lambda name, parts, make: make())
    compiled = compiling.compile_for(lowered, "h100", fallback=gpu.FALLBACK)
    assert compiled.temporary == 7
    assert tried == [{}, {"compiler_options": {"xla_gpu_enable_triton_gemm": False}}]
    with pytest.raises(jax.errors.JaxRuntimeError, match="tile sizes"):
        compiling.compile_for(lowered, "h100")


@pytest.mark.parametrize(
    ("installed", "lacking"),
    [
        ((), "jax-cuda13-plugin and nvidia-cuda-nvcc"),
        (("nvidia.cu13.bin",), "jax-cuda13-plugin"),
        (("jax_plugins.xla_cuda13",), "nvidia-cuda-nvcc"),
        (("jax_plugins.xla_cuda12",), "nvidia-cuda-nvcc-cu12"),
    ],
)
def test_packages_missing_for_gpu_plans_are_named(installed, lacking, monkeypatch):
    monkeypatch.setattr(gpu, "_installed", lambda module: module in installed)
    message = f"this machine lacks {lacking} (extra plan-gpu)"
    assert gpu.missing(accelerators.parse("h100:8")) == message
    assert "no description of mi300x" in str(gpu.missing(accelerators.parse("mi300x:8")))


def test_the_description_of_a_gpu_names_the_installed_cuda(monkeypatch):
    h100 = gpu.DEVICES["h100"]
    assert "runtime_version { major: 13 minor: 0 patch: 0 }" in gpu.text(h100)
    monkeypatch.setattr(gpu, "_installed", lambda module: module == "jax_plugins.xla_cuda12")
    assert "runtime_version { major: 12 minor: 9 patch: 0 }" in gpu.text(h100)


def test_the_description_of_a_gpu_has_xlas_text_format():
    text = gpu.text(gpu.DEVICES["h100"])
    assert "shared_memory_per_block_optin: 232448" in text and "major: 9" in text
    assert text.count("{") == text.count("}") == 4


_MICRO = """
from configs import quickstart
from launch.planner import compiling, tasks
compiling.prepare(1)
for size in (0, 32):
    config = quickstart.get_config()
    config.optimizer.micro_batch = size
    model = tasks.read(config.to_dict())
    text = compiling.lower_step(model, compiling.one_device("v5e")).as_text()
    print(text.count("stablehlo.while"))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_micro_batches_are_compiled_as_a_loop_for_a_tpu():
    whole, micro = last_two_numbers(_MICRO)
    assert micro == whole + 1


_SLICES = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from launch import accelerators
from launch.planner import compiling, traffic
compiling.prepare(8, "tpu")
target = accelerators.parse("v5e:2x2*2")
mesh = Mesh(np.array(compiling.tpu_devices(target)).reshape(2, 4), ("replica", "fsdp"))
split = P("replica", "fsdp")
add = lambda x: jax.lax.psum(x, "replica")
add = jax.shard_map(add, mesh=mesh, in_specs=split, out_specs=P(None, "fsdp"))
x = jax.ShapeDtypeStruct((2, 512, 128), np.float32, sharding=NamedSharding(mesh, split))
(sent,) = traffic.of_hlo(jax.jit(add).lower(x).compile().as_text(), target.island)
assert (sent.kind, sent.groups.tolist()) == ("all-reduce", [[0, 4], [1, 5], [2, 6], [3, 7]])
print(sent.size, traffic.seconds_by_link([sent], target)["network"])
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_sum_over_two_slices_is_counted_once_as_network_traffic():
    size, seconds = last_two_numbers(_SLICES)
    assert size == 128 * 128 * 4
    # Half of it is sent twice, at the 25 Gbit/s of a v5e chip.
    assert seconds == pytest.approx(128 * 128 * 4 / 3.125e9)


def last_two_numbers(script):
    """Run a script in its own process, and return the last two numbers it prints."""
    ended = run("-c", script)
    assert ended.returncode == 0, ended.stderr
    return [float(word) for word in ended.stdout.split()[-2:]]
