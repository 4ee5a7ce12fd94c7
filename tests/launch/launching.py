"""Run the launchers' commands in separate processes."""

from tests.imagen_jax import commands

BASE = "--job=launch/jobs/base64_500m.py"
SCALING = "--job=launch/jobs/scaling.py"
SWEEP = "--job=launch/jobs/quickstart_sweep.py"


def flags(fields):
    """Return the flags that set fields of the job, such as "accelerator=h100:8 restarts=2"."""
    return tuple(f"--job.{field}" for field in fields.split())


def trust_flags():
    """Spare a launcher the process that parses the flags of its runs, which takes two seconds."""
    from launch import job

    job.check_commands = lambda commands: None


def refused(launcher, *arguments, before=trust_flags):
    """Return the message of a command that must end with code 2."""
    ended = commands.run(f"launch.{launcher}", *arguments, "--dry_run", devices=1, before=before)
    assert (ended.code, ended.out) == (2, ""), ended.err
    return ended.err


def printed(launcher, *arguments, before=trust_flags):
    """Return what a dry run prints, and the table beside it."""
    ended = commands.run(f"launch.{launcher}", *arguments, "--dry_run", devices=1, before=before)
    assert ended.code == 0, ended.err
    return ended.out, ended.err
