"""Set defaults of compilers and runtimes for each kind of machine, unless the user has set them.

Every command applies the settings for the installed JAX plugin. Every launcher puts the settings
for the accelerators that it requests into a job's environment. This module lists only settings with
a known effect. docs/lab/performance.md lists the settings that were tried and left out.
The sources are Google's recipes for Stable Diffusion on TPUs (AI-Hypercomputer/tpu-recipes, 2026)
and NVIDIA's recipes for JAX (JAX-Toolbox, 2026).
"""

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Setting(NamedTuple):
    """An environment variable with its value, or one flag in a variable such as XLA_FLAGS.

    For a flag, `value` is "--NAME=VALUE". `reason` says what the setting improves.
    """

    variable: str
    value: str
    reason: str

    def is_in(self, variables: Mapping[str, str]) -> bool:
        """Return whether `variables` sets this variable, or this flag inside it, to any value."""
        old = self.variable.replace("XLA_CLIENT", "XLA_PYTHON_CLIENT")  # JAX refuses both.
        now = variables.get(self.variable, variables.get(old))
        flag = re.match(r"--\w+", self.value)
        return now is not None and (not flag or re.search(rf"{flag[0]}\b", now) is not None)


# The numbers in the reasons for TPUs come from a program that libtpu 0.0.52 compiled: six group
# norms, SiLUs and 3x3 convolutions of 512 channels at 16x16, with backward pass and AdamW, on eight
# chips with eight samples each.
SETTINGS: Mapping[str, tuple[Setting, ...]] = {
    "tpu": (
        Setting(
            "LIBTPU_INIT_ARGS",
            "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
            "with fsdp, gather whole weights: 18 convolutions instead of 36, no permutes instead "
            "of 84, and 22 % (v4) to 46 % (v6e) fewer estimated cycles (not counting collectives)",
        ),
        Setting(
            "LIBTPU_INIT_ARGS",
            "--xla_tpu_spmd_threshold_for_allgather_cse=1000000",
            "reuse the weights gathered for the forward pass in the backward pass: 16 gathers instead of 36 on v5e",
        ),
    ),
    "v5e": (
        Setting(
            "LIBTPU_INIT_ARGS",
            "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true",
            "overlap sums of gradients with computation: 12 % fewer estimated cycles; needs "
            "xla_enable_async_all_reduce, and only v5e accepts it",
        ),
        Setting(
            "LIBTPU_INIT_ARGS",
            "--xla_enable_async_all_reduce=true",
            "needed by xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        ),
    ),
    "gpu": (
        Setting(
            "XLA_CLIENT_MEM_FRACTION",
            "0.9",
            "use a larger share of GPU memory than JAX's default of 0.75; 8 GB of an H100 remain for libraries",
        ),
    ),
}
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # Of glibc's malloc.h.
MALLOC = ("MALLOC_", "GLIBC_TUNABLES")
_READ = ("XLA_", "LIBTPU_", "JAX_", "TPU_", "CUDA_", "NCCL_", "SLURM_NTASKS", "SLURM_PROCID", *MALLOC)


def environment(kinds: Iterable[str], present: Mapping[str, str]) -> dict[str, str]:
    """Return {environment variable: new value} for the variables to set on these machines.

    `kinds` holds keys of SETTINGS; a kind without a key has no settings. `present` is the current
    environment. Settings that it already has are not changed.
    """
    added: dict[str, str] = {}
    for setting in missing(kinds, present):
        flags = setting.value.startswith("--")
        before = added.get(setting.variable, present.get(setting.variable, "")) if flags else ""
        added[setting.variable] = f"{before} {setting.value}".strip()
    return added


def missing(kinds: Iterable[str], present: Mapping[str, str]) -> list[Setting]:
    """Return the settings for these kinds of machines that are not in the environment `present`."""
    return [s for kind in kinds for s in SETTINGS.get(kind, ()) if not s.is_in(present)]


def apply() -> None:
    """Set the missing settings in this process's environment. Call this before JAX uses a device.

    On Linux without a JAX plugin for an accelerator, also make malloc keep freed memory, unless a
    variable such as MALLOC_ARENA_MAX is set.
    """
    kinds = local_kinds()
    os.environ.update(environment(kinds, os.environ))
    if not kinds and sys.platform == "linux" and not any(n.startswith(MALLOC) for n in os.environ):
        # XLA allocates the temporary memory of a program anew in every call. From 32 MiB on,
        # glibc gets it from the kernel, which fills each page with zeros: a tenth of the CPU time
        # of a train step. So make glibc keep up to 2 GiB of freed memory, by mallopt, because glibc
        # reads its environment variables only when a process starts.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Other C libraries lack it.
        if mallopt is not None:
            mallopt(_ARENA_MAX, 1)  # One arena: other arenas take large blocks from the kernel.
            mallopt(_MMAP_MAX, 0)
            mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def release_freed_memory() -> None:
    """Make glibc return freed memory, which it otherwise keeps, to the operating system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def local_kinds() -> list[str]:
    """Return the kinds of accelerators that have a JAX plugin and that JAX_PLATFORMS allows.

    For a TPU v5e, the list also has "v5e" if the environment reports this generation. The list may
    name a device that is absent. This does no harm, because only that device's compiler reads its
    settings.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "") or "tpu,cuda"
    has = lambda *names: any(importlib.util.find_spec(name) for name in names)
    kinds = ["tpu"] if "tpu" in platforms and has("libtpu") else []
    if kinds and os.environ.get("TPU_ACCELERATOR_TYPE", "").startswith("v5litepod"):
        kinds.append("v5e")
    gpus = "cuda" in platforms or "gpu" in platforms
    return kinds + ["gpu"] * (gpus and has("jax_cuda12_plugin", "jax_cuda13_plugin"))


def variables() -> dict[str, str]:
    """Return the environment variables that are set and may change how JAX runs, sorted by name.

    Their names start with a prefix that JAX, XLA, libtpu, CUDA, NCCL, Slurm or the C library uses.
    """
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_READ)}
