"""A job, the description of what runs where, and what all launchers do with it.

A job is a file of launch/jobs, whose values the command line may change:

    python -m launch.gke --job=launch/jobs/base64_500m.py --job.accelerator=v6e:16x16 --dry_run

Before anything is rendered the commands are parsed by their own entry points, so that a misspelt
field of a config costs seconds here and not a booking there.
"""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import app, flags
from ml_collections import config_flags

from diffusion_jax import cli
from diffusion_jax.config import ranges, settings
from diffusion_jax.config.settings import MeshShape, Optimizer
from diffusion_jax.machine import files, tuning
from diffusion_jax.train import optimizer
from launch import accelerators
from launch.accelerators import Target

_JOB = config_flags.DEFINE_config_file("job", None, "A file in launch/jobs.", lock_config=True)
_GROUPS = ("gke", "slurm")
_REHEARSED = ("train", "train_vae", "sample", "evaluate", "precache")
IN_BUCKETS = ("train", "train_vae", "sample", "evaluate")
"""Commands, by their last name, whose --workdir may be a URL; others want a folder."""


class Job(NamedTuple):
    """A job file's own values, outside the groups of single launchers."""

    name: str
    command: str
    """A module, such as imagen_jax.train or benchmarks.scaling."""
    config: str
    """A file, with what it takes behind a colon: configs/sd2_mlperf.py:2048."""
    overrides: tuple[str, ...]
    """Changes of the config, such as "optimizer.lr=2e-4"."""
    flags: tuple[str, ...]
    """More of the command line, as it is."""
    sweep: tuple[tuple[str, ...], ...]
    """Further overrides, of which each becomes a run of its own; empty for one run."""
    accelerator: str
    """The accelerators of a run, such as v5p:4x4x4; several slices work on one run."""
    image: str
    workdir: str
    secrets: tuple[str, ...]
    """Environment variables whose values are not written down here; see each launcher."""
    env: tuple[str, ...] = ()
    """Environment variables of the run, such as "NCCL_DEBUG=INFO"."""
    mounts: tuple[str, ...] = ()
    """Folders that a container sees, beside those that the config and the flags name."""
    restarts: ranges.Amount = 10
    """How often a run that crashed or hung, or found its workdir or port taken, is started again.
    One that was preempted, requeued or out of time always is; one that refused its config, flags or
    data (exit code 2) never."""


class Run(NamedTuple):
    """One run of a job: its name, its command after `python -m`, its folder."""

    name: str
    argv: tuple[str, ...]
    workdir: str
    overrides: tuple[str, ...]


class Launcher(NamedTuple):
    """A launcher's own part: a text for each run of a checked job, and who takes the texts."""

    render: Callable[[Run], str]
    """A run's manifest, script or command line."""
    submit: Callable[[list[str]], None]
    """Hands over all of them; ValueError or ImportError where it cannot."""
    folder: Callable[[str], str] = str
    """The path of a workdir for the command that runs."""


Groups = Mapping[str, Any]
"""The launchers' own groups of a job file."""


def main(open_launcher: Callable[[Job, Target, Groups], Launcher]) -> None:
    """Runs `python -m launch.NAME --job=FILE`: checks, renders, prints or submits.

    `open_launcher` raises ValueError for a job that its cluster could not start.
    """

    def launch(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
        with cli.bad_input():
            job, target, groups = read()
            launcher = open_launcher(job, target, groups)
            all_runs = runs(job)
            check_commands([command(run, launcher.folder(run.workdir)) for run in all_runs])
            rendered = [launcher.render(run) for run in all_runs]
            for run in all_runs:
                check_mesh(run, target)
        print(table(all_runs), file=sys.stderr)
        if dry_run.value:
            print("\n".join(rendered))
            return
        with cli.bad_input(ImportError):
            for run in all_runs:
                print(rehearse(job, run, launcher.folder(run.workdir), target), file=sys.stderr)
            launcher.submit(rendered)

    dry_run = flags.DEFINE_bool("dry_run", False, "Print what would be submitted, and end.")
    flags.mark_flag_as_required("job")
    for flag in (_JOB, dry_run):  # For the launcher's --help, which knows its own module's alone.
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[flag.name])
    cli.run(launch)


def pipe(program: Sequence[str], text: str, missing: str) -> None:
    """Gives text to a program's standard input; ValueError, `missing` if it is not installed."""
    try:
        subprocess.run(program, input=text, text=True, check=True)
    except FileNotFoundError as error:
        raise ValueError(f"there is no {program[0]} here: {missing}") from error
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{program[0]} refused what it was given; see above") from error


def read() -> tuple[Job, Target, Groups]:
    """The job of --job, its accelerators, and the launchers' groups; ValueError if it cannot be."""
    values = _JOB.value.to_dict()
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
    rows = []
    for i, more in enumerate(job.sweep or ((),)):
        name = f"{job.name}-{i}" if job.sweep else job.name
        workdir = f"{job.workdir.rstrip('/')}/{i}" if job.sweep else job.workdir.rstrip("/")
        config = (f"--config={job.config}",) if job.config else ()
        overrides = tuple(f"--config.{change}" for change in (*job.overrides, *more))
        argv = (job.command, *config, *overrides, *job.flags)
        rows.append(Run(name, argv, workdir, more))
    return rows


def command(run: Run, folder: str) -> list[str]:
    """The command after `python -m`, on this folder."""
    return [*run.argv, f"--workdir={folder}"]


