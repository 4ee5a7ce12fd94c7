"""The lists that make the suite fast name what is there: an old one would slow it in silence."""

import importlib.util
import pathlib

import pytest

from tests.imagen_jax import commands

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["longest.txt", "quick.txt"])
def test_the_lists_of_tests_name_files_and_folders(name):
    paths = (ROOT / "tests" / name).read_text().split()
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", commands.SLOW_IMPORTS)
def test_what_is_imported_before_commands_start_can_be_imported(name):
    assert importlib.util.find_spec(name) is not None
