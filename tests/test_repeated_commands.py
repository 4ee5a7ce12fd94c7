"""A command that writes a folder can be repeated after a full disk or a kill at any moment."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from configs import quickstart
from diffusion_jax import averages, pack, runs
from diffusion_jax.data.prepare import reshard
from diffusion_jax.data.sources.webdataset import open_tars
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.train.checkpoint import NotSaved
from diffusion_jax.weights import restore
from imagen_jax.weights import convert
from tests.campaign import subjects
from tests.imagen_jax import commands

MOMENTS, KILLED = 10, 9
WRITES = os.O_WRONLY | os.O_RDWR
CHANGES = ("os.rename", "os.link", "os.mkdir")


class Fault:
    """Calls `happen` at the change with a given number, counted over all files in a folder."""

    armed: "Fault | None" = None

    def __init__(self, folder, number, happen):
        self.folder, self.left, self.happen = str(folder), number, happen
        self.changes = 0

    def __enter__(self):
        Fault.armed = self
        return self

    def __exit__(self, *error):
        Fault.armed = None

    def notice(self, event, arguments):
        path = arguments[0] if arguments else None
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        if not (is_write or event in CHANGES) or not isinstance(path, str | os.PathLike):
            return
        if os.fspath(path).startswith(self.folder):
            self.changes += 1
            if self.changes == self.left:
                self.happen()


def _hook(event, arguments):
    if Fault.armed:
        Fault.armed.notice(event, arguments)


sys.addaudithook(_hook)  # It cannot be removed, and does nothing unless a Fault is armed.


def full():
    """Raise the error of a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Command(NamedTuple):
    """A command that writes a folder."""

    run: Callable[[Any, Any], Any]
    """Called with the folder of inputs and the path of the output."""
    result: Callable[[Any], dict[str, Any]]
    """Returns all relevant content of the output."""


def contents(out):
    """Return the bytes of all files."""
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def visible(out):
    """Return the bytes of all files but hidden ones, which readers ignore."""
    return {name: content for name, content in contents(out).items() if "/." not in f"/{name}"}


def weights(out):
    """Return the weights and the other files of a run."""
    root = restore.absolute(out / runs.CHECKPOINTS)
    (step,) = restore.steps(root)
    assert not list(out.glob("writer-*.json"))
    others = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    shapes = restore.shapes(root / str(step), restore.items_of(root / str(step), "raw")[0])
    params = jax.device_get(restore.load_params(root, shapes, "raw", step))
    arrays = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(params)}
    return {"step": step, "files": others, "config": runs.load(out)} | arrays


def write_shards(inputs, out):
    records = open_tars(inputs / "digits.tar")
    reshard.reshard(records, out, format="webdataset", identity={"path": "digits"}, num=4)


COMMANDS = {
    "pack": Command(lambda inputs, out: pack.pack(inputs / "run", "raw", None, out), weights),
    "averages": Command(lambda inputs, out: averages.write(str(inputs / "run"), "0.07", None, str(out)), weights),
    "digits": Command(lambda i, out: digits.write_examples(out, 3, size=8), visible),
    "reshard": Command(write_shards, visible),
}
ORBAX = "averages"
"""A command that writes a checkpoint through Orbax, which takes seconds."""


def tiny():
    c = quickstart.get_config()
    c.unet.update(embed_dim=32, head_dim=32, cond_dim=32)
    c.text.width = 32
    c.optimizer.ema_widths = (0.05, 0.1)
    return c


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    convert.to_workdir(subjects.nemo_weights(folder / "nemo.safetensors"), tiny(), folder / "run")
    digits.write_examples(folder / "digits.tar", 10, size=8, format="webdataset")
    return folder


def changes_of(command, inputs, out):
    """Return the number of changes that a whole command makes, and its result."""
    with Fault(out.parent, 0, None) as fault:
        command.run(inputs, out)
    return fault.changes, command.result(out)


def moments(number):
    """Return up to MOMENTS numbers of changes, spread over all."""
    return sorted({int(x) for x in np.linspace(1, number, MOMENTS)})


def assert_same(result, expected):
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_equal(result[name], value, err_msg=name)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != ORBAX])
def test_a_command_can_be_repeated_after_a_full_disk(inputs, tmp_path, name):
    command = COMMANDS[name]
    number, expected = changes_of(command, inputs, tmp_path / "whole" / "out")
    for moment in moments(number):
        out = tmp_path / str(moment) / "out"
        ended = False
        with Fault(out.parent, moment, full), contextlib.suppress(OSError, NotSaved, ValueError):
            command.run(inputs, out)
            ended = True  # It goes on without a saved index or a heartbeat.
        if not ended:
            command.run(inputs, out)
        assert_same(command.result(out), expected)


def run_until(name, inputs, out, moment):
    """Run a command, and end this process at a moment without any cleanup."""
    with Fault(out.parent, moment, lambda: os._exit(KILLED)):
        COMMANDS[name].run(inputs, out)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_can_be_repeated_after_a_kill(inputs, tmp_path, name):
    command = COMMANDS[name]
    number, expected = changes_of(command, inputs, tmp_path / "whole" / "out")
    for moment in moments(number):
        out = tmp_path / str(moment) / "out"
        process = commands.fork(run_until, name, inputs, out, moment)
        process.join()
        # Orbax's threads make a few changes more or less.
        assert process.exitcode == KILLED or (name == ORBAX and moment > number - 5)
        if process.exitcode == KILLED:
            command.run(inputs, out)
        assert_same(command.result(out), expected)
