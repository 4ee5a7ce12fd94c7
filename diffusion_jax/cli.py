"""The start of every command: flags, configs, errors at the edge, processes, kept programs."""

import contextlib
import difflib
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from logging import ERROR, WARNING, LogRecord
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from diffusion_jax import systems
from diffusion_jax.machine import distributed, exits, files, tuning, untrusted, xla_flags

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
        config = _read(self._files, argument)
        if isinstance(config, ConfigDict):  # Otherwise ml_collections' promise of an error.
            config = ConfigDict(systems.complete(config.to_dict())).lock()
        return config


def _read(files: flags.ArgumentParser, argument: str) -> Any:
    """What a config file gives; ValueError with the file and the line for whatever it raises."""
    path = pathlib.Path(argument.partition(":")[0])
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 1)
        hint = f": did you mean {path.parent / near[0]}?" if near else ""
        raise ValueError(f"--config: No such file or directory: {str(path)!r}{hint}")
    try:
        config = files.parse(argument)
    except Exception as error:  # The file is a program, of which anything may go wrong.
        own = [f.lineno for f in traceback.extract_tb(error.__traceback__) if _same(f, path)]
        line = getattr(error, "lineno", None) or (own or [None])[-1]
        where = f"{path}, line {line}" if line else f"{path}"
        said = getattr(error, "msg", None) or error
        raise ValueError(f"{where}: {type(error).__name__}: {said}") from error
    if config is not None and not isinstance(config, ConfigDict) and not callable(config):
        raise ValueError(f"{path}: get_config gives {config!r}: it must give a ConfigDict")
    return config


def _same(frame: traceback.FrameSummary, path: pathlib.Path) -> bool:
    return pathlib.Path(frame.filename).absolute() == path.absolute()


def run(main: Callable[[list[str]], None]) -> None:
    """absl's app.run; a flag or config value that cannot be is one message and exit code 2."""

    def parse(argv):
        flags.FLAGS.set_gnu_getopt()  # Flags may follow the words of a command.
        with bad_input(TypeError, flags.Error):
            try:
                return flags.FLAGS(argv)
            except (AttributeError, KeyError) as error:  # What ml_collections raises.
                raise ValueError(_unknown_field(argv, str(error))) from error

    def run_main(argv):
        try:
            with bad_input(app.UsageError, usual=()):  # Absl's own would print all flags before it.
                return main(argv)
        except OSError as error:
            if not files.is_full(error):
                raise
            _end(error)

    app.run(distributed.together()(run_main), flags_parser=parse)


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
    sys.unraisablehook = _unraisable
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(home) / "imagen-sd-jax"))
    elif there := files.remote(os.environ["JAX_COMPILATION_CACHE_DIR"]):
        from diffusion_jax.weights import buckets  # Imports Orbax.

        with bad_input():
            buckets.absolute(str(there))  # Or JAX would look for the bucket through TensorFlow.
    if not alone:
        with bad_input():
            distributed.join()
            _check_platform()


def _check_platform() -> None:
    """ValueError unless there is a device of those that JAX_PLATFORMS names."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX's own for a backend without a plugin.
        raise ValueError(
            f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', '')!r}, and JAX finds no such "
            "device: install its plugin (see README), or unset the variable"
        ) from error


@contextlib.contextmanager
def bad_input(
    *more: type[Exception],
    usual: tuple[type[Exception], ...] = (ValueError, OSError),
    code: int = exits.REFUSED,
) -> Iterator[None]:
    """Ends with one line and `code` at errors a user can mend: the usual ones around checks alone,
    since in the work itself they would be bugs. What is Busy, and a full disk, which is caught in
    all of a command, end with codes at which launchers start it again."""
    try:
        yield
    except (*usual, *more) as error:
        _end(error, code)


def _end(error: Exception, code: int = 1) -> NoReturn:
    """Says what went wrong, in one line, and ends."""
    text = str(error)
    if files.is_full(error):
        text, code = f"{text}: make room, and give the same command again", 1
    print(f"error: {untrusted.printable(text)}", file=sys.stderr)
    sys.exit(exits.BUSY if isinstance(error, exits.Busy) else code)


def _unknown_field(argv: list[str], text: str) -> str:
    """The message for --config.unet.embd_dim=3; ml_collections' own names the last part alone."""
    matches = lambda pattern: filter(None, (re.match(pattern, arg) for arg in argv))
    files = {m[1]: m[2] for m in matches(r"--?(config|job)=(.+)")}  # Launchers read jobs.
    for flag, path in (m.groups() for m in matches(r"--?(config|job)\.([\w.]+)")):
        parser: Any = flags.FLAGS[flag].parser
        group, dot = parser.parse(files[flag]) if flag in files else None, ""
        for name in path.split("."):
            if not isinstance(group, ConfigDict) or name not in group:
                known = [*group.keys()] if isinstance(group, ConfigDict) else []
                return _nearest(dot + name, name, known)
            group, dot = group[name], f"{dot}{name}."
    return text


def _nearest(path: str, name: str, known: list[str]) -> str:
    """The message on a field that there is not, with those that there are, the nearest first."""
    nearest = sorted(known, key=lambda k: -difflib.SequenceMatcher(None, name, k).ratio())
    group = path.rpartition(".")[0]
    close = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {f'{group}.' if group else ''}{close[0]}? " if close else ""
    there = ", ".join(nearest) or "no fields"
    return f"unknown config field {path}: {meant}{group or 'the config'} has {there}"


class _Printable(logging.PythonFormatter):
    """Lines as absl writes them; names and captions in them cannot rule the terminal.

    Without tracebacks: what a library logs, it also raises.
    """

    def format(self, record: LogRecord) -> str:
        record.exc_info = record.exc_text = None
        return untrusted.printable(super().format(record))


def _unraisable(said: Any) -> None:
    """Python's own, but for tasks of TensorStore that outlive a failed save, which is raised."""
    if said.object is not None or str(said.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(said)


def _is_for_users(record: LogRecord) -> bool:
    """Our own lines, and warnings of any library: Orbax alone says thirty more for each save."""
    file, root = pathlib.Path(record.pathname), pathlib.Path(__file__).parents[1]
    packages = ("diffusion_jax", "imagen_jax", "sd_jax")
    if record.levelno >= ERROR and {"orbax", "asyncio"} & set(file.parts):
        return False  # A save that fails is also raised, and is a hundred lines here.
    return record.levelno >= WARNING or any(file.is_relative_to(root / name) for name in packages)
