"""Job files, which define what to run and where, and the code shared by all launchers.

A job is a Python file in launch/jobs. Flags can change its values:

    python -m launch.gke --job=launch/jobs/base64_500m.py --job.accelerator=v6e:16x16 --dry_run

Before a launcher submits a job, it starts the job's command on this machine, only to parse the
flags. This finds a misspelt config field in seconds, before the job waits in a queue.
"""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags

from diffusion_jax import cli, files
from diffusion_jax.config import ranges, settings
from diffusion_jax.config.settings import MeshShape, Optimizer
from diffusion_jax.devices import sharding, tuning
from diffusion_jax.files import url_secrets
from launch import accelerators, fields
from launch.accelerators import Target

_JOB = config_flags.DEFINE_config_file("job", None, "Job file, such as launch/jobs/scaling.py.", lock_config=True)
flags.FLAGS["job"].parser = cli.ConfigFileParser(flags.FLAGS["job"].parser, "--job")
_GROUPS = ("gke", "slurm")
_REHEARSED = ("train", "train_vae", "sample", "evaluate", "precache")
IN_BUCKETS = ("train", "train_vae", "sample", "evaluate")
"""Commands (last part of the module name) that accept a URL as --workdir; others need a folder."""


class Job(NamedTuple):
    """Fields of a job file that apply to all launchers."""

    name: str
    """Name of the job on the cluster. The runs of a sweep are named NAME-0, NAME-1, ..."""
    command: str
    """Module to run, such as imagen_jax.train or benchmarks.scaling."""
    config: str
    """Config file; an argument may follow after a colon, as in configs/sd2_mlperf.py:2048."""
    overrides: tuple[str, ...]
    """Changes to config fields, such as "optimizer.lr=2e-4"."""
    flags: tuple[str, ...]
    """Other flags of the command, such as "--num_images=4"."""
    sweep: tuple[tuple[str, ...], ...]
    """One tuple of additional config overrides per run; empty for a single run."""
    accelerator: str
    """Accelerators of each run, such as v5p:4x4x4, or v5p:4x4x4*2 for one run on two slices."""
    image: str
    """Container image of the runs, such as REGISTRY/NAME:TAG. It may be "" for Slurm, and for
    XManager on this machine; the runs then use no container."""
    workdir: str
    """Workdir of the run: a folder, or a URL such as gs://BUCKET/runs/NAME. The runs of a sweep use
    its subfolders 0, 1, ..."""
    secrets: tuple[str, ...]
    """Names of environment variables with secret values.

    The docstring of each launcher says where the launcher gets the values."""
    env: tuple[str, ...] = ()
    """Environment variables of each run, such as "NCCL_DEBUG=INFO"."""
    mounts: tuple[str, ...] = ()
    """Folders to mount into the container, besides the folders in the config and the flags."""
    restarts: ranges.WholeNumber = 10
    """Maximum number of restarts because of crashes, hangs, or a workdir or port in use. A run that
    was preempted, was requeued or reached its time limit is always restarted. A run that rejected
    its config, flags or data (exit code 2) is never restarted."""


class JobRun(NamedTuple):
    """One run of a job: its name, command line and workdir."""

    name: str
    """Name of the job, with the run's number if the job has a sweep, such as "quickstart-2"."""
    argv: tuple[str, ...]
    """Command line after `python -m`, without --workdir."""
    workdir: str
    """Folder or URL for the results of this run."""
    overrides: tuple[str, ...]
    """Config overrides from the job's sweep that distinguish this run, such as "seed=1"."""


class Launcher(NamedTuple):
    """Functions of one launcher (GKE, Slurm or XManager), which the shared code calls."""

    render: Callable[[JobRun], str]
    """Render a run as the text to submit: a manifest, a script or a command line."""
    submit: Callable[[list[str]], None]
    """Submit the rendered texts of all runs. Raises ValueError or ImportError on failure."""
    folder: Callable[[str], str] = str
    """Convert a run's workdir to the path or URL that the job's command gets as --workdir."""
    note: str = ""
    """A note for the user, such as how sbatch reads the time limit; printed before the runs are
    submitted."""


Groups = Mapping[str, Any]
"""Launcher-specific groups of a job file, by name ("gke", "slurm"); each is a dict of fields."""


