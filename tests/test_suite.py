"""Lists that make the suite fast only name existing files; otherwise they would have no effect."""

import importlib.util
import pathlib

import pytest

from tests import slow
from tests.imagen_jax import commands

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["longest.txt", "quick.txt"])
def test_longest_txt_and_quick_txt_name_existing_files(name):
    paths = (ROOT / "tests" / name).read_text().split()
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", commands.SLOW_IMPORTS)
def test_modules_preloaded_for_commands_exist(name):
    assert importlib.util.find_spec(name) is not None


@pytest.mark.parametrize(
    ("changed", "selected", "left_out"),
    [
        ("diffusion_jax/web/page.html", "tests/imagen_jax/test_web.py", "tests/test_beam.py"),
        ("sd_jax/mlperf/run.py", "tests/sd_jax/mlperf/test_mlperf.py", "tests/sd_jax/test_web.py"),
        ("launch/planner/tasks.py", "tests/launch/planner/test_tasks.py", "tests/test_beam.py"),
        ("imagen_jax/sample.py", "tests/test_full_disk.py", "tests/launch/test_flops.py"),
        ("docs/page.md", "", "tests/imagen_jax/test_web.py"),
    ],
)
def test_a_change_selects_the_slow_tests_of_everything_that_imports_it(changed, selected, left_out):
    found = slow.affected([changed])
    assert (selected in found) if selected else found == []
    assert left_out not in found and (ROOT / left_out).exists()


def test_the_nearest_slow_tests_run_first():
    found = slow.affected(["diffusion_jax/files/rgb.py"])  # Read by most commands.
    assert found[0] == "tests/diffusion_jax/web/test_page.py"
    assert found.index("tests/imagen_jax/test_web.py") < found.index("tests/launch/test_plan.py")
