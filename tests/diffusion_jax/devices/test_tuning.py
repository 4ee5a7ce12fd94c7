"""Environment variables for accelerators, added if the user has not set them."""

import os
import subprocess
import sys

import pytest

from diffusion_jax.devices import tuning
from diffusion_jax.devices.tuning import SETTINGS

TPU = " ".join(setting.value for setting in SETTINGS["tpu"])


def test_tuning_flags_are_added_to_the_users_flags():
    added = tuning.environment(["tpu", "v5p"], {"LIBTPU_INIT_ARGS": "--a=1"})
    assert added == {"LIBTPU_INIT_ARGS": f"--a=1 {TPU}"}
    v5e = " ".join(setting.value for setting in SETTINGS["v5e"])
    assert tuning.environment(["tpu", "v5e"], {}) == {"LIBTPU_INIT_ARGS": f"{TPU} {v5e}"}
    assert tuning.environment(["gpu"], {}) == {"XLA_CLIENT_MEM_FRACTION": "0.9"}


def test_variables_and_flags_set_by_the_user_are_not_changed():
    mine = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1"
    added = tuning.environment(["tpu"], {"LIBTPU_INIT_ARGS": mine})
    assert added == {"LIBTPU_INIT_ARGS": f"{mine} {SETTINGS['tpu'][1].value}"}
    assert tuning.environment(["gpu"], {"XLA_CLIENT_MEM_FRACTION": ""}) == {}
    assert tuning.environment(["gpu"], {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}) == {}
    assert tuning.environment(["tpu"], {"LIBTPU_INIT_ARGS": TPU}) == {}


@pytest.mark.parametrize(
    ("plugins", "kind", "platforms", "expected"),
    [
        ((), "", "", []),
        (("jax_cuda13_plugin",), "v5litepod-8", "", ["gpu"]),
        (("libtpu",), "v5litepod-8", "", ["tpu", "v5e"]),
        (("libtpu",), "v5p-8", "tpu,cpu", ["tpu"]),
        (("libtpu", "jax_cuda12_plugin"), "v5p-8", "cpu", []),
    ],
)
def test_local_kinds_follow_from_the_installed_plugins(monkeypatch, plugins, kind, platforms, expected):
    monkeypatch.setattr(tuning.importlib.util, "find_spec", lambda name: name if name in plugins else None)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", kind)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert tuning.local_kinds() == expected


def test_a_command_sets_the_variables_before_jax_starts(tmp_path):
    """An empty module with the plugin's name stands in for the CUDA plugin."""
    (tmp_path / "jax_cuda13_plugin.py").touch()
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cuda,cpu", "NCCL_DEBUG": "WARN"}
    environ.pop("XLA_CLIENT_MEM_FRACTION", None)
    shown = "print({k: v for k, v in tuning.variables().items() if 'FRACTION' in k or 'NCCL' in k})"
    assert last_line(shown, environ) == str({"NCCL_DEBUG": "WARN", "XLA_CLIENT_MEM_FRACTION": "0.9"})


def last_line(code, environ):
    """Return the last line that this code prints after a command's start."""
    start = "from absl import flags; from diffusion_jax import cli; from diffusion_jax.devices import tuning"
    code = f"{start}\nflags.FLAGS(['x'])\ncli.start()\n{code}"
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[-1]


CALLS = """
import ctypes, resource
c = ctypes.CDLL(None)
c.prctl(41, 1, 0, 0, 0)  # No huge pages.
c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
c.free.argtypes = [ctypes.c_void_p]
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def call():
    block = c.malloc(2**26)
    ctypes.memset(block, 1, 2**26)
    c.free(block)

call()
before = faults()
for _ in range(10):
    call()
print((faults() - before) / 2**14)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
@pytest.mark.parametrize(("theirs", "kept"), [({}, True), ({"MALLOC_ARENA_MAX": "8"}, False)])
def test_on_a_cpu_freed_memory_is_reused_unless_malloc_is_configured(theirs, kept):
    """Allocate, fill and free 64 MiB (2^14 pages) ten times, and count the page faults."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith(tuning.MALLOC)}
    times = float(last_line(CALLS, {**environ, "JAX_PLATFORMS": "cpu", **theirs}))
    assert times < 0.1 if kept else times > 9.7
