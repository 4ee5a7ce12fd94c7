"""Start-up code of all commands: flags, configs, error messages, processes, compilation cache."""

import argparse
import contextlib
import difflib
import os
import pathlib
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from logging import ERROR, WARNING, Formatter, LogRecord
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from diffusion_jax import exits, files, reference, systems
from diffusion_jax.config import own_modules, versions
from diffusion_jax.devices import distributed, program_cache, tuning, xla_flags
from diffusion_jax.files import untrusted, url_secrets

flags.disclaim_key_flags()  # --help shows --config with the command that defines it.
_EXTRAS = {"starlette": "web", "uvicorn": "web"}
"""The extra that installs a package, for packages that requirements.txt does not list."""
_TRUST = flags.DEFINE_list(
    "trust",
    [],
    "Modules of your own that the config of a workdir or of moments may name, such as my_package.my_source.",
)
_ended = threading.Event()  # Set while no `interruptible` is entered.
_HELP = {"--help", "-help", "-?", "--helpshort", "-helpshort", "--helpfull", "-helpfull"}


class OneLine(argparse.ArgumentParser):
    """A parser whose errors are one line, as in all other commands."""

    def error(self, message: str) -> NoReturn:
        """Print the message, and end with exit code 2."""
        print(f"error: {message}", file=sys.stderr)
        sys.exit(exits.REFUSED)


def define_config(
    help_text: str = "A file in configs/.", flag_values: flags.FlagValues = flags.FLAGS, argv: list[str] | None = None
) -> flags.FlagHolder[ConfigDict]:
    """Define the flag --config=FILE[:ARGUMENT] and its overrides --config.X=Y.

    The overrides are read from `argv`, by default sys.argv. Fields that the file omits get their
    defaults, so that overrides can set every field. Returns the holder of the flag; its value is a
    locked ConfigDict.
    """
    holder = config_flags.DEFINE_config_file("config", None, help_text, flag_values, sys_argv=argv)
    flag = flag_values["config"]
    flag.parser = _CompleteConfig(flag.parser, "--config")
    return holder


class ConfigFileParser(flags.ArgumentParser):
    """A flag parser that reads a config file as `files` does, and names its errors in one line."""

    def __init__(self, files: flags.ArgumentParser, flag: str) -> None:
        """Store the parser of ml_collections, and the name of the flag for error messages."""
        self._files, self._flag = files, flag

    def parse(self, argument: str) -> Any:
        return _read(self._files, argument, self._flag)


class _CompleteConfig(ConfigFileParser):
    """A flag parser that reads a config file and adds the defaults of omitted fields."""

    def parse(self, argument: str) -> Any:
        config = super().parse(argument)
        if isinstance(config, ConfigDict):  # Otherwise ml_collections reports an error later.
            values = url_secrets.hide(config.to_dict())
            own_modules.trust_config(values)
            config = ConfigDict(systems.complete(values)).lock()
        return config


def _read(files: flags.ArgumentParser, argument: str, flag: str) -> Any:
    """Run the config file that `argument`, FILE or FILE:ARGUMENT, names. Return its config.

    Raises ValueError if the file does not exist or raises an error. The message names the file, and
    the line of the error.
    """
    path = pathlib.Path(argument.partition(":")[0])
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 1)
        hint = f": did you mean {path.parent / near[0]}?" if near else ""
        raise ValueError(f"{flag}: No such file or directory: {str(path)!r}{hint}")
    try:
        config = files.parse(argument)
    except Exception as raised:  # The file is a program and may raise anything.
        # ml_collections replaces a TypeError or ValueError by one whose text holds a traceback.
        wrapped = raised.__context__ if isinstance(raised, TypeError | ValueError) else None
        error = wrapped or raised
        frames = traceback.extract_tb(error.__traceback__)
        of_file = lambda frame: pathlib.Path(frame.filename).absolute() == path.absolute()
        lines = [frame.lineno for frame in frames if of_file(frame)]
        line = getattr(error, "lineno", None) or (lines or [None])[-1]
        where = f"{path}, line {line}" if line else f"{path}"
        reason = getattr(error, "msg", None) or error
        raise ValueError(f"{where}: {type(error).__name__}: {reason}") from raised
    if config is not None and not isinstance(config, ConfigDict) and not callable(config):
        raise ValueError(f"{path}: get_config returns {config!r}: it must return a ConfigDict")
    return config


