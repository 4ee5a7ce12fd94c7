"""Lists that make the suite fast only name existing files; otherwise they would have no effect."""

import importlib.util
import pathlib

import pytest

from tests.imagen_jax import commands

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["longest.txt", "quick.txt"])
def test_longest_txt_and_quick_txt_name_existing_files(name):
    paths = (ROOT / "tests" / name).read_text().split()
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", commands.SLOW_IMPORTS)
def test_modules_preloaded_for_commands_exist(name):
    assert importlib.util.find_spec(name) is not None
