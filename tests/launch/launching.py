"""Runs of the launchers' commands, in processes of their own."""

from tests.imagen_jax import commands

BASE = "--job=launch/jobs/base64_500m.py"
SCALING = "--job=launch/jobs/scaling.py"
SWEEP = "--job=launch/jobs/quickstart_sweep.py"


def refused(launcher, *arguments):
    """The message of a command that must end with code 2."""
    ended = commands.run(f"launch.{launcher}", *arguments, "--dry_run", devices=1)
    assert (ended.code, ended.out) == (2, ""), ended.err
    return ended.err


def printed(launcher, *arguments):
    """What a dry run prints, and the table beside it."""
    ended = commands.run(f"launch.{launcher}", *arguments, "--dry_run", devices=1)
    assert ended.code == 0, ended.err
    return ended.out, ended.err
