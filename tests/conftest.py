"""Every test sees eight CPU devices. Compiled programs are cached between runs.

With pytest -n, tests are distributed by file or by the mark xdist_group, so that each
program is compiled once. The longest files (longest.txt) start first, so that those starting last
are short.
"""

import gc
import os
import pathlib
import shutil
import signal

import jax
import jaxtyping
import pytest

from tests import emulators, pages
from tests.imagen_jax import commands

ROOT = pathlib.Path(__file__).parent.parent

os.environ["XLA_FLAGS"] = f"{commands.XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
os.environ["JAX_PLATFORMS"] = "cpu"  # Also for commands. Otherwise, plugins search for their devices.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # For tests that import TensorFlow; see events.py.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(scope="module")  # While it is open, its thread cannot run another asyncio loop.
def browser():
    """The machine's Chromium, controlled by Playwright."""
    driver = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
    if chromium is None:
        pytest.skip("needs a browser: apt install chromium")
    with driver.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=pages.PATIENCE)
        yield opened
        opened.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    return (os.cpu_count() or 1) + 1  # Tests with subprocesses mostly wait for them.


def pytest_configure(config):
    config.option.loadscopereorder = False  # Otherwise, xdist starts with the groups with the most tests.


def pytest_ignore_collect(collection_path, config):
    """Do not import the files that hold no test with the selected mark."""
    mark = config.option.markexpr
    if mark in ("gate", "slow") and collection_path.match("test_*.py"):
        return f"mark.{mark}" not in collection_path.read_text() or None


@pytest.hookimpl(tryfirst=True)  # Before xdist reads the marks.
def pytest_collection_modifyitems(items):
    longest = (ROOT / "tests" / "longest.txt").read_text().split()
    rank = {path: place for place, path in enumerate(longest)}
    path = lambda item: str(item.path.relative_to(ROOT))
    items.sort(key=lambda item: rank.get(path(item), len(rank)))
    for item in items:
        if item.get_closest_marker("gate") is not None:
            assert item.get_closest_marker("slow") is not None, f"{item.nodeid} is no slow test"
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(path(item)))


def pytest_collection_finish():
    """Exclude imported objects from garbage collection, which tracing triggers often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(scope="session")
def _served():
    with emulators.running() as environment:
        yield environment


@pytest.fixture(scope="module")
def stores(_served):
    """Set environment variables that lead to the emulators of S3 and Google's storage."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _served.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def unchecked(monkeypatch):
    """Do not check annotated types and shapes: the test passes wrong ones, or stand-ins."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def signals():
    """Handle signals as in the foreground, also in the background or under nohup."""
    before = {number: signal.signal(number, own) for number, own in commands.HANDLERS.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
