"""What the commands have in common: errors at the edge, and the cache of compiled programs."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator

import jax
from absl import logging


def start() -> None:
    """Keeps compiled programs between runs, and the log short. Call it first in main.

    JAX_COMPILATION_CACHE_DIR says where; by default the user's cache.
    """
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().setFormatter(None)
    for noisy in ("jax", "orbax", "grain"):
        logging.get_absl_logger().manager.getLogger(noisy).setLevel("WARNING")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(home) / "imagen-sd-jax"))


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """What a user can mend becomes one message and exit code 2. For checks, not for the work."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
