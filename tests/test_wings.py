"""The wings: digits, emoji, judges, MLPerf and compiler estimates, which the core never imports."""

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
CORE = (
    *("config", "diffusion", "nn", "train", "draw", "data"),
    *("text", "precache", "weights", "machine"),
)
SINGLE = (
    *(f"diffusion_jax/{name}.py" for name in ("task", "systems", "runs")),
    *(f"imagen_jax/{name}.py" for name in ("task", "unet", "cascade", "settings", "train")),
    *(f"sd_jax/{name}.py" for name in ("task", "unet", "vae", "settings", "train")),
)
# Commands that belong to a wing and keep their names; no module imports them.
COMMANDS = ("diffusion_jax/data/digits.py", "diffusion_jax/data/prepare/__main__.py")
# The table of renamed values says where the digits went.
HISTORY = "diffusion_jax/config/versions.py"


def in_wing(file):
    return any(str(file).startswith(f"{wing}/") for wing in WINGS)


def core():
    folders = tuple(f"diffusion_jax/{name}/" for name in CORE)
    return [f for f in FILES if str(f).startswith(folders) or str(f) in SINGLE]


def strings(file):
    """The string constants of a file that name one of the project's files, with their lines."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]
            if named := file_of(module):
                yield node.lineno, named


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_is_a_folder(wing):
    assert any((ROOT / wing).glob("*.py"))


def test_the_core_imports_no_wing():
    assert len(core()) > 100
    for file in core():
        if str(file) in COMMANDS:
            continue
        for line, module in imports(file, anywhere=True):
            named = file_of(module)
            assert not (named and in_wing(named)), f"{file}:{line} imports {module}"
            assert module.partition(".")[0] != "benchmarks", f"{file}:{line} imports {module}"


def test_the_core_names_no_wing_in_a_string():
    for file in core():
        if str(file) != HISTORY:
            for line, named in strings(file):
                assert not in_wing(named), f"{file}:{line} names {named}"


@pytest.mark.parametrize("command", COMMANDS)
def test_no_module_imports_a_command(command):
    for file in FILES:
        for line, module in imports(file, anywhere=True):
            named = file_of(module)
            assert named != pathlib.Path(command), f"{file}:{line} imports {module}"


def test_strings_that_name_a_wing_are_seen():
    (reference,) = {named for _, named in strings(pathlib.Path(HISTORY)) if in_wing(named)}
    assert reference == pathlib.Path("diffusion_jax/examples/digits/__init__.py")
