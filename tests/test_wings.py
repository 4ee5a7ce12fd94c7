"""The core does not import the wings: digits, emoji, judges, MLPerf and compiler estimates."""

import ast
import pathlib

import pytest

from tests.test_architecture import FILES, ROOT, file_of, imports

WINGS = (
    "diffusion_jax/examples",
    "diffusion_jax/metrics/judges",
    "diffusion_jax/evaluate/mlperf",
    "sd_jax/mlperf",
    "launch/planner",
    "benchmarks",
)
# The only files outside a wing that import one: commands, and the scorer that loads a judge's
# folder. Everything else is the core.
IMPORTERS = {
    "diffusion_jax/data/digits.py",
    "diffusion_jax/data/prepare/__main__.py",
    "diffusion_jax/evaluate/scorers.py",
    "diffusion_jax/metrics/__main__.py",
    "diffusion_jax/report.py",
    "diffusion_jax/verdict.py",
    "launch/plan.py",
    "sd_jax/prepare.py",
    "sd_jax/rcp.py",
}
# Commands of examples in data/, a folder of the core: no module may import them.
COMMANDS = ("diffusion_jax/data/digits.py", "diffusion_jax/data/prepare/__main__.py")
# The table of renamed values names the module of the digits.
HISTORY = pathlib.Path("diffusion_jax/config/versions.py")


def wing_of(file):
    return next((wing for wing in WINGS if str(file).startswith(f"{wing}/")), None)


def outside():
    """Return the files outside all wings, without configs, which may name a wing."""
    return [file for file in FILES if wing_of(file) is None and file.parts[0] != "configs"]


def imports_a_wing(file):
    modules = {module for _, module in imports(file, anywhere=True)}
    return any(m.split(".")[0] == "benchmarks" or wing_of(file_of(m)) for m in modules)


def names_a_wing(file):
    """Return whether a string in the file names a module or function of a wing."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    strings = {node.value for node in nodes if isinstance(node, ast.Constant)}
    modules = {text.partition(":")[0] for text in strings if isinstance(text, str)}
    return any(wing_of(file_of(module)) for module in modules)


def test_only_the_listed_files_of_the_core_import_a_wing():
    assert {str(file) for file in outside() if imports_a_wing(file)} == IMPORTERS


def test_the_core_does_not_name_a_wing_in_a_string():
    assert [file for file in outside() if names_a_wing(file)] == [HISTORY]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_module_imports_a_command(command):
    for file in FILES:
        for line, module in imports(file, anywhere=True):
            assert file_of(module) != pathlib.Path(command), f"{file}:{line} imports {module}"
