"""Print the TPU compiler's estimates for the train steps of the models, without a TPU.

    python -m benchmarks.compiled --targets=v5e:4x4 --models=base64_500m,sd2_512_base
    python -m benchmarks.compiled --check

The first command prints the table of docs/lab/performance.md: the estimated cycles of a step by
kind of work, and the model FLOP utilization (MFU) that follows. By default, the command compiles
each distinct block of a model once and counts it once per call (benchmarks/profile/blocks.py).
--whole compiles whole programs, which takes most of an hour for a big model. The command needs
Linux and libtpu (pip install libtpu). Nothing runs on a TPU.

Compiled programs are cached, so an interrupted command continues where it stopped. --keep writes
the estimates and the compilers' versions to benchmarks/compiled.json.

--check compiles a few small blocks. It exits with code 1 if a block needs over 5 % more cycles or
temporary memory than benchmarks/compiled.json states. These numbers do not vary between runs, but
they depend on the compilers' versions. With other versions than those in the file, nothing is
compared.
"""

import importlib
import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from absl import flags

from benchmarks import measure
from benchmarks.profile import blocks, step
from benchmarks.profile.blocks import Profile
from diffusion_jax import cli, files
from diffusion_jax.logs import run_log
from diffusion_jax.train import memory
from imagen_jax import attention, layers
from launch import accelerators
from launch.planner import compiling, tasks
from sd_jax import unet

flags.adopt_module_key_flags(measure)
# Samples per device. The planner estimates that they fit if 16 devices share the state.
BATCHES = {"base64_500m": 16, "base64_2b": 8, "sr256_400m": 8, "sr256_600m": 8, "sr1024_600m": 8, "sd2_512_base": 8}
RESULTS = pathlib.Path(__file__).with_name("compiled.json")
GROWTH = 1.05
"""Largest ratio of new to saved estimates that --check accepts."""
_TARGETS = flags.DEFINE_list("targets", ["v5e:4x4"], "TPU slices to compile for.")
_MODELS = flags.DEFINE_list("models", [*BATCHES], "Names of the models' configs.")
_BATCH = flags.DEFINE_integer("batch", 0, "Samples per device; 0 for the model's number in BATCHES.")
_WHOLE = flags.DEFINE_boolean("whole", False, "Compile whole programs instead of blocks.")
_KEEP = flags.DEFINE_boolean("keep", False, "Write the estimates to benchmarks/compiled.json.")
_CHECK = flags.DEFINE_boolean("check", False, "Compare small blocks with benchmarks/compiled.json.")


class Part(NamedTuple):
    """Small block for --check: a module and its input shapes."""

    module: nn.Module
    inputs: tuple[jax.ShapeDtypeStruct, ...]


def reduced() -> dict[str, Part]:
    """Return the small blocks for --check, which together compile within two minutes."""
    dtype = jnp.bfloat16
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    image, text, emb = array(2, 16, 16, 128), array(2, 128, 64), array(2, 128)
    mask = jax.ShapeDtypeStruct((2, 128), jnp.bool_)
    return {
        "residual": Part(layers.ResBlock(128, dtype=dtype), (image, emb)),
        "upsampling": Part(layers.ConvTranspose(dtype), (image,)),
        "fused attention": Part(attention.FusedAttention(64, "splash", dtype), (image, text, mask)),
        "transformer": Part(unet.Transformer(1, 2, 64, "splash", dtype), (image, text)),
    }


