"""Predict the memory, communication, time and disk space of a training run before it starts.

    python -m launch.plan --config=configs/base64_2b.py --target=v5p:4x4x4
    python -m launch.plan --config=configs/base64_2b.py --target=h100:64 --fast

Targets are v4, v5e, v5p, v6e and v7x with a topology (v5e:4x8, or v5p:4x4x4*2 for two slices), and
a100, a100-80gb, h100, h200, b200, gb200 and mi300x with a number of GPUs. --config.X=Y changes the
config, for example --config.mesh.replica=8.

With --fast, the command only traces the program and estimates everything from the trace, in less
than a minute. Without --fast, it also compiles the train step:
- for TPUs with the TPU compiler, which needs no TPU (pip install libtpu) and gives exact memory and
  communication;
- for NVIDIA GPUs with XLA, which needs neither GPU nor driver (pip install -e ".[plan-gpu]");
- for other targets with XLA's CPU backend, which gives only the communication.
Compiling a big model takes many minutes on a few cores. Compiled programs are cached, so the same
plan is fast the next time.

The predicted time of arithmetic is the FLOPs of matrix products and convolutions divided by --mfu
times the peak rate. benchmarks.train_step measures this utilization on one device. Communication is
assumed to run at full bandwidth. The command prints samples/s for two cases: as much communication
as possible overlaps with arithmetic, and none does.
"""

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from diffusion_jax import cli
from diffusion_jax.logs.progress import counted
from diffusion_jax.train import optimizer
from diffusion_jax.train.memory import Traced
from launch import accelerators
from launch.accelerators import Target
from launch.planner import choice, compiling, estimate, gpu, tasks

_CONFIG = cli.define_config()
_TARGET = flags.DEFINE_string("target", None, "Accelerators, such as v5p:4x4x4 or h100:64.")
_FAST = flags.DEFINE_boolean("fast", False, "Only trace the program; do not compile it.")
_JSON = flags.DEFINE_boolean("json", False, "Print JSON instead of tables.")
_MIN_MICRO_BATCH = 8  # With fewer samples, a TPU's convolutions cost more: docs/lab/performance.md.
_MIN_GPU_BATCH = 16
_MFU = flags.DEFINE_float("mfu", 0.4, "Assumed model FLOP utilization of one device.")
_PICTURES = flags.DEFINE_integer(
    "pictures", 1_000_000, "Number of pictures in the data set, to estimate its disk space.", lower_bound=0
)


def main() -> None:
    """Trace the config's training step, compile it unless --fast is set, and print the plan."""
    with cli.bad_input():
        if not 0 < _MFU.value <= 1:
            raise ValueError(f"--mfu={_MFU.value}: it must be above 0 and at most 1, such as 0.4")
        target = accelerators.parse(str(_TARGET.value))
        compiling.prepare(target.devices, *(("tpu", target.name) if target.is_tpu else ("gpu",)))
        cli.start()
        config = _CONFIG.value.to_dict()
        lacks_kernel = _lacks_kernel(config, target)
        modelled = model = tasks.read(_modelled(config))
        if not lacks_kernel and _modelled(config) is not config:
            model = tasks.read(config)
        mesh = accelerators.mesh_over(model.mesh, target.devices)
        optimizer.num_passes(model.optimizer, model.run.batch_size, mesh)
    with _progress("tracing the loss and its gradient"):
        traced = estimate.trace(modelled)
    compiled, notes = None, list(model.notes)
    if lacks_kernel:
        notes.append(
            "this machine cannot compile the attention kernel, so the plan uses blockwise "
            "attention, which needs about the same memory"
        )
    if not _FAST.value:
        with _progress(f"compiling the train step for {_TARGET.value} (big models: many minutes)"):
            compiled, compiler_notes = compiling.analyse(model, target, mesh)
        notes += compiler_notes
    figures = estimate.plan(modelled, traced, target, mfu=_MFU.value, pictures=_PICTURES.value, compiled=compiled)
    if target.is_tpu and figures["micro_batch"] < _MIN_MICRO_BATCH:
        notes.append(
            f"the micro batch has fewer than {_MIN_MICRO_BATCH} samples: the TPU compiler then "
            "splits convolutions of large pictures, which takes two to three times the cycles per "
            "sample (docs/lab/performance.md)"
        )
    if not target.is_tpu and figures["micro_batch"] < _MIN_GPU_BATCH:
        notes.append(
            f"each GPU has {figures['micro_batch']} samples per pass, so expect less than "
            f"{100 * figures['mfu']:.0f} % MFU: MLPerf's H100s with 16, 4 and 2 samples each kept "
            "87, 58 and 38 % of their speed with 64 (docs/lab/scaling.md)"
        )
    with_remat = functools.cache(lambda: estimate.trace(tasks.read(_with_remat(_modelled(config)))))
    rate = figures["mfu"]
    advice = [
        *_advice(config, figures, mesh, with_remat),
        choice.advise(modelled, traced, with_remat, target, rate, figures),
    ]
    figures |= {"advice": advice, "notes": notes}
    if _JSON.value:
        print(json.dumps(figures))
        return
    print(table(str(_TARGET.value), figures))


