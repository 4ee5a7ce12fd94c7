"""Run the commands in separate processes that start in milliseconds.

They are forked from a server that has imported slow packages, but no command. So flags,
signals and exit codes are the same as with `python -m imagen_jax.NAME`.
"""

import json
import multiprocessing
import os
import pathlib
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image

ROOT = pathlib.Path(__file__).parents[2]
SLOW_IMPORTS = [
    "imagen_jax.cascade",
    "sd_jax.drawing",
    "diffusion_jax.evaluate.sweep",
    "diffusion_jax.train.train_command",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "clu.metric_writers",
    "ml_collections.config_flags",
    "sklearn.datasets",
    "orbax.checkpoint",
]
# Programs without optimization compile in half the time. XLA's older code
# generator, which jaxlib 0.11 lacks, halves it again. Parallel compilation would cost a seventh
# more, and other workers use the other cores.
FASTER = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    **({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}),
}
XLA_FLAGS = " ".join(f"--{name}={value}" for name, value in FASTER.items())

HANDLERS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
"""Python's handlers in the foreground. In the background or under nohup, some are SIG_IGN."""

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(SLOW_IMPORTS)


class Ended(NamedTuple):
    """The result of a command."""

    code: int | None
    out: str
    err: str


def config_flags(fields: str) -> tuple[str, ...]:
    """Return the flags that set fields of the config, such as "steps=4 unet.embed_dim=32"."""
    return tuple(f"--config.{field}" for field in fields.split())


def run(name: str, *arguments: str, devices: int = 8, before: Callable[[], None] | None = None) -> Ended:
    """Run `python -m imagen_jax.NAME ARGUMENTS`, or `python -m NAME` if NAME contains a dot."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = pathlib.Path(folder, "out"), pathlib.Path(folder, "err")
        process = start(name, *arguments, devices=devices, outputs=outputs, before=before)
        process.join()
        return Ended(process.exitcode, *(path.read_text() for path in outputs))


def succeed(name: str, *arguments: Any, devices: int = 1, before: Callable[[], None] | None = None) -> Ended:
    """Run a command, which must end with exit code 0."""
    ended = run(name, *map(str, arguments), devices=devices, before=before)
    assert ended.code == 0, ended.err
    return ended


def draw(name: str, out: pathlib.Path, *arguments: Any, devices: int = 1) -> tuple[list[Any], np.ndarray, str]:
    """Draw pictures of one size with a sampling command.

    Return the lines of its metadata, the pictures as whole numbers, and its messages.
    """
    err = succeed(name, f"--out={out}", *arguments, devices=devices).err
    return *drawn(out), err


def drawn(out: pathlib.Path) -> tuple[list[Any], np.ndarray]:
    """Return the metadata and the pictures that a sampling command wrote to a folder."""
    lines = [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]
    return lines, np.stack([picture(out / line["file_name"]) for line in lines])


def picture(path: pathlib.Path) -> np.ndarray:
    """Return the pixels of a picture as whole numbers of more than 8 bits."""
    return np.asarray(Image.open(path)).astype(int)


def start(
    name: str,
    *arguments: str,
    devices: int,
    outputs: tuple[pathlib.Path, pathlib.Path],
    before: Callable[[], None] | None = None,
) -> BaseProcess:
    """Start a command, whose stdout and stderr are written to `outputs`.

    Its process calls `before` first, such as a partial of record_samples.
    """
    process = _server.Process(target=_command, args=(name, arguments, devices, outputs, before))
    process.start()
    return process


def fork(function: Callable[..., None], *arguments: Any, devices: int = 1) -> BaseProcess:
    """Start a process that calls a function of a module, with this number of CPU devices."""
    process = _server.Process(target=_call, args=(function, arguments, devices))
    process.start()
    return process


def skip_rehearsal() -> None:
    """Spare this process the rehearsal of its training, which traces every program once more."""
    from diffusion_jax.train import train_command

    train_command.rehearse = lambda *_: ""


def check_little() -> None:
    """Make diffusion_jax.doctor check two operations, once each: test_checks.py checks all."""
    from diffusion_jax.devices import checks

    every = checks.checks
    checks.checks = lambda platform: every(platform)[-2:]
    checks.seconds = call_once


def call_once(run: Callable[[], Any], long: float) -> float:
    """Stand in for checks.seconds, which repeats a call for `long` seconds."""
    jax.block_until_ready(run())
    return 1e-3


def record_samples(folder: pathlib.Path) -> None:
    """Let this process record the digits of each batch that it takes.

    Each batch adds a line [samples taken, [indices in this batch]] to a file of this process.
    """
    from diffusion_jax.data import pipeline
    from diffusion_jax.examples.digits import rendering as digits

    read, take, of = digits.Digits.read, pipeline.Batches.__next__, {}
    path = folder / f"{len(list(folder.glob('*.jsonl')))}.jsonl"
    path.touch()

    def noting(self, indices, places=None):
        images, texts = read(self, indices, places)
        of[images.tobytes()] = indices.tolist()
        return images, texts

    def taking(self):
        batch = take(self)
        taken = json.loads(self.get_state())["samples"]
        with path.open("a") as file:
            file.write(json.dumps([taken, of.pop(batch["image"].tobytes())]) + "\n")
        return batch

    digits.Digits.read, pipeline.Batches.__next__ = noting, taking


def _call(function, arguments, devices):
    _configure(devices)
    function(*arguments)


def _command(name, arguments, devices, outputs, before):
    if before:
        before()
    for path, number in zip(outputs, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(ROOT)
    _configure(devices)
    sys.argv = [name, *arguments]
    module = name if "." in name else f"imagen_jax.{name}"
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _configure(devices):
    from diffusion_jax.devices import xla_flags

    os.environ["XLA_FLAGS"] = f"{XLA_FLAGS} --xla_force_host_platform_device_count={devices}"
    xla_flags.KNOWN += tuple(FASTER)  # Listing them as known avoids a trial, which takes a second.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