def main() -> None:
    """Print the table of estimates or, with --check, compare small blocks with compiled.json."""
    if run_log.version("libtpu") is None:
        print("libtpu is not installed (pip install libtpu): nothing can be compiled for a TPU")
        return
    results = {"reduced": {}, "rows": {}}
    if RESULTS.exists():
        results = json.loads(RESULTS.read_text())
    targets = [accelerators.parse(name) for name in _TARGETS.value]
    with cli.bad_input():
        settings = settings_of(targets, bool(_WHOLE.value))
    compiling.prepare(max(target.devices for target in targets), *settings)
    cli.start()
    if _CHECK.value:
        sys.exit(_check(results["reduced"]))
    if _KEEP.value:
        results["reduced"] = {"versions": _versions(), "blocks": _reduced()}
        _write(results)
    measure.say("| model | target, samples per chip | code | compiled | MFU | cycles by kind |")
    measure.say("|---|---|---|---|---|---|")
    for name, target in ((name, target) for target in targets for name in _MODELS.value):
        with cli.bad_input():
            step.check(target.name)
            batch = int(_BATCH.value) or BATCHES[name]
            model = read(name, batch * target.devices)
            profile = step.of(model, target, bool(_WHOLE.value))
        place = f"{target.name}:{target.topology}"
        measure.say(row(name, place, batch, profile))
        if _KEEP.value:
            key = f"{name} {place} {batch} {'whole' if _WHOLE.value else 'blocks'}"
            results["rows"][key] = {
                **_versions(),
                "commit": _commit(),
                "flags": os.environ.get("LIBTPU_INIT_ARGS", ""),
                **profile.summary(),
                "flops": profile.flops,
            }
            _write(results)


def settings_of(targets: Sequence[accelerators.Target], whole: bool) -> list[str]:
    """Return the names of the compiler settings to use (see diffusion_jax/devices/tuning.py).

    Whole programs are compiled with the settings of training runs. Blocks need no settings, because
    the settings concern collectives, and blocks are compiled for a single chip. Raises ValueError
    for whole programs on several kinds of accelerators, because libtpu reads its flags only once.
    """
    kinds = sorted({target.name for target in targets})
    if whole and len(kinds) > 1:
        raise ValueError(
            f"--whole compiles for one kind of accelerator, not for {' and '.join(kinds)}: run "
            "the command once for each"
        )
    return ["tpu", *kinds] if whole else []


def read(name: str, batch: int) -> tasks.PlannedTask:
    """Return the model of the config `name` from configs/, with this global batch size.

    A Stable Diffusion model reads stored moments and text embeddings, so that only the UNet is
    compiled.
    """
    config = importlib.import_module(f"configs.{name}").get_config()
    config.batch_size = batch
    if name.startswith("sd"):
        config.data.update(source="moments", path="moments")
        config.text.store = "none"
    return tasks.read(config.to_dict())


def row(name: str, place: str, batch: int, profile: Profile) -> str:
    """Format a profile as one row of the Markdown table of estimates.

    `name` is the model's config, `place` the TPU slice, and `batch` the samples per device.
    """
    shares = (f"{kind} {100 * n / profile.total:.0f} %" for kind, n in profile.cycles.items())
    scope = "whole" if _WHOLE.value else "blocks"
    return (
        f"| {name} | {place}, {batch} | {_commit()} | {scope}, {profile.seconds:,.0f} s | "
        f"{100 * profile.mfu:.0f} % | {profile.total / 1e6:,.0f} M: {', '.join(shares)} |"
    )


def _reduced() -> dict[str, dict[str, float]]:
    """Compile the blocks for --check; return the cycles and temporary bytes of each."""
    figures = {}
    for name, (module, inputs) in reduced().items():
        variables = jax.eval_shape(module.init, memory.abstract_key(), *inputs)
        block = blocks.NetworkBlock(name, [name], module, variables, (inputs, {}), True)
        compiled = blocks.measure(block, "v5e")
        figures[name] = {"cycles": compiled.total, "temporary": compiled.temporary}
    return figures


def _check(saved: Mapping[str, Any]) -> int:
    """Compare the blocks for --check with saved numbers, and print both.

    Returns the exit code: 1 if a number is more than 5 % above the saved one, otherwise 0.
    """
    if saved["versions"] != _versions():
        print(f"nothing compared: saved with {saved['versions']}, but installed are {_versions()}")
        return 0
    grown = 0
    for name, figures in _reduced().items():
        for figure, value in figures.items():
            before = saved["blocks"][name][figure]
            grew = value > GROWTH * before
            print(f"{name}: {figure} {value:,.0f}, saved {before:,.0f}" + ": GREW" * grew)
            grown += grew
    return int(grown > 0)


def _versions() -> dict[str, str | None]:
    return {name: run_log.version(name) for name in ("jax", "libtpu")}


def _commit() -> str:
    found = run_log.git_commit(pathlib.Path(__file__))
    return found["commit"][:8] if found else ""


def _write(results: Mapping[str, Any]) -> None:
    files.write_whole(RESULTS, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    cli.run(main)
