"""Ctrl-C ends a command, during imports too; a command that nobody reads ends without a word."""

import contextlib
import gc
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from diffusion_jax import cli, exits
from tests.imagen_jax import commands
from tests.processes import PATIENCE

ROOT = pathlib.Path(__file__).parents[2]
COMMANDS = ("diffusion_jax.pack", "imagen_jax.train", "sd_jax.weights", "launch.plan", "benchmarks.train_step")
"""One command of each package: the package makes Ctrl-C end its commands."""
INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
FIRST = ("absl", "jax", "numpy")
"""Each of these commands imports one of these libraries at its start."""


def python(folder, *arguments, ignored=False):
    """Run Python in a folder, which comes first on its path. It gets Ctrl-C by default."""
    command = ["env", f"--{'ignore' if ignored else 'default'}-signal=INT", sys.executable, *arguments]
    where = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, **where)


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_during_the_imports_of_a_command_ends_it_without_a_word(tmp_path, command):
    for name in FIRST:
        (tmp_path / f"{name}.py").write_text(INTERRUPT)
    ended = python(tmp_path, "-m", command)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


SHOW = "import signal, imagen_jax, launch; print(int(signal.getsignal(signal.SIGINT) in (0, 1)))"
COMMAND = f"import sys; sys.argv, sys.orig_argv = ['-m'], ['python', '-m', 'sd_jax.train']; {SHOW}"


@pytest.mark.parametrize(
    ("program", "changed"), [(["-c", COMMAND], "1"), (["-c", SHOW], "0"), (["-m", "notebook"], "0")]
)
def test_importing_a_package_changes_ctrl_c_only_in_its_own_commands(tmp_path, program, changed):
    (tmp_path / "notebook").mkdir()
    (tmp_path / "notebook" / "__init__.py").write_text("import imagen_jax\n")
    (tmp_path / "notebook" / "__main__.py").write_text(SHOW)
    assert python(tmp_path, *program).stdout.strip() == changed


def test_a_command_in_the_background_keeps_ignoring_ctrl_c(tmp_path):
    (tmp_path / "jax.py").write_text(INTERRUPT + "print('went on')\nraise SystemExit\n")
    assert python(tmp_path, "-m", "diffusion_jax.pack", ignored=True).stdout == "went on\n"


PAGE = """
import atexit
from diffusion_jax.draw.kind import Kind
from diffusion_jax.web import listener, web_command

def interrupted(*arguments):
    raise KeyboardInterrupt

listener.serve = interrupted
atexit.register(print, "shut down")
web_command.command(Kind("imagen_jax", {}, (), lambda *arguments: None))
"""


def test_ctrl_c_ends_the_page_at_once_because_a_thread_may_be_compiling(tmp_path):
    model = f"--workdir={ROOT / 'models' / 'emoji32'}"
    ended = python(tmp_path, "-c", PAGE, model, "--port=0")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "stopped by Ctrl-C\n")


def swallowed(phase, info):
    """Receive Ctrl-C in a callback whose exceptions Python ignores."""
    gc.callbacks.remove(swallowed)
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_that_a_callback_swallows_still_ends_a_command(signals, monkeypatch, capfd):
    def main():
        gc.callbacks.append(swallowed)
        gc.collect()
        time.sleep(100)

    monkeypatch.setattr("sys.argv", ["command"])
    gc.collect()  # What other tests left may warn when it is collected.
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.run(main)
    assert ended.value.code == 130
    assert capfd.readouterr().err == "stopped by Ctrl-C\n"


def written_without_a_reader(errors, where):
    """Print more than a pipe holds, into a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = ["command", *(["--help"] if where == "the help" else [])]

    def main():
        with cli.bad_input() if where == "reading" else contextlib.nullcontext():
            print("line\n" * 50_000)

    cli.run(main)


@pytest.mark.parametrize("where", ["writing", "reading", "the help"])
def test_a_command_whose_output_nobody_reads_ends_without_a_word(tmp_path, where):
    process = commands.fork(written_without_a_reader, tmp_path / "errors", where)
    process.join(PATIENCE)
    assert ((tmp_path / "errors").read_text(), process.exitcode in (0, 141)) == ("", True)


def test_a_broken_connection_is_no_closed_output():
    with pytest.raises(BrokenPipeError, match="a socket"), exits.unless_unread():
        raise BrokenPipeError("a socket")