def run(main: Callable[[], None], advice: str = "write flags as --NAME=VALUE") -> None:
    """Run the main function of a command that takes flags only, as `run_with_arguments` does.

    If the user gives anything but flags, the command ends with an error message that contains
    `advice`, in which {} stands for the first such argument.
    """

    def checked(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unknown arguments {argv[1:]}: {advice.format(argv[1])}")
        main()

    run_with_arguments(checked)


def run_with_arguments(main: Callable[[list[str]], None]) -> None:
    """Run `main` as absl's app.run does, and report bad flags and configs in one line.

    After a bad flag or config, the process exits with code 2. If the disk is full, it exits with
    code 1, and after Ctrl-C with code 130.
    """

    def parse(argv):
        flags.FLAGS.set_gnu_getopt()  # Flags may follow positional arguments.
        with bad_input(TypeError, flags.Error):
            if "config" in flags.FLAGS and _HELP & set(argv):
                flags.FLAGS["config"].help += _fields_in_help(argv)
            try:
                rest = flags.FLAGS(argv)
            except SystemExit as ended:  # After --help, absl's code is 1.
                sys.exit(0 if _HELP & set(argv) else ended.code)
            except flags.Error as error:
                raise flags.Error(_in_words(str(error))) from error
            except (AttributeError, KeyError) as error:  # From ml_collections: unknown fields.
                raise ValueError(_unknown_field(argv, str(error))) from error
        own_modules.trust(*_TRUST.value)
        config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
        if isinstance(config, ConfigDict):
            own_modules.trust_config(config.to_dict())
        return rest

    def run_main(argv):
        try:
            with bad_input(app.UsageError, usual=()):  # Absl would print all flags first.
                return main(argv)
        except OSError as error:
            if not files.is_full(error):
                raise
            _end(error)

    with interruptible():
        app.run(distributed.together()(run_main), flags_parser=parse)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Make Ctrl-C end this process with one line and exit code 130; a second one ends it at once.

    If nobody reads the output any more, the process ends without a message (exits.unless_unread).
    Every command enters this context first, so it also hides secrets in the URLs of the flags.
    """
    for argv in (sys.argv, sys.orig_argv):
        argv[:] = url_secrets.hide(argv)
    before, sys.unraisablehook = signal.getsignal(signal.SIGINT), _unraisable
    if before == signal.SIG_DFL:  # As set in diffusion_jax/__init__.py.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _ended.clear()
    try:
        with exits.unless_unread():
            yield
    except KeyboardInterrupt:
        _ended.set()
        before = signal.SIG_DFL
        signal.signal(signal.SIGINT, before)
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(exits.INTERRUPTED)
    finally:
        _ended.set()
        signal.signal(signal.SIGINT, before)


def _in_words(message: str) -> str:
    """Replace the wording of Python and absl for an invalid number and for missing flags."""
    if missing := re.findall(r"flag --(\w+)=None: Flag .* other than None\.", message):
        # Absl adds to the help of repeated flags, after ";\n", that they may be repeated.
        helps = {name: flags.FLAGS[name].help.partition(";\n")[0] for name in missing}
        abouts = {name: text.strip(".").replace("\n", " ") for name, text in helps.items()}
        named = (f"--{name} is missing: {a[0].lower()}{a[1:]}" for name, a in abouts.items())
        return "; ".join(named)
    message = re.sub(r"invalid literal for int\(\) with base \d+: ", "give a whole number, not ", message)
    return message.replace("could not convert string to float: ", "give a number, not ")


def _fields_in_help(argv: list[str]) -> str:
    """Return the part of --help that lists the config fields of a system.

    With --config, this is the system that the config file names. Without --config, it is the system
    that this command trains. If the command trains none, return a hint to use --config.
    """
    files = [arg.partition("=")[2] for arg in argv if re.match(r"--?config=", arg)]
    if files:
        parser: Any = flags.FLAGS["config"].parser
        config = parser.parse(files[-1]).to_dict()
    else:
        spec = sys.modules["__main__"].__spec__
        own = [name for name in systems.KNOWN if spec and systems.find(name).command == spec.name]
        config = {"system": next(iter(own), "")}
    if not config["system"]:
        return " With --config=FILE, --help lists its fields; docs/settings.md has all of them."
    groups = {name: group for name, group in config.items() if isinstance(group, dict)}
    kinds = {name: group["kind"] for name, group in groups.items() if "kind" in group}
    return f" Its fields:\n{reference.in_help(config['system'], kinds)}"


def start(*, alone: bool = False) -> None:
    """Set up compilers, logging and the compilation cache, and join the other processes of a job.

    The cache is in JAX_COMPILATION_CACHE_DIR, by default in the user's cache folder. Call this
    first in main. Commands that always run in a single process pass alone=True.
    """
    with bad_input():
        xla_flags.check()
    tuning.apply()
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(_is_for_users)
    logging.get_absl_handler().setFormatter(_Printable())
    # Pillow warns about every damaged image. The data pipeline counts such images instead.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    # After a failed save, Python would warn about Orbax's unfinished coroutines.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")
    with bad_input():
        if bucket := files.store_path(os.environ.get(program_cache.VARIABLE, "")):
            from diffusion_jax.weights import buckets  # Imports Orbax.

            buckets.absolute(str(bucket))  # Otherwise JAX would open the bucket through TensorFlow.
        program_cache.use()
    if not alone:
        with bad_input():
            distributed.join()
            try:
                jax.devices()
            except (RuntimeError, AssertionError) as error:  # JAX raises either without a plugin.
                raise ValueError(
                    f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', '')!r}, but JAX finds no "
                    "such device: install the plugin for this device (see README), or unset "
                    "JAX_PLATFORMS"
                ) from error


@contextlib.contextmanager
def bad_input(
    *more: type[Exception], usual: tuple[type[Exception], ...] = (ValueError, OSError), code: int = exits.REFUSED
) -> Iterator[None]:
    """Turn errors that a user can fix into a one-line message and exit code `code`.

    This context manager catches the types in `usual` and `more`. Catch the `usual` types only
    around checks of the input, because elsewhere they indicate bugs. Two errors have their own exit
    codes, after which launchers start the command again: exits.BUSY for Busy, and 1 for a full
    disk or memory. The error of a lost connection between processes passes through unchanged. If a
    package is not installed, the message says how to install it.
    """
    try:
        yield
    except (*usual, *more) as error:
        if distributed.is_disconnection(error):
            raise
        if isinstance(error, BrokenPipeError) and exits.is_unread():
            raise  # For `interruptible`.
        _end(error, code)
    except MemoryError as error:
        _end(MemoryError(f"out of memory: {str(error) or 'none is left'}: free some, and try again"), 1)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or (pathlib.Path(__file__).parents[1] / package).exists():
            raise  # A mistake in this repository.
        extra = _EXTRAS.get(package)
        packages = f'-e ".[{extra}]"' if extra else "-r requirements.txt"
        _end(ModuleNotFoundError(f"{error}: run pip install {packages}"), code)


def _end(error: Exception, code: int = 1) -> NoReturn:
    text = str(error)
    if files.is_full(error):
        text, code = f"{text}: make room, and run the same command again", 1
    print(f"error: {untrusted.printable(url_secrets.without(text))}", file=sys.stderr)
    sys.exit(exits.BUSY if isinstance(error, exits.Busy) else code)


def _unknown_field(argv: list[str], text: str) -> str:
    """Return an error message that names the full path of an unknown config field in `argv`.

    `text` is the message of ml_collections, which names only the last part of the path. It is
    returned if no unknown field is found.
    """
    matches = lambda pattern: filter(None, (re.match(pattern, arg) for arg in argv))
    files = {m[1]: m[2] for m in matches(r"--?(config|job)=(.+)")}  # Launchers take --job=FILE.
    for flag, path in (m.groups() for m in matches(r"--?(config|job)\.([\w.]+)")):
        parser: Any = flags.FLAGS[flag].parser
        group, dot = parser.parse(files[flag]) if flag in files else None, ""
        for name in path.split("."):
            if not isinstance(group, ConfigDict) or name not in group:
                fields = [*group.keys()] if isinstance(group, ConfigDict) else []
                return _nearest(dot + name, name, fields)
            group, dot = group[name], f"{dot}{name}."
    return text


def _nearest(path: str, name: str, fields: list[str]) -> str:
    """Return an error message about the unknown config field `path`, whose last part is `name`.

    The message lists `fields`, the valid names in this place, with the most similar ones first.
    """
    if renamed := versions.renamed(path):
        return f"unknown config field {path}: its name is now {renamed}"
    nearest = sorted(fields, key=lambda field: -difflib.SequenceMatcher(None, name, field).ratio())
    group = path.rpartition(".")[0]
    close = difflib.get_close_matches(name, fields, 1)
    meant = f"did you mean {f'{group}.' if group else ''}{close[0]}? " if close else ""
    listed = ", ".join(nearest) or "no fields"
    return f"unknown config field {path}: {meant}{group or 'the config'} has {listed}"


class _Printable(Formatter):
    """A log formatter that shows the time, and the level if it is a warning or an error.

    It removes control characters, such as those in captions. It leaves out tracebacks, because
    libraries also raise the errors that they log.
    """

    def format(self, record: LogRecord) -> str:
        record.exc_info = record.exc_text = None
        level = f"{record.levelname.lower()}: " if record.levelno >= WARNING else ""
        line = f"{self.formatTime(record, '%m-%d %H:%M:%S')} {level}{record.getMessage()}"
        return untrusted.printable(url_secrets.without(line))


def _interrupt_again() -> None:
    """Send Ctrl-C to the main thread until `interruptible` has received it.

    Once is not enough: on a busy machine, it may arrive while the first one is still ignored. But
    the hook needs time to end before the first one, and the command to close its files after it.
    """
    seconds = 0.5
    while not _ended.wait(seconds):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        seconds = 5


def _unraisable(hook_args: Any) -> None:
    if hook_args.exc_type is KeyboardInterrupt:
        # It was raised in a callback, such as JAX's at garbage collection.
        threading.Thread(target=_interrupt_again, daemon=True).start()
        return
    # A failed save leaves tasks and event loops of Orbax behind, which cause these two messages.
    # The error of the save is raised elsewhere.
    text, owner = str(hook_args.exc_value), getattr(hook_args.object, "__qualname__", "")
    if text != "Event loop is closed" and owner != "BaseEventLoop.__del__":
        sys.__unraisablehook__(hook_args)


def _is_for_users(record: LogRecord) -> bool:
    """Return whether to show a log line: a line of this project, or a warning of a library."""
    file, root = pathlib.Path(record.pathname), pathlib.Path(__file__).parents[1]
    packages = ("diffusion_jax", "imagen_jax", "sd_jax")
    if record.levelno >= ERROR and {"orbax", "asyncio"} & set(file.parts):
        return False  # They log a hundred lines about a failed save, whose error is also raised.
    return record.levelno >= WARNING or any(file.is_relative_to(root / name) for name in packages)
