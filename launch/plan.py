"""Plans a training run before anything is booked: memory, communication, time, disk.

    python -m launch.plan --config=configs/base64_2b.py --target=v5p:4x4x4
    python -m launch.plan --config=configs/base64_2b.py --target=h100:64 --fast

Targets: v4, v5e, v5p, v6e with a topology (v5e:4x8; v5p:4x4x4*2 are two slices), a100, a100-80gb,
h100, h200, b200 with a number. --config.X=Y changes the config, such as --config.mesh.replica=8.

--fast traces the program and models the rest, in less than a minute. Without it the train step is
also compiled: for TPUs by the TPU compiler itself, which needs no TPU (pip install libtpu), with
true memory and communication; for GPUs by the CPU's, with true communication. Programs of the big
models take many minutes on a few cores; they are kept, so the same plan is quick the next time.

Predicted are FLOPs of matrix products and convolutions, at the utilization of --mfu: measure it
with benchmarks.train_step on one device. Communication is at full bandwidth; samples/s are given
with all of it hidden behind arithmetic, and with none of it.
"""

import contextlib
import copy
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from absl import app, flags

from diffusion_jax import cli
from launch import accelerators
from launch.planner import compiling, estimate, systems

_CONFIG = cli.define_config()
_TARGET = flags.DEFINE_string("target", None, "What to book, such as v5p:4x4x4 or h100:64.")
_FAST = flags.DEFINE_boolean("fast", False, "Do not compile.")
_JSON = flags.DEFINE_boolean("json", False, "Print JSON in place of tables.")
_MFU = flags.DEFINE_float("mfu", 0.4, "Model FLOP utilization of one device.")
_PICTURES = flags.DEFINE_integer("pictures", 1_000_000, "Of the data set.", lower_bound=0)


def main(argv: list[str]) -> None:
    """Reads, traces, compiles unless --fast, prints."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
    with cli.bad_input():
        if not 0 < _MFU.value <= 1:
            raise ValueError(f"--mfu={_MFU.value}: it must be above 0 and at most 1, such as 0.4")
        target = accelerators.parse(str(_TARGET.value))
        compiling.prepare(target.devices)
        cli.start()
        config = _CONFIG.value.to_dict()
        model = systems.read(config)
        mesh = estimate.mesh_of(model, target.devices)
        estimate.local_batch(model, mesh)
    with _progress("tracing the loss and its gradient"):
        traced = estimate.trace(model)
    compiled, notes = None, list(model.notes)
    if not _FAST.value:
        with _progress(f"compiling the train step for {_TARGET.value} (big models: many minutes)"):
            compiled, more = compiling.analyse(model, target, mesh)
        notes += more
    figures = estimate.plan(
        traced, target, mfu=_MFU.value, pictures=_PICTURES.value, compiled=compiled
    )
    figures |= {"advice": _advice(config, figures, mesh), "notes": notes}
    print(json.dumps(figures) if _JSON.value else table(str(_TARGET.value), figures))


def table(target: str, f: dict[str, Any]) -> str:
    """The figures for people."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in f["mesh"].items())
    need = f["bytes_per_device"]
    size = lambda n: f"{n / 2**30:,.2f} GiB" if n >= 2**27 else f"{n / 2**20:,.2f} MiB"
    ms = lambda seconds: f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.3f} s"
    names = ("parameters", "optimizer", "ema", "frozen", "batch", "temporary")
    seconds, busy, rate = f["seconds"], f["seconds"]["busy"], f["samples_per_second"]
    sent = ", ".join(f"{kind} {size(n)}" for kind, n in f["bytes_sent"].items()) or "nothing"
    disk = f["disk"]
    rows = [
        ("target", f"{target}, {f['target']['devices']} devices; mesh {mesh}"),
        ("parameters", f"{f['parameters']:,}"),
        ("memory a device", ", ".join(f"{name} {size(need[name])}" for name in names)),
        ("", f"{size(need['total'])} of {size(need['limit'])} usable: "
             f"{'fits' if f['fits'] else 'DOES NOT FIT'} (temporary: {f['memory_source']})"),
        ("batch", f"{f['batch']:,}: {f['micro_batch']:,} a device, {f['accumulate']} times; the "
                  f"largest micro batch that fits: {f['largest_micro_batch']:,}, and the largest "
                  f"batch at once: {f['largest_batch']:,}"),
        ("arithmetic", f"{f['tflop_per_sample']:.4g} TFLOP a training sample"),
        ("sent a device, step", sent),
        ("a step", f"{ms(seconds['arithmetic'])} arithmetic at {100 * f['mfu']:.0f} % MFU, "
                   f"{ms(seconds['update'])} update, {ms(seconds['communication'])} communication "
                   f"(links {ms(busy['link'])}, network {ms(busy['network'])})"),
        ("samples/s", f"{rate['hidden']:,.0f} with communication hidden, "
                      f"{rate['exposed']:,.0f} with none hidden"),
        ("the recipe", f"{f['samples']:,} samples in {f['steps']:,} steps: {f['days']:,.1f} days, "
                       f"{f['device_hours']:,.0f} device-hours (none hidden)"),
        ("disk", f"{disk['checkpoints_kept']} checkpoints of {disk['checkpoint'] / 1e9:,.1f} GB: "
                 f"{disk['checkpoints'] / 1e9:,.0f} GB; {disk['pictures']:,} pictures: "
                 f"{disk['data'] / 1e9:,.1f} GB"),
        *(("advice", line) for line in f["advice"]),
        *(("note", line) for line in f["notes"]),
    ]  # fmt: skip
    return "\n".join(f"{name:20} {text}" for name, text in rows)


def _advice(config: dict[str, Any], figures: dict[str, Any], mesh: Any) -> list[str]:
    """Changes worth a try: rematerialization and micro batches, by the model of the memory."""
    remat, best = config["unet"]["remat"], figures["largest_micro_batch"]
    share = figures["micro_batch"] * figures["accumulate"]
    micro = f"--config.optimizer.micro_batch={best}" + (
        " --config.optimizer.accumulate=1" * (config["optimizer"]["accumulate"] > 1)
    )
    if figures["fits"]:
        advice = ["--config.unet.remat=False may fit too, and saves a fourth of the work"] * remat
        if best > figures["micro_batch"]:
            advice.append(f"{micro}: {share // best} passes of a step would do")
        return advice
    advice = []
    if not remat:
        changed = copy.deepcopy(config)
        changed["unet"]["remat"] = True
        with _progress("tracing it with rematerialization"):
            traced = estimate.trace(systems.read(changed))
        limit = figures["bytes_per_device"]["limit"]
        batch = estimate.largest_batch(traced, mesh, limit)
        advice.append(
            f"--config.unet.remat=True: batches up to {batch:,} fit, for a third more arithmetic"
        )
    if best:
        advice.append(f"{micro}: {share // best} passes of {best:,} samples a device")
    elif mesh.shape["replica"] > 1:
        advice.append(
            "--config.mesh.replica=1 --config.mesh.fsdp=-1: the state itself is too large"
        )
    return advice


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """Says on stderr what is going on, and for how long it has."""
    start, done = time.time(), threading.Event()

    def report():
        while not done.wait(15):
            print(f"  {what}: {time.time() - start:.0f} s", file=sys.stderr, flush=True)

    print(what, file=sys.stderr, flush=True)
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
