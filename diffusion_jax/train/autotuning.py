"""Keep XLA's choice of GPU kernels, so that a continued run computes with the same kernels.

For each operation of a GPU program, XLA times several kernels and takes the fastest (autotuning).
Another compilation may take other kernels, which round differently. So a run writes XLA's choices
into its workdir after it has compiled its training step for the first time, and every later start
loads them. Some kernels also add numbers in an order that varies between calls; by default, XLA
excludes these (the config's `deterministic`). XLA's page on determinism describes both:
https://openxla.org/xla/determinism. On CPUs and TPUs, nothing of this is needed or done.
"""

import hashlib
import pathlib
import tempfile
from typing import NamedTuple

import jax
from absl import logging

from diffusion_jax.machine import files, log


class Autotuning(NamedTuple):
    """XLA's options for compiling the training step, and where its choices come from."""

    options: dict[str, str | bool]
    """Compiler options for jax.stages.Lowered.compile; {} except on GPUs."""
    loaded: str = ""
    """Name of the file in the workdir whose choices are loaded; "" if XLA chooses anew."""
    written: pathlib.Path | None = None
    """The local file to which XLA writes its choices; None if none are written."""


def deterministic_options(deterministic: bool) -> dict[str, str | bool]:
    """Return XLA's options for a training step whose results may not vary between calls."""
    if jax.default_backend() != "gpu":
        return {}
    return {"xla_gpu_exclude_nondeterministic_ops": deterministic}


def find(workdir: pathlib.Path, deterministic: bool) -> Autotuning:
    """Return the options for a start of the run in `workdir`, with the choices of earlier starts.

    Choices that another version of jaxlib wrote are not loaded, because XLA would refuse them; a
    warning says so.
    """
    options = deterministic_options(deterministic)
    if jax.default_backend() != "gpu":
        return Autotuning(options)
    kept = sorted(path.name for path in workdir.glob("autotuning_*.txt"))
    mine = [name for name in kept if name.startswith(_prefix())]
    if mine:
        options["xla_gpu_load_autotune_results_from"] = str(_local(workdir / mine[0]))
        return Autotuning(options, mine[0])
    if kept:
        logging.warning(
            "%s was written by another jaxlib: XLA chooses kernels anew, and results may differ "
            "from those of the earlier version in rounding", workdir / kept[0],
        )  # fmt: skip
    written = pathlib.Path(tempfile.mkdtemp(prefix="autotuning-")) / "chosen.txt"
    options["xla_gpu_dump_autotune_results_to"] = str(written)
    return Autotuning(options, "", written)


def keep(workdir: pathlib.Path, autotuning: Autotuning) -> None:
    """Write the choices of this start into the workdir. Call this after compiling the step."""
    if autotuning.written is None or jax.process_index() or not autotuning.written.exists():
        return
    content = autotuning.written.read_bytes()
    name = f"{_prefix()}{hashlib.sha256(content).hexdigest()[:16]}.txt"
    files.write_whole(workdir / name, content)


def _prefix() -> str:
    return f"autotuning_{log.version('jaxlib')}_"


def _local(path: pathlib.Path) -> pathlib.Path:
    """Return an absolute path of the file for XLA, which cannot read buckets.

    A file from a bucket is copied beside the compiled programs. Its path is part of their keys in
    JAX's cache, and its name holds a hash, so programs with other kernels are not found.
    """
    if not files.remote(path):
        return path.absolute()
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not folder or files.remote(folder):
        folder = tempfile.mkdtemp(prefix="autotuning-")
    copy = pathlib.Path(folder) / path.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(copy, path.read_bytes())
    return copy