def table(rows: Sequence[Run]) -> str:
    """A line for each run: its name, its folder, what it changes."""
    names, folders = max(len(run.name) for run in rows), max(len(run.workdir) for run in rows)
    return "\n".join(
        f"{run.name:<{names}}  {run.workdir:<{folders}}  {' '.join(run.overrides)}".rstrip()
        for run in rows
    )


def environment(job: Job, target: Target, folder: str) -> dict[str, str]:
    """The variables of a run: where compiled programs are kept, job.env, and machine.tuning's."""
    variables = {"JAX_COMPILATION_CACHE_DIR": f"{folder.rstrip('/')}/compiled"}
    for pair in job.env:
        name, separator, value = pair.partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"job.env holds {pair!r}: write NAME=VALUE")
        variables[name] = value
    kinds = ("tpu", target.name) if target.is_tpu else ("gpu",)
    return variables | tuning.environment(kinds, variables)


def folders(job: Job, run: Run) -> list[str]:
    """The folders from / on that a run needs: of its config, its flags and job.mounts, each once.

    A pattern or a file stands for the folder that it is in.
    """
    config = config_of(run) or {}
    values = [*_strings(config), *(argument.partition("=")[2] for argument in run.argv)]
    needed = {_folder(path) for path in (*values, *job.mounts) if path.startswith("/")}
    inside = lambda path: any(str(parent) in needed for parent in pathlib.PurePath(path).parents)
    return sorted(path for path in needed if not inside(path))


def _strings(value: Any) -> Iterator[str]:
    """The texts in a config group, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(part)


def _folder(path: str) -> str:
    fixed = re.split(r"[*?\[{]", path, maxsplit=1)[0]
    whole = pathlib.Path(path)
    is_file = fixed != path or whole.is_file() or (whole.suffix and not whole.is_dir())
    folder = os.path.dirname(fixed) if is_file else os.path.normpath(path)
    return path if folder == "/" else folder


def check_commands(commands: Sequence[Sequence[str]]) -> None:
    """Lets the command of a job parse the flags of its runs; ValueError with what it says of them.

    All in one process: a flag that is given again is parsed again. Nothing of the command runs,
    since absl's --only_check_args ends it there.
    """
    arguments = dict.fromkeys(argument for one in commands for argument in one)
    whole = [sys.executable, "-m", *arguments, "--only_check_args"]
    ended = subprocess.run(whole, capture_output=True, text=True, timeout=300, check=False)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["no message"]
        errors = [line for line in lines if "rror" in line] or lines
        raise ValueError(f"the command refuses its flags: {errors[-1]}")


def rehearse(job: Job, run: Run, folder: str, target: Target) -> str:
    """What a run says of itself with --rehearse, on as many devices of this machine's CPU.

    Its memory is compared with that of the devices that are booked. Only where all that it reads is
    here, as on a cluster whose nodes share their folders. ValueError with its own message if it
    refuses.
    """
    if job.command.rpartition(".")[2] not in _REHEARSED:
        return f"{run.name} is not rehearsed: {job.command} has no --rehearse"
    disk = "/".join(folder.split("/")[:2])  # Such as /shared or /gcs.
    away = [path for path in (*folders(job, run), disk) if path and not os.path.exists(path)]
    if "://" in folder:
        away = [path for path in away if path != disk] + [folder] * (not _opens(folder))
    if away:
        return f"{run.name} is not rehearsed: {', '.join(away)} is not on this machine"
    devices = f"--xla_force_host_platform_device_count={target.devices}"
    variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices}
    unet = (config_of(run) or {}).get("unet", {})
    kernels = unet.get("attention_impl") in ("cudnn", "splash")  # Which no CPU can trace.
    plain = ["--config.unet.attention_impl=blockwise"] if kernels else []
    trains = job.command.rpartition(".")[2].startswith("train")
    booked = [f"--device_memory={target.kind.memory:.0f}"] if trains else []
    whole = [sys.executable, "-m", *command(run, folder), *plain, *booked, "--rehearse"]
    environ = os.environ | variables
    try:
        ended = subprocess.run(
            whole, env=environ, capture_output=True, text=True, timeout=600, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{run.name} is not rehearsed: it takes more than ten minutes here"
    last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
    if ended.returncode == 2:
        raise ValueError(f"the rehearsal of {run.name} fails: {last}")
    if ended.returncode:
        return f"{run.name} is not rehearsed: it ended with code {ended.returncode}, {last}"
    warnings = re.findall(r"^W\d{4} .*?\] (.*)$", ended.stderr, re.MULTILINE)
    return "\n".join([run.name, ended.stdout, *(f"warning: {text}" for text in warnings)])


def _opens(url: str) -> bool:
    """Whether a folder in a bucket can be written to from here."""
    try:
        files.check_writable(url, "--workdir")
    except ValueError:
        return False
    return True


def check_mesh(run: Run, target: Target) -> None:
    """ValueError, with the arithmetic, unless a run's mesh and batch suit what is to be booked."""
    c = config_of(run)
    if c is None:
        return
    mesh = accelerators.mesh_over(settings.read(MeshShape, c["mesh"], "mesh"), target.devices)
    passes = settings.read(Optimizer, c["optimizer"], "optimizer")
    optimizer.for_mesh(passes, c["batch_size"], mesh)


def config_of(run: Run) -> dict[str, Any] | None:
    """The config of a run as its command reads it; None without one."""
    values = flags.FlagValues()
    argv = ["", *(argument for argument in run.argv if argument.startswith("--config"))]
    config = cli.define_config(flag_values=values, argv=argv)
    values(argv)
    return None if config.value is None else config.value.to_dict()
