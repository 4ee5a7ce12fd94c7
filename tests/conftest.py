"""Every test sees eight CPU devices; compiled programs are kept between runs.

Several processes (pytest -n) share the tests by file, so that each program is compiled once.
"""

import os
import pathlib

import jax
import pytest

from tests.imagen_jax import commands

ROOT = pathlib.Path(__file__).parent.parent

os.environ["XLA_FLAGS"] = f"{commands.XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

# These share the runs that tests/imagen_jax/conftest.py trains.
_TRAINED = {
    ROOT / "tests" / "imagen_jax" / f"test_{name}.py"
    for name in ("train", "sample", "cascade", "evaluate", "two_commands")
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    return (os.cpu_count() or 1) + 1  # Those with processes of their own mostly wait for them.


@pytest.hookimpl(tryfirst=True)  # Before xdist reads the marks.
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path not in _TRAINED)  # The longest group first.
    for item in items:
        group = "trained" if item.path in _TRAINED else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