def main(open_launcher: Callable[[Job, Target, Groups], Launcher]) -> None:
    """Run a launcher's command: read the job of --job, check it, and submit its runs.

    With --dry_run, print the rendered runs instead of submitting them. `open_launcher` creates the
    launcher, and raises ValueError for jobs that it cannot start.
    """

    def launch() -> None:
        with cli.bad_input():
            job, target, groups = read()
            launcher = open_launcher(job, target, groups)
            all_runs = runs(job)
            check_commands([command(run, launcher.folder(run.workdir)) for run in all_runs])
            rendered = [launcher.render(run) for run in all_runs]
            for run in all_runs:
                check_mesh(run, target)
        print(*filter(None, (table(all_runs), launcher.note)), sep="\n", file=sys.stderr)
        if dry_run.value:
            print("\n".join(rendered))
            return
        with cli.bad_input(ImportError):
            for run in all_runs:
                print(rehearse(job, run, launcher.folder(run.workdir), target), file=sys.stderr)
            launcher.submit(rendered)

    dry_run = flags.DEFINE_bool("dry_run", False, "Print what would be submitted, and exit.")
    flags.mark_flag_as_required("job")
    for flag in (_JOB, dry_run):  # --help shows only the key flags of the main module.
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[flag.name])
    cli.run(launch)


def pipe(program: Sequence[str], text: str, missing: str) -> None:
    """Run a program with `text` as its standard input.

    Raises ValueError if the program fails or is not installed. If it is not installed, the message
    ends with the advice `missing`.
    """
    try:
        subprocess.run(program, input=text, text=True, check=True)
    except FileNotFoundError as error:
        raise ValueError(f"{program[0]} is not installed: {missing}") from error
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{program[0]} failed: see its message above") from error


def read() -> tuple[Job, Target, Groups]:
    """Read the file of --job; return the job, its accelerators and the launcher-specific groups.

    Raises ValueError if the job is invalid.
    """
    values = _JOB.value.to_dict()
    fields.check(values)
    job_values, groups = settings.split(values)
    groups = settings.complete({name: {} for name in _GROUPS}, groups, "")
    job = settings.read(Job, job_values, "")
    check(job)
    return job, accelerators.parse(job.accelerator), groups


def check(job: Job) -> None:
    """Raise ValueError if the job has no workdir, or names a config file that does not exist."""
    if not job.workdir:
        raise ValueError("job.workdir is empty: give a folder with --job.workdir=...")
    if job.config and not os.path.exists(job.config.partition(":")[0]):
        raise ValueError(f"job.config is {job.config!r}: there is no such file; choose a file in configs/")


def runs(job: Job) -> list[JobRun]:
    """Return the runs of a job: one per sweep entry, in WORKDIR/0, WORKDIR/1, ...

    A job without a sweep has a single run, in WORKDIR.
    """
    rows = []
    for i, changes in enumerate(job.sweep or ((),)):
        name = f"{job.name}-{i}" if job.sweep else job.name
        workdir = f"{job.workdir.rstrip('/')}/{i}" if job.sweep else job.workdir.rstrip("/")
        config = (f"--config={job.config}",) if job.config else ()
        overrides = tuple(f"--config.{change}" for change in (*job.overrides, *changes))
        argv = (job.command, *config, *overrides, *job.flags)
        rows.append(JobRun(name, argv, workdir, changes))
    return rows


def command(run: JobRun, folder: str) -> list[str]:
    """Return the arguments that follow "python -m" for a run, ending with --workdir=`folder`."""
    return [*url_secrets.reveal(run.argv), f"--workdir={folder}"]


def table(rows: Sequence[JobRun]) -> str:
    """Format the runs as a table: one line per run with its name, workdir and sweep overrides."""
    names, folders = max(len(run.name) for run in rows), max(len(run.workdir) for run in rows)
    return "\n".join(
        f"{run.name:<{names}}  {run.workdir:<{folders}}  {' '.join(run.overrides)}".rstrip() for run in rows
    )


def environment(job: Job, target: Target, folder: str) -> dict[str, str]:
    """Return the environment variables of a run, by name.

    They are the variables in job.env, the folder of the compilation cache, and the compiler
    settings for the target. `folder` is the --workdir of the run's command. If it is in a bucket,
    the cache is not, because others who can write there could run code through it. Raises
    ValueError if an entry of job.env is not NAME=VALUE.
    """
    local = not files.store_path(folder)
    variables = {"JAX_COMPILATION_CACHE_DIR": f"{folder.rstrip('/')}/compiled"} if local else {}
    for pair in job.env:
        name, separator, value = pair.partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"job.env holds {pair!r}: write NAME=VALUE")
        variables[name] = value
    kinds = ("tpu", target.name) if target.is_tpu else ("gpu",)
    return variables | tuning.environment(kinds, variables)


def trains(job: Job) -> bool:
    """Return whether the job's command trains a model and so saves checkpoints in its workdir."""
    return job.command.rpartition(".")[2].startswith("train")


