"""Run the slow tests, or only those that a change can break: the tests that import changed files.

    python -m tests.slow --changed[=REVISION] [ARGUMENTS OF PYTEST]

Changed are the files that differ from the branch point of REVISION (default: main), committed or
not. A test file depends on the modules that it imports and on the commands that it names, on their
imports, and so on. A file that is not Python, such as page.html, belongs to the modules in its
folder. Files of tests run in the order of their distance from the change, the nearest first.
"""

import ast
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]
STARTS_COMMANDS = "tests/imagen_jax/commands.py"
"""It preloads modules for all tests, which depend only on the commands that they name."""


def main(arguments: list[str]) -> int:
    """Run the slow tests with pytest, and return its exit code."""
    changed = [a for a in arguments if re.match(r"--changed(=|$)", a)]
    selected = affected(changed_since(changed[-1].partition("=")[2] or "main")) if changed else []
    if changed and not selected:
        print("no slow test imports a file that changed")
        return 0
    print(*selected, sep="\n")
    rest = [a for a in arguments if a not in changed]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadgroup"]
    return subprocess.run([*command, "-m", "slow", *rest, *selected], cwd=ROOT).returncode


def changed_since(revision: str) -> list[str]:
    """Return the files that differ from the branch point of a revision, also uncommitted ones."""
    git = lambda *a: subprocess.check_output(["git", *a], cwd=ROOT, text=True).split()
    (base,) = git("merge-base", "HEAD", revision)
    return [*git("diff", "--name-only", base), *git("ls-files", "-o", "--exclude-standard")]


def affected(changed: Iterable[str]) -> list[str]:
    """Return the files with slow tests that depend on changed files, the nearest first."""
    files, reached = sorted(graph()), dict.fromkeys(changed, 0)
    for path in [*reached]:
        folder = str(pathlib.PurePath(path).parent)
        if not path.endswith(".py") and folder not in (".", "docs"):
            reached |= {f: 0 for f in files if str(pathlib.PurePath(f).parent) == folder}
    distance = 0
    while new := [f for f in files if f not in reached and graph()[f] & reached.keys()]:
        distance += 1
        reached |= dict.fromkeys(new, distance)
    slow = [
        f for f in files if f in reached and re.search(r"/test_\w+\.py$", f) and "mark.slow" in (ROOT / f).read_text()
    ]
    return sorted(slow, key=lambda f: reached[f])


@functools.cache
def graph() -> dict[str, set[str]]:
    """Map each Python file to the files that it imports or names."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=ROOT, text=True
    ).split()
    return {path: _imports(path) for path in listed if (ROOT / path).exists()}


def _imports(path: str) -> set[str]:
    if path == STARTS_COMMANDS:
        return set()
    names, in_tests = [], path.startswith("tests/")
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"\w+(\.\w+)+(:\w+)?", node.value):
                names.append(node.value.partition(":")[0])
            elif in_tests and node.value.isidentifier():
                names.append(f"imagen_jax.{node.value}")  # As in commands.run("sample").
    found = {file for name in names if (file := _file(name))}
    parents = pathlib.PurePath(path).parents if in_tests else ()
    return found | {str(p / "conftest.py") for p in parents if (ROOT / p / "conftest.py").exists()}


@functools.cache
def _file(module: str) -> str:
    """Return the file of this repository that holds a module or a name in it, or ""."""
    parts = module.split(".")
    for length in (len(parts), len(parts) - 1):
        path = "/".join(parts[:length])
        for file in (f"{path}.py", f"{path}/__main__.py", f"{path}/__init__.py"):
            if length and (ROOT / file).is_file():
                return file
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
