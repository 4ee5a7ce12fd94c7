"""What is to run where, described once for every launcher.

A job is a file of launch/jobs, whose values the command line may change:

    python -m launch.gke --job=launch/jobs/base64_500m.py --job.accelerator=v6e:16x16 --dry_run

Before anything is rendered the commands are parsed by their own entry points, so that a misspelt
field of a config costs seconds here and not a booking there.
"""

import operator
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags

from diffusion_jax import cli, settings
from diffusion_jax.machine import sharding
from launch import accelerators
from launch.accelerators import Target

FLAG = config_flags.DEFINE_config_file("job", None, "A file in launch/jobs.", lock_config=True)
_GROUPS = ("gke", "slurm")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print what would be submitted, and end.")


class Job(NamedTuple):
    """A job file's own values, outside the groups of single launchers."""

    name: str
    command: str
    """A module, such as imagen_jax.train."""
    config: str
    """A file, with what it takes behind a colon: configs/sd2_mlperf.py:2048."""
    overrides: tuple[str, ...]
    """Changes of the config, such as "optimizer.lr=2e-4"."""
    flags: tuple[str, ...]
    """More of the command line, as it is."""
    sweep: tuple[tuple[str, ...], ...]
    """Further overrides, of which each becomes a run of its own; empty for one run."""
    accelerator: str
    """Such as v5p:4x4x4; several slices work on one run."""
    image: str
    workdir: str
    secrets: tuple[str, ...]
    """Environment variables whose values are not written down here; see each launcher."""


class Run(NamedTuple):
    """One run of a job: its name, its command after `python -m`, its folder."""

    name: str
    argv: tuple[str, ...]
    workdir: str
    overrides: tuple[str, ...]


def read() -> tuple[Job, Target, Mapping[str, Any]]:
    """The job of --job, its accelerators, and the launchers' groups; ValueError if it cannot be."""
    values = FLAG.value.to_dict()
    own, groups = settings.split(values)
    groups = settings.complete({name: {} for name in _GROUPS}, groups, "")
    job = settings.read(Job, own, "")
    check(job)
    return job, accelerators.parse(job.accelerator), groups


def check(job: Job) -> None:
    """ValueError for what no launcher can run."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", job.name):
        raise ValueError(
            f"job.name is {job.name!r}: take at most 40 small letters, digits and dashes"
        )
    if not job.workdir:
        raise ValueError("job.workdir is empty: say where the run is kept, --job.workdir=...")
    if job.config and not os.path.exists(job.config.partition(":")[0]):
        raise ValueError(f"job.config is {job.config!r}, and there is no such file")


def runs(job: Job) -> list[Run]:
    """The runs of a job, one without a sweep; each of a sweep has a folder of its own."""
    found = []
    for i, more in enumerate(job.sweep or ((),)):
        name = f"{job.name}-{i}" if job.sweep else job.name
        workdir = f"{job.workdir.rstrip('/')}/{i}" if job.sweep else job.workdir.rstrip("/")
        config = (f"--config={job.config}",) if job.config else ()
        overrides = tuple(f"--config.{change}" for change in (*job.overrides, *more))
        argv = (job.command, *config, *overrides, *job.flags)
        found.append(Run(name, argv, workdir, more))
    return found


def with_workdir(run: Run, folder: str) -> list[str]:
    """The command after `python -m`, on this folder."""
    return [*run.argv, f"--workdir={folder}"]


def table(found: Sequence[Run]) -> str:
    """A line for each run: its name, its folder, what it changes."""
    names, folders = max(len(run.name) for run in found), max(len(run.workdir) for run in found)
    return "\n".join(
        f"{run.name:<{names}}  {run.workdir:<{folders}}  {' '.join(run.overrides)}".rstrip()
        for run in found
    )


def check_commands(commands: Sequence[Sequence[str]]) -> None:
    """Lets the command of a job parse the flags of its runs; ValueError with what it says of them.

    All in one process: a flag that is given again is parsed again. Nothing of the command runs,
    since absl's --only_check_args ends it there.
    """
    given = dict.fromkeys(argument for command in commands for argument in command)
    command = [sys.executable, "-m", *given, "--only_check_args"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["no message"]
        errors = [line for line in lines if "rror" in line] or lines
        raise ValueError(f"the command refuses its flags: {errors[-1]}")


def check_mesh(run: Run, target: Target) -> None:
    """ValueError, with the arithmetic, unless a run's mesh and batch suit what is to be booked."""
    values = flags.FlagValues()
    cli.define_config(flag_values=values)
    values(["", *(argument for argument in run.argv if argument.startswith("--config="))])
    config = values["config"].value
    if config is None:
        return
    pairs = (argument.partition("=") for argument in run.argv)
    given: dict[str, Any] = {name: value for name, _, value in pairs}
    default = lambda name: operator.attrgetter(name)(config)
    number = lambda name: int(given.get(f"--config.{name}", default(name)))
    sizes = tuple(number(f"mesh.{axis}") for axis in sharding.AXES)
    mesh = accelerators.mesh_over(sizes, target.devices)
    sharding.check_batch(number("batch_size"), number("optimizer.accumulate"), mesh)