def folders(job: Job, run: JobRun) -> list[str]:
    """Return the folders that a run's config, its flags and job.mounts name by absolute paths.

    For a file or a glob pattern, this is the folder that contains it. A folder inside another
    listed folder is omitted.
    """
    config = config_of(run) or {}
    values = [*_strings(config), *(argument.partition("=")[2] for argument in run.argv)]
    needed = {_folder(path) for path in (*values, *job.mounts) if path.startswith("/")}
    inside = lambda path: any(str(parent) in needed for parent in pathlib.PurePath(path).parents)
    return sorted(path for path in needed if not inside(path))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(part)


def _folder(path: str) -> str:
    prefix = re.split(r"[*?\[{]", path, maxsplit=1)[0]
    full = pathlib.Path(path)
    is_file = prefix != path or full.is_file() or (full.suffix and not full.is_dir())
    folder = os.path.dirname(prefix) if is_file else os.path.normpath(path)
    return path if folder == "/" else folder


def check_commands(commands: Sequence[Sequence[str]]) -> None:
    """Let the job's command parse the flags of all runs, without running the command.

    Raises ValueError with the command's error message if a flag is invalid. A single process checks
    all runs: it gets the flags of all runs together, and absl parses every occurrence of a repeated
    flag. The absl flag --only_check_args makes the command exit after parsing.
    """
    arguments = dict.fromkeys(argument for argv in commands for argument in argv)
    argv = [sys.executable, "-m", *arguments, "--only_check_args"]
    process = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        errors = [line for line in lines if "rror" in line] or lines
        raise ValueError(f"{commands[0][0]} rejects its flags: {errors[-1]}")


def rehearse(job: Job, run: JobRun, folder: str, target: Target) -> str:
    """Rehearse a run on this machine with virtual CPU devices, and return the report as a string.

    The job's command runs with --rehearse, which checks the inputs and whether the run fits into
    the memory of the target's devices. If no rehearsal is possible, for example because this
    machine cannot read all inputs, the returned string gives the reason. Raises ValueError with the
    command's message if the command rejects its inputs.
    """
    if job.command.rpartition(".")[2] not in _REHEARSED:
        return f"{run.name} is not rehearsed: {job.command} has no flag --rehearse"
    disk = "/".join(folder.split("/")[:2])  # The top-level folder, such as /shared or /gcs.
    missing = [path for path in (*folders(job, run), disk) if path and not os.path.exists(path)]
    if "://" in folder:
        missing = [path for path in missing if path != disk] + [folder] * (not _is_writable(folder))
    if missing:
        return f"{run.name} is not rehearsed: this machine cannot access {', '.join(missing)}"
    devices = f"--xla_force_host_platform_device_count={target.devices}"
    variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices}
    unet = (config_of(run) or {}).get("unet", {})
    has_kernels = unet.get("attention_impl") in ("cudnn", "splash")  # A CPU cannot trace them.
    attention = ["--config.unet.attention_impl=blockwise"] if has_kernels else []
    memory = [f"--device_memory={target.kind.memory:.0f}"] if trains(job) else []
    argv = [sys.executable, "-m", *command(run, folder), *attention, *memory, "--rehearse"]
    environ = os.environ | variables
    try:
        process = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        return f"{run.name} is not rehearsed: a rehearsal takes over ten minutes on this machine"
    last = (process.stderr.strip().splitlines() or ["no message"])[-1]
    if process.returncode == 2:
        raise ValueError(f"the rehearsal of {run.name} fails: {last}")
    if process.returncode:
        code = process.returncode
        return f"{run.name} is not rehearsed: the rehearsal ended with exit code {code}: {last}"
    warnings = re.findall(r"^W\d{4} .*?\] (.*)$", process.stderr, re.MULTILINE)
    return "\n".join([run.name, process.stdout, *(f"warning: {text}" for text in warnings)])


def _is_writable(url: str) -> bool:
    try:
        files.check_writable(url, "--workdir")
    except ValueError:
        return False
    return True


def check_mesh(run: JobRun, target: Target) -> None:
    """Raise ValueError unless a run's mesh and batch size fit the target's devices."""
    c = config_of(run)
    if c is None:
        return
    mesh = accelerators.mesh_over(settings.read(MeshShape, c["mesh"], "mesh"), target.devices)
    micro_batch = settings.read(Optimizer, c["optimizer"], "optimizer").micro_batch
    sharding.check_batch(c["batch_size"], micro_batch, mesh)


def config_of(run: JobRun) -> dict[str, Any] | None:
    """Return a run's config with all overrides applied, or None if the run has no --config."""
    values = flags.FlagValues()
    argv = ["", *(argument for argument in run.argv if argument.startswith("--config"))]
    config = cli.define_config(flag_values=values, argv=argv)
    values(argv)
    return None if config.value is None else config.value.to_dict()
