"""Imports point one way and make no cycles, and docs/design.md lists the files of the core."""

import ast
import functools
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

from tests import budget

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("diffusion_jax", "imagen_jax", "sd_jax", "launch", "configs")
FILES = sorted(path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
# Modules that a package must not import, at the top of a file or inside a function.
FORBIDDEN = {
    "diffusion_jax": {"imagen_jax", "sd_jax", "configs", "launch", "benchmarks", "tests"},
    "imagen_jax": {"sd_jax", "configs", "launch", "benchmarks", "tests"},
    "sd_jax": {"imagen_jax", "configs", "launch", "benchmarks", "tests"},
    "configs": {"diffusion_jax", "imagen_jax", "sd_jax", "launch", "benchmarks", "tests"},
    "launch": {"benchmarks", "tests"},
}
# The folders of diffusion_jax that each folder may import. "" stands for files outside folders,
# whose own imports test_no_file_imports_itself_through_others follows one by one.
ALLOWED = {
    "config": set(),
    "diffusion": {"config"},
    "files": {""},
    "devices": {"", "files", "nn"},
    "logs": {"", "devices", "files"},
    "nn": {"config"},
    "weights": {"", "config", "devices", "files"},
    "text": {"", "config", "files", "weights"},
    "data": {"", "config", "devices", "files", "logs"},
    "precache": {"", "config", "devices", "files", "logs", "data", "text", "weights"},
    "train": {"", "config", "devices", "files", "logs", "data", "draw", "evaluate", "nn", "text", "weights"},
    "start": {"", "config", "devices", "files", "logs", "data", "text", "train", "weights"},
    "draw": {"", "config", "devices", "files", "logs", "data", "diffusion", "text", "precache", "weights"},
    "metrics": {"", "config", "devices", "files", "logs", "data", "text", "weights"},
    "examples": {"", "config", "devices", "files", "logs", "data", "evaluate", "metrics"},
    "evaluate": {"", "config", "devices", "files", "logs", "data", "draw", "metrics", "text"},
    "web": {"", "config", "devices", "files", "logs", "draw", "evaluate", "metrics", "weights"},
}
# Files of data/ that may name the examples.
WRITERS = {
    "diffusion_jax/data/digits.py": "a command that writes examples; nothing imports a command",
    "diffusion_jax/data/prepare/__main__.py": "a command that writes examples",
    "diffusion_jax/data/sources/__init__.py": "its table names the source digits by a string",
}
REFERENCE = rf"({'|'.join(PACKAGES)})(\.\w+)+:\w+"
"""A "module:function" string."""
TYPES = "if TYPE_CHECKING:\n    from diffusion_jax.diffusion.groups import "
CONTRACT = (pathlib.Path("imagen_jax/task.py"), pathlib.Path("sd_jax/task.py"))
# Parts of paths that the contract must not load. In text/, it loads only the type and the table.
HEAVY = ("data", "precache", "metrics", "evaluate", "draw", "weights", "checkpoint.py", "loop.py")
TEXT = {f"diffusion_jax/text/{name}.py" for name in ("__init__", "encoder", "registry")}


@functools.cache
def imports(file, anywhere=False):
    """Return (line, module) of the imports at the top of a file.

    With `anywhere`, also those inside functions and under TYPE_CHECKING, "module:function" strings,
    and import_module("module").
    """
    tree = ast.parse((ROOT / file).read_text())
    lines = []
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            lines += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            lines += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Constant) and re.fullmatch(REFERENCE, str(node.value)):
            lines.append((node.lineno, node.value.partition(":")[0]))
        elif isinstance(node, ast.Call) and "import_module" in ast.dump(node.func):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            lines += [(node.lineno, name) for name in names]
    return lines


