"""What the commands have in common: errors at the edge, and the cache of compiled programs."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from logging import WARNING, LogRecord

import jax
from absl import app, logging


def run(main: Callable[[list[str]], None]) -> None:
    """absl's app.run; a flag or config value that cannot be is one message and exit code 2."""

    def parse(argv):
        with bad_input(AttributeError, KeyError, TypeError):  # What ml_collections raises.
            return app.parse_flags_with_usage(argv)

    app.run(main, flags_parser=parse)


def start() -> None:
    """Keeps compiled programs between runs, and the log to what this project says.

    JAX_COMPILATION_CACHE_DIR says where; by default the user's cache. Call it first in main.
    """
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(_is_for_users)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(home) / "imagen-sd-jax"))


@contextlib.contextmanager
def bad_input(*more: type[Exception]) -> Iterator[None]:
    """What a user can mend becomes one message and exit code 2. For checks, not for the work."""
    try:
        yield
    except (ValueError, OSError, *more) as error:
        # A KeyError's own text is the repr of its message.
        text = error.args[0] if isinstance(error, KeyError) else error
        print(f"error: {text}", file=sys.stderr)
        sys.exit(2)


def _is_for_users(record: LogRecord) -> bool:
    """Our own lines, and warnings of any library: Orbax alone says thirty more for each save."""
    ours = ("diffusion_jax", "imagen_jax", "sd_jax")
    return record.levelno >= WARNING or pathlib.Path(record.pathname).parent.name in ours
