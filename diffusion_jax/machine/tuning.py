"""Settings of compilers and runtimes by kind of machine: they hold where the user set none.

Every command applies those of the plugin that is installed, every launcher writes those of the
accelerators that it books. A setting stands here only if the compilers show what it does; what was
tried and left out is in docs/performance.md. The first source are Google's own recipes for Stable
Diffusion on TPUs (AI-Hypercomputer/tpu-recipes, 2026) and NVIDIA's for JAX (JAX-Toolbox, 2026).
"""

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Setting(NamedTuple):
    """A variable of the environment, or a flag --NAME=VALUE among those that it holds."""

    variable: str
    value: str
    reason: str

    def is_in(self, variables: Mapping[str, str]) -> bool:
        """Whether the variable, or in it a flag of this name, is set, to whatever value."""
        old = self.variable.replace("XLA_CLIENT", "XLA_PYTHON_CLIENT")  # JAX refuses both.
        now = variables.get(self.variable, variables.get(old))
        flag = re.match(r"--\w+", self.value)
        return now is not None and (not flag or re.search(rf"{flag[0]}\b", now) is not None)


# "Measured" is what libtpu 0.0.52 compiles of six group norms, SiLUs and 3x3 convolutions of 512
# channels at 16x16, forwards, backwards and AdamW, on eight chips with eight samples each.
SETTINGS: Mapping[str, tuple[Setting, ...]] = {
    "tpu": (
        Setting(
            "LIBTPU_INIT_ARGS",
            "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
            "fsdp gathers weights whole; without it each convolution is cut in two over slices of "
            "its channels, with permutes between: 36 and 84 in place of 18 and none, and 22 % "
            "(v4) to 46 % (v6e) fewer estimated cycles beside the collectives",
        ),
        Setting(
            "LIBTPU_INIT_ARGS",
            "--xla_tpu_spmd_threshold_for_allgather_cse=1000000",
            "weights gathered for the forward pass serve the backward one: on v5e 16 gathers in "
            "place of 36",
        ),
    ),
    "v5e": (
        Setting(
            "LIBTPU_INIT_ARGS",
            "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true",
            "sums of gradients run beside the arithmetic: 12 % fewer estimated cycles; with the "
            "next, and on v5e alone, since the compiler refuses them elsewhere",
        ),
        Setting("LIBTPU_INIT_ARGS", "--xla_enable_async_all_reduce=true", "as the one before"),
    ),
    "gpu": (
        Setting(
            "XLA_CLIENT_MEM_FRACTION",
            "0.9",
            "JAX takes three quarters of the memory by default; an H100 keeps 8 GB for libraries",
        ),
    ),
}
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # Of glibc's malloc.h.
MALLOC = ("MALLOC_", "GLIBC_TUNABLES")
_READ = (
    "XLA_", "LIBTPU_", "JAX_", "TPU_", "CUDA_", "NCCL_", "SLURM_NTASKS", "SLURM_PROCID", *MALLOC,
)  # fmt: skip


def environment(kinds: Iterable[str], present: Mapping[str, str]) -> dict[str, str]:
    """The variables that the settings of these kinds add to, whole; what is `present` stays.

    A kind without settings adds none.
    """
    added: dict[str, str] = {}
    for setting in missing(kinds, present):
        flags = setting.value.startswith("--")
        before = added.get(setting.variable, present.get(setting.variable, "")) if flags else ""
        added[setting.variable] = f"{before} {setting.value}".strip()
    return added


def missing(kinds: Iterable[str], present: Mapping[str, str]) -> list[Setting]:
    """The settings of these kinds that `present` says nothing of."""
    return [s for kind in kinds for s in SETTINGS.get(kind, ()) if not s.is_in(present)]


def apply() -> None:
    """Sets what is missing in this process; call it before JAX meets a device."""
    kinds = here()
    os.environ.update(environment(kinds, os.environ))
    if not kinds and sys.platform == "linux" and not any(n.startswith(MALLOC) for n in os.environ):
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Has glibc keep up to 2 GiB of what is freed, as no variable can once a process has begun.

    XLA on CPUs asks for a program's temporary memory anew in every call. From 32 MiB on glibc takes
    that from the kernel, which fills each page with zeros: a tenth of a train step's CPU time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Other C libraries have none.
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)  # Other arenas than the first take what is large from the kernel.
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def here() -> list[str]:
    """The kinds that JAX's plugins are installed for, of those that JAX_PLATFORMS leaves.

    Of TPUs also which, where the machine says.

    A setting is read by its own compiler alone, so that one for an absent device does nothing.
    """
    asked = os.environ.get("JAX_PLATFORMS", "") or "tpu,cuda"
    has = lambda *names: any(importlib.util.find_spec(name) for name in names)
    kinds = ["tpu"] if "tpu" in asked and has("libtpu") else []
    if kinds and os.environ.get("TPU_ACCELERATOR_TYPE", "").startswith("v5litepod"):
        kinds.append("v5e")
    gpus = "cuda" in asked or "gpu" in asked
    return kinds + ["gpu"] * (gpus and has("jax_cuda12_plugin", "jax_cuda13_plugin"))


def variables() -> dict[str, str]:
    """What this process's JAX, compilers and libraries read of the environment."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_READ)}
