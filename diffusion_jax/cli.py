"""The start of every command: flags, configs, errors at the edge, processes, kept programs."""

import contextlib
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from logging import ERROR, WARNING, LogRecord
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from diffusion_jax import systems
from diffusion_jax.machine import distributed, tuning, untrusted, xla_flags

flags.disclaim_key_flags()  # --config belongs to the command that defines it: --help shows it.


def define_config(
    help_text: str = "A file in configs/.",
    flag_values: flags.FlagValues = flags.FLAGS,
    argv: list[str] | None = None,
) -> flags.FlagHolder[ConfigDict]:
    """Defines --config=FILE[:ARGUMENT], which --config.X=Y changes; of sys.argv, or of `argv`.

    What the file omits has its system's defaults by then, so that the command line can change all.
    """
    holder = config_flags.DEFINE_config_file("config", None, help_text, flag_values, sys_argv=argv)
    flag = flag_values["config"]
    flag.parser = _CompleteConfig(flag.parser)
    return holder


class _CompleteConfig(flags.ArgumentParser):
    """Reads a file as `files` does, and completes the config."""

    def __init__(self, files: flags.ArgumentParser) -> None:
        self._files = files

    def parse(self, argument: str) -> Any:
        config = self._files.parse(argument)
        if isinstance(config, ConfigDict):  # Otherwise ml_collections' promise of an error.
            config = ConfigDict(systems.complete(config.to_dict())).lock()
        return config


def run(main: Callable[[list[str]], None]) -> None:
    """absl's app.run; a flag or config value that cannot be is one message and exit code 2."""

    def parse(argv):
        flags.FLAGS.set_gnu_getopt()  # Flags may follow the words of a command.
        with bad_input(TypeError, flags.Error):
            try:
                return flags.FLAGS(argv)
            except (AttributeError, KeyError) as error:  # What ml_collections raises.
                raise ValueError(_unknown_field(argv, str(error))) from error

    app.run(distributed.together()(main), flags_parser=parse)


def start(*, alone: bool = False) -> None:
    """Sets up the compilers, joins other processes, keeps compiled programs, quiets libraries.

    JAX_COMPILATION_CACHE_DIR says where programs are kept; by default the user's cache. Call it
    first in main, `alone` in commands that are not for several processes.
    """
    with bad_input():
        xla_flags.check()
    tuning.apply()
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(_is_for_users)
    logging.get_absl_handler().setFormatter(_Printable())
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(home) / "imagen-sd-jax"))
    if not alone:
        with bad_input():
            distributed.join()


@contextlib.contextmanager
def bad_input(
    *more: type[Exception],
    usual: tuple[type[Exception], ...] = (ValueError, OSError),
    code: int = 2,
) -> Iterator[None]:
    """Ends with one line and `code` at errors a user can mend: the usual ones around checks alone,
    since in the work itself they would be bugs."""
    try:
        yield
    except (*usual, *more) as error:
        print(f"error: {untrusted.printable(str(error))}", file=sys.stderr)
        sys.exit(code)


def _unknown_field(argv: list[str], text: str) -> str:
    """The message for --config.unet.embd_dim=3; ml_collections' own names the last part alone."""
    field = re.search(r"\w+", text)
    matches = [re.match(rf"--?\w+\.([\w.]*\b{field[0]})\b", arg) for arg in argv if field]
    path = next((match[1] for match in matches if match), None)
    if field is None or path is None:
        return text
    meant = re.search(r'Did you mean "(\w+)"', text)
    hint = f"did you mean {path.replace(field[0], meant[1])}?" if meant else "see the config's file"
    return f"unknown config field {path}: {hint}"


class _Printable(logging.PythonFormatter):
    """Lines as absl writes them; names and captions in them cannot rule the terminal.

    Without tracebacks: what a library logs, it also raises.
    """

    def format(self, record: LogRecord) -> str:
        record.exc_info = record.exc_text = None
        return untrusted.printable(super().format(record))


def _is_for_users(record: LogRecord) -> bool:
    """Our own lines, and warnings of any library: Orbax alone says thirty more for each save."""
    file, root = pathlib.Path(record.pathname), pathlib.Path(__file__).parents[1]
    packages = ("diffusion_jax", "imagen_jax", "sd_jax")
    if record.levelno >= ERROR and {"orbax", "asyncio"} & set(file.parts):
        return False  # A save that fails is also raised, and is a hundred lines here.
    return record.levelno >= WARNING or any(file.is_relative_to(root / name) for name in packages)