def table(target: str, f: dict[str, Any]) -> str:
    """Format the numbers of a plan, which `estimate.plan` returns, as a table for `target`."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in f["mesh"].items())
    need = f["bytes_per_device"]
    size = lambda n: f"{n / 2**30:,.2f} GiB" if n >= 2**27 else f"{n / 2**20:,.2f} MiB"
    ms = lambda seconds: f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.3f} s"
    names = ("parameters", "optimizer", "ema", "frozen", "batch", "temporary")
    seconds, busy, rate = f["seconds"], f["seconds"]["busy"], f["samples_per_second"]
    sent = ", ".join(f"{kind} {size(n)}" for kind, n in f["bytes_sent"].items()) or "nothing"
    disk, source = f["disk"], f["memory_source"]
    if source == "compiled":
        source += f"; the model predicts {size(f['temporary_modelled'])}"
    rows = [
        ("target", f"{target}, {counted(f['target']['devices'], 'device')}; mesh {mesh}"),
        ("parameters", f"{f['parameters']:,}"),
        ("memory per device", ", ".join(f"{name} {size(need[name])}" for name in names)),
        (
            "",
            f"{size(need['total'])} of {size(need['limit'])} usable: "
            f"{'fits' if f['fits'] else 'DOES NOT FIT'} (temporary: {source})",
        ),
        (
            "batch",
            f"{f['batch']:,} samples per step; each device processes them in "
            f"{f['accumulate']} pass{'es' * (f['accumulate'] > 1)} of {f['micro_batch']:,}; "
            f"the largest micro batch that fits is {f['largest_micro_batch']:,} (a divisor "
            f"of its samples), the largest batch in one pass {f['largest_batch']:,}",
        ),
        ("arithmetic", f"{f['tflop_per_sample']:.4g} TFLOP per training sample"),
        ("sent per device", f"{sent} per step"),
        (
            "step",
            f"{ms(seconds['arithmetic'])} arithmetic at {100 * f['mfu']:.0f} % MFU, "
            f"{ms(seconds['update'])} update, {ms(seconds['communication'])} communication "
            f"(direct links {ms(busy['link'])}, network between hosts or "
            f"slices {ms(busy['network'])})",
        ),
        ("samples/s", f"{rate['hidden']:,.0f} with communication hidden, {rate['exposed']:,.0f} with none hidden"),
        (
            "whole run",
            f"{f['samples']:,} samples in {f['steps']:,} steps: {f['days']:,.1f} days, "
            f"{f['device_hours']:,.0f} device-hours (no communication hidden)",
        ),
        (
            "disk",
            f"{disk['checkpoints_kept']} checkpoints of {disk['checkpoint'] / 1e9:,.1f} GB: "
            f"{disk['checkpoints'] / 1e9:,.0f} GB; "
            + (
                f"{disk['snapshots_kept']} snapshots of {disk['snapshot'] / 1e9:,.2f} GB; "
                if disk["snapshots_kept"]
                else ""
            )
            + f"{disk['pictures']:,} pictures: "
            f"{disk['data'] / 1e9:,.1f} GB",
        ),
        *(("advice", line) for line in f["advice"]),
        *(("note", line) for line in f["notes"]),
    ]
    return "\n".join(f"{name:20} {text}" for name, text in rows)


def _modelled(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with blockwise attention in place of a cuDNN or splash kernel.

    Every machine can trace blockwise attention. It needs about as much memory as the kernels,
    because all of them avoid storing the attention scores.
    """
    unet = config.get("unet", {})  # `tasks.read` refuses a config without a UNet.
    if unet.get("attention_impl") not in ("cudnn", "splash"):
        return config
    return {**config, "unet": {**unet, "attention_impl": "blockwise"}}


def _lacks_kernel(config: dict[str, Any], target: Target) -> bool:
    """Return whether this machine cannot compile the config's attention kernel."""
    if _modelled(config) is config:
        return False
    has_compiler = compiling.missing_for(target) is None
    cudnn = config["unet"]["attention_impl"] == "cudnn"
    return not has_compiler or (cudnn and not gpu.has_cudnn())


def _with_remat(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "unet": {**config["unet"], "remat": True}}


def _advice(config: dict[str, Any], figures: dict[str, Any], mesh: Any, with_remat: Callable[[], Traced]) -> list[str]:
    """Return advice that follows from the estimated memory, one line per item.

    A line names flags for rematerialization, the micro batch or the mesh, and their effect.
    `with_remat` traces the model with rematerialization.
    """
    remat, best = config["unet"]["remat"], figures["largest_micro_batch"]
    share = figures["micro_batch"] * figures["accumulate"]
    micro = f"--config.optimizer.micro_batch={best}"
    if figures["fits"]:
        advice = ["--config.unet.remat=False: saves a fourth of the work, if it fits"] * remat
        if best > figures["micro_batch"]:
            advice.append(f"{micro}: {share // best} passes per step are enough")
        return advice
    advice = []
    if not remat:
        with _progress("tracing the step with rematerialization"):
            traced = with_remat()
        limit = figures["bytes_per_device"]["limit"]
        batch = estimate.largest_batch(traced, mesh, limit)
        if batch:
            advice.append(
                f"--config.unet.remat=True: global batches of up to {batch:,} samples fit, but a "
                "step takes a third more arithmetic"
            )
    if best:
        advice.append(f"{micro}: {share // best} passes of {best:,} samples per device")
    elif mesh.shape["replica"] > 1:
        advice.append(
            "--config.mesh.replica=1 --config.mesh.fsdp=-1: shard the state over all devices; "
            "with this mesh, not even one sample fits"
        )
    return advice


@contextlib.contextmanager
def _progress(activity: str) -> Iterator[None]:
    """Report an activity on stderr: when it starts, every 15 s, and how long it took."""
    start, done = time.time(), threading.Event()

    def report():
        while not done.wait(15):
            print(f"  {activity}: {time.time() - start:.0f} s", file=sys.stderr, flush=True)

    print(activity, file=sys.stderr, flush=True)
    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        print(f"  took {time.time() - start:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags.mark_flags_as_required(["config", "target"])
    cli.run(main)
