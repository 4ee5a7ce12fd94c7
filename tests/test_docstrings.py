"""Functions and methods of more than two lines that another module uses have a docstring."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("diffusion_jax", "imagen_jax", "sd_jax", "launch", "benchmarks")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FILES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
WORDS = {path: set(re.findall(r"\w+", path.read_text())) for path in FILES}


def without_docstring(tree):
    """Return the qualified names of a module's public functions that lack a docstring."""
    names = []

    def look(node, prefix):
        for child in node.body:
            name = getattr(child, "name", "_")
            if name.startswith("_") and name != "__call__":
                continue
            if isinstance(child, ast.ClassDef):
                look(child, f"{prefix}{name}.")
            elif isinstance(child, FUNCTIONS):
                lines = child.body[-1].end_lineno - child.body[0].lineno + 1
                if lines > 2 and ast.get_docstring(child) is None:
                    names.append(prefix + name)

    look(tree, "")
    return names


def exported(name, path):
    """Return whether another file contains the name."""
    return any(name.rpartition(".")[2] in words for other, words in WORDS.items() if other != path)


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_of_more_than_two_lines_that_others_use_have_docstrings(package):
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if (package, path.parent.name) != ("launch", "jobs")
        for name in without_docstring(ast.parse(path.read_text()))
        if name.endswith("__call__") or exported(name, path)
    ]
    assert missing == []
