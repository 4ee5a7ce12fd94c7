"""Every test sees eight CPU devices; compiled programs are kept between runs.

Several processes (pytest -n) share the tests by file or by the mark xdist_group, so that each
program is compiled once, and begin with what takes longest (longest.txt), so that what starts last
is short.
"""

import os
import pathlib

import jax
import pytest

from tests.imagen_jax import commands

ROOT = pathlib.Path(__file__).parent.parent

os.environ["XLA_FLAGS"] = f"{commands.XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
os.environ["JAX_PLATFORMS"] = "cpu"  # Of commands, too: a plugin looks for its devices otherwise.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # As events.py says, for tests that import TensorFlow.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    return (os.cpu_count() or 1) + 1  # Those with processes of their own mostly wait for them.


def pytest_configure(config):
    config.option.loadscopereorder = False  # Xdist would begin with the groups of most tests.


@pytest.hookimpl(tryfirst=True)  # Before xdist reads the marks.
def pytest_collection_modifyitems(items):
    longest = (ROOT / "tests" / "longest.txt").read_text().split()
    rank = {path: place for place, path in enumerate(longest)}
    path = lambda item: str(item.path.relative_to(ROOT))
    items.sort(key=lambda item: rank.get(path(item), len(rank)))
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(path(item)))
