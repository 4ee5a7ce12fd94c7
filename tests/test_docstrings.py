"""Public functions and methods of more than two lines have a docstring."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("diffusion_jax", "imagen_jax", "sd_jax", "launch", "benchmarks", "examples")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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


@pytest.mark.parametrize("package", PACKAGES)
def test_public_functions_of_more_than_two_lines_have_docstrings(package):
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if (package, path.parent.name) != ("launch", "jobs")
        for name in without_docstring(ast.parse(path.read_text()))
    ]
    assert missing == []


def test_the_rule_finds_functions_and_methods_and_spares_short_and_private_ones():
    source = """
def long():
    a = 1
    b = 2
    return a + b
def described():
    '''Return three.'''
    a = 1
    b = 2
    return a + b
def short():
    a = 1
    return a
def _private():
    a = 1
    b = 2
    return a + b
class Holder:
    def __init__(self):
        self.a = 1
        self.b = 2
        self.c = 3
    def method(self):
        def inner():
            pass
        return inner
    def __call__(self, x):
        if x:
            return 1
        return 2
"""
    assert without_docstring(ast.parse(source)) == ["long", "Holder.method", "Holder.__call__"]