def file_of(module):
    """Return the project's file that holds a module or a name in it. None for other packages."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return None
    for length in (len(parts), max(1, len(parts) - 1)):  # The last part can be a function.
        path = pathlib.Path(*parts[:length])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if (ROOT / file).is_file():
                return file
    return None


@functools.cache
def imported(file, anywhere=False):
    """Return the project's files that a file imports directly."""
    files = {file_of(module) for _, module in imports(file, anywhere)}
    return frozenset(files - {None, file})


def reached(file):
    """Return the project's files that are loaded with a file, including __init__.py files."""
    seen, waiting = set(), [file]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            packages = {parent / "__init__.py" for parent in current.parents[:-1]}
            waiting += [*imported(current), *(p for p in packages if (ROOT / p).is_file())]
    return seen - {file}


def folder(file):
    """Return the folder of a file in diffusion_jax, "" for files in no folder, None elsewhere."""
    if file.parts[0] != "diffusion_jax":
        return None
    return file.parts[1] if len(file.parts) > 2 else ""


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_do_not_import_packages_above_them(package):
    for file in FILES:
        for line, module in imports(file, anywhere=True):
            top = module.split(".")[0]
            bad = file.parts[0] == package and top in FORBIDDEN[package]
            assert not bad, f"{file}:{line} imports {module}"


@pytest.mark.parametrize("name", ALLOWED)
def test_folders_import_only_allowed_folders(name):
    for file in FILES:
        if folder(file) == name:
            for other in imported(file, anywhere=True):
                target = folder(other)
                if target == "examples" and str(file) in WRITERS:
                    continue
                allowed = target == name or target in ALLOWED[name]
                assert allowed, f"{file} imports {other}"


def test_no_folder_has_more_lines_of_code_than_its_budget():
    limits = budget.limits()
    above = {f"{name}: {n}" for name, n in budget.counts().items() if n > limits.get(name, 0)}
    assert not above, (
        f"more lines than in tests/budget.txt: {sorted(above)}. Delete code that is not needed, or "
        "raise the number and give the reason in the commit"
    )
    assert not limits.keys() - budget.counts().keys()


def test_every_folder_has_an_entry_of_allowed_imports():
    assert {folder(file) for file in FILES} - {None, ""} == set(ALLOWED)


@pytest.mark.parametrize("name", ["diffusion", "nn"])
def test_diffusion_and_nn_import_only_jax_numpy_and_the_standard_library(name):
    libraries = {"ast", "collections", "contextlib", "difflib", "functools", "importlib", "inspect"}
    libraries |= {"dataclasses", "math", "typing", "zlib"}
    libraries |= {"numpy", "jax", "jaxtyping"}
    allowed = libraries | ({"flax"} if name == "nn" else set())
    for file in FILES:
        if folder(file) == name:
            for line, module in imports(file, anywhere=True):
                if file_of(module) is None:
                    assert module.split(".")[0] in allowed, f"{file}:{line} imports {module}"


def cycles(graph):
    """Return the pairs of nodes that reach each other, and single nodes that reach themselves."""
    reach = {node: set(edges) for node, edges in graph.items()}
    for middle in graph:  # Warshall's transitive closure of a few hundred files.
        for node in graph:
            if middle in reach[node]:
                reach[node] |= reach[middle]
    return {frozenset({a, b}) for a in graph for b in reach[a] if a in reach[b]}


def test_no_file_imports_itself_through_others():
    """Imports inside functions, TYPE_CHECKING imports and "module:function" strings count too.

    But the types of the config groups do not count in the mathematics, of which the groups consist.
    """
    graph = {file: imported(file, anywhere=True) for file in FILES}
    for file in FILES:
        text = (ROOT / file).read_text()
        if folder(file) == "diffusion" and TYPES in text and text.count("diffusion.groups") == 1:
            graph[file] -= {file_of("diffusion_jax.diffusion.groups")}
    assert not cycles(graph)


def test_no_folders_of_diffusion_jax_import_each_other():
    assert not cycles({name: allowed - {""} for name, allowed in ALLOWED.items()})


