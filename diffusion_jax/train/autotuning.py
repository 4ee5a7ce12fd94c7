"""Keep XLA's choice of GPU kernels, so that a continued run computes with the same kernels.

For each operation of a GPU program, XLA times several kernels and takes the fastest (autotuning).
Another compilation may take other kernels, which round differently. So a run writes XLA's choices
into its workdir after it has compiled its training step for the first time, and every later start
loads them. Some kernels also add numbers in an order that varies between calls; by default, XLA
excludes these (the config's `deterministic`). XLA's page on determinism describes both:
https://openxla.org/xla/determinism. On CPUs and TPUs, nothing of this is needed or done.
"""

import hashlib
import json
import pathlib
import re
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from absl import logging
from jax.extend.mlir import ir

from diffusion_jax import files
from diffusion_jax.logs import run_log


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


def compile_step(lowered: jax.stages.Lowered, options: Mapping[str, str | bool]) -> jax.stages.Compiled:
    """Compile a lowered training step with these options of XLA.

    If nondeterministic kernels are excluded, all gradients of cuDNN's attention are marked as
    deterministic first. XLA itself marks only the first one of several equal calls, and then cannot
    run the others ("IndexError: raw_hash_map<>::at", in jaxlib 0.10.2 to 0.12).
    """
    if options.get("xla_gpu_exclude_nondeterministic_ops"):
        module: Any = lowered.compiler_ir()
        _mark_deterministic(module.operation)
    return lowered.compile(compiler_options=dict(options))


def _mark_deterministic(operation: Any) -> None:
    """Mark the gradients of cuDNN's attention in a StableHLO operation, in place."""
    attributes = operation.attributes
    is_call = operation.name == "stablehlo.custom_call"
    if is_call and attributes["call_target_name"].value == "__cudnn$fmhaSoftmaxBackward":
        config = json.loads(attributes["backend_config"].value)
        config["cudnn_fmha_backend_config"]["force_deterministic"] = True
        text = ir.StringAttr.get(json.dumps(config), context=operation.context)
        attributes["backend_config"] = text
    for region in operation.regions:
        for block in region:
            for inner in block:
                _mark_deterministic(inner.operation)


def find(workdir: pathlib.Path, deterministic: bool) -> Autotuning:
    """Return the options for a start of the run in `workdir`, with the choices of earlier starts.

    Choices for another kind of GPU, or by another version of jaxlib, are not loaded, because XLA
    would not use them; a warning says so.
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
            "%s was written by another jaxlib or for another kind of GPU: XLA chooses kernels "
            "anew, and results may differ in rounding from those so far",
            workdir / kept[0],
        )
    written = pathlib.Path(tempfile.mkdtemp(prefix="autotuning-")) / "chosen.txt"
    options["xla_gpu_dump_autotune_results_to"] = str(written)
    return Autotuning(options, "", written)


def keep(workdir: pathlib.Path, autotuning: Autotuning) -> None:
    """Write the choices of this start into the workdir. Call this after compiling the step."""
    written = autotuning.written
    if written is None:
        return
    if jax.process_index() == 0 and written.exists():
        content = written.read_bytes()
        name = f"{_prefix()}{hashlib.sha256(content).hexdigest()[:16]}.txt"
        files.write_whole(workdir / name, content)
    shutil.rmtree(written.parent)


def _prefix() -> str:
    kind = re.sub(r"\W+", "-", jax.local_devices()[0].device_kind)
    return f"autotuning_{run_log.version('jaxlib')}_{kind}_"


def _local(path: pathlib.Path) -> pathlib.Path:
    """Return an absolute path of the file for XLA, which cannot read buckets.

    A file from a bucket is copied beside the compiled programs. Its path is part of their keys in
    JAX's cache, and its name holds a hash, so programs with other kernels are not found.
    """
    if not files.store_path(path):
        return path.absolute()
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not folder or files.store_path(folder):
        folder = tempfile.mkdtemp(prefix="autotuning-")
    copy = pathlib.Path(folder) / path.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(copy, path.read_bytes())
    return copy