@pytest.mark.parametrize("file", CONTRACT, ids=str)
def test_the_task_interface_does_not_import_heavy_folders(file):
    for path in reached(file):
        heavy = set(path.parts) & set(HEAVY)
        encoder = path.parts[:2] == ("diffusion_jax", "text") and str(path) not in TEXT
        assert not heavy and not encoder, f"{file} loads {path}"


# Imports imagen_jax.task, traces a loss and a sample of the quick start, and prints all modules.
TRACE = """
import sys
import jax, jax.numpy as jnp
from imagen_jax import task
from configs import quickstart
from diffusion_jax.text import registry
from imagen_jax import settings
s = settings.read_settings(quickstart.get_config().to_dict())
encoder = registry.make_encoder(s.text)
model, batch = task.example(s, encoder)
texts, key = encoder.tokenize(["a"]), jax.random.key(0)
params = jax.eval_shape(model.init, key)
keys = jax.random.split(key, 1)
jax.eval_shape(model.loss, params, model.frozen, {**batch, **texts}, keys)
jax.eval_shape(model.sample, params, model.frozen, texts, keys, jnp.full(1, 2.0))
print(*sys.modules)
"""


def test_the_reading_list_names_the_files_that_loss_and_sample_load():
    command = [sys.executable, "-c", TRACE]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    modules = [name for name in output.split() if name.split(".")[0] in PACKAGES]
    loaded = {file_of(name) for name in modules if not name.startswith("configs")}
    loaded = {str(file) for file in loaded if (ROOT / file).read_text()}  # Without empty files.
    page = (ROOT / "docs/design.md").read_text()
    section = page.partition("\n## Reading list\n")[2].partition("\n## ")[0]
    listed = re.findall(r"`((?:diffusion|imagen|sd)_jax/[\w/]+\.py)`", section)
    assert sorted(listed) == sorted(loaded)


def test_the_tree_in_design_md_lists_every_folder_and_top_level_module():
    page = (ROOT / "docs/design.md").read_text()
    tree = page.partition("\n## The tree\n")[2].partition("\n```\n\n")[0]
    parts = set(re.findall(r"[\w.]+(?:/|\.py)", tree))
    packages = ("diffusion_jax", "imagen_jax", "sd_jax")
    modules = {file.name for file in FILES if len(file.parts) == 2 and file.parts[0] in packages}
    folders = {f"{part}/" for file in FILES for part in file.parts[:-1]}
    folders |= {"benchmarks/", "docs/", "models/", "notebooks/", "tests/"}
    assert not (modules | folders) - parts - {"__init__.py"}


@pytest.mark.parametrize("file", CONTRACT, ids=str)
def test_importing_the_task_interface_loads_exactly_its_imports(file):
    """A subprocess imports the file: `reached` sees all that is loaded at run time."""
    module = ".".join(file.with_suffix("").parts)
    code = f"import sys, {module}; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    modules = set(output.split())
    heavy = {"orbax", "grain", "PIL", "transformers", "tokenizers", "tensorflow", "clu", "torch"}
    assert not heavy & {name.split(".")[0] for name in modules}
    ours = {file_of(name) for name in modules if name.split(".")[0] in PACKAGES}
    assert ours - {file} == reached(file)


@pytest.mark.parametrize("package", ["imagen_jax", "sd_jax"])
def test_importing_a_package_loads_no_other_file_until_load_is_called(package):
    file = pathlib.Path(package, "__init__.py")
    assert reached(file) == {pathlib.Path("diffusion_jax/__init__.py")}
    assert callable(importlib.import_module(package).load)


@pytest.mark.parametrize("file", ["imagen_jax/train.py", "sd_jax/train.py"])
def test_importing_train_does_not_load_metrics_or_judges(file):
    loaded = reached(pathlib.Path(file))
    assert pathlib.Path("diffusion_jax/train/loop.py") in loaded
    unused = {"evaluate", "examples", "judges", "metrics"}
    assert not [path for path in loaded if unused & {*path.parts}]
