"""Which file may import which: no arrow up, no circles, and a contract that loads alone."""

import ast
import functools
import importlib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("diffusion_jax", "imagen_jax", "sd_jax", "launch", "configs")
FILES = sorted(path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
# What each package may not import, wherever the import stands.
FORBIDDEN = {
    "diffusion_jax": {"imagen_jax", "sd_jax", "configs", "launch", "benchmarks", "tests"},
    "imagen_jax": {"sd_jax", "configs", "launch", "benchmarks", "tests"},
    "sd_jax": {"imagen_jax", "configs", "launch", "benchmarks", "tests"},
    "configs": {"diffusion_jax", "imagen_jax", "sd_jax", "launch", "benchmarks", "tests"},
    "launch": {"benchmarks", "tests"},
}
# What each folder of diffusion_jax may import of the others; "" is its own files, each of which
# stands for itself (see test_no_file_imports_itself_through_others).
ALLOWED = {
    "config": set(),
    "diffusion": {"config"},
    "nn": {"config"},
    "machine": {"", "config"},
    "weights": {"", "config", "machine"},
    "text": {"", "config", "machine", "weights"},
    "data": {"", "config", "machine"},
    "precache": {"", "config", "machine", "data", "examples", "text", "weights"},
    "train": {"", "config", "machine", "data", "draw", "evaluate", "nn", "text", "weights"},
    "start": {"", "config", "machine", "data", "train", "weights"},
    "draw": {"", "config", "machine", "diffusion", "text", "precache", "weights"},
    "metrics": {"", "config", "machine", "data", "text", "weights"},
    "examples": {"", "config", "machine", "data"},
    "evaluate": {"", "config", "machine", "data", "draw", "examples", "metrics", "text"},
    "web": {"", "config", "machine", "draw", "evaluate", "metrics", "weights"},
}
# Commands of data/ that write examples; nothing imports a command.
WRITERS = {"diffusion_jax/data/digits.py", "diffusion_jax/data/prepare/__main__.py"}
CONTRACT = (pathlib.Path("imagen_jax/task.py"), pathlib.Path("sd_jax/task.py"))
# What the contract does without, as parts of a path; of text/ it has the type and the names.
HEAVY = ("data", "precache", "metrics", "evaluate", "draw", "weights", "checkpoint.py", "loop.py")
TEXT = {f"diffusion_jax/text/{name}.py" for name in ("__init__", "encoder", "registry")}


@functools.cache
def imports(file, anywhere=False):
    """(line, module) of what a file imports at its top, or anywhere in it."""
    tree = ast.parse((ROOT / file).read_text())
    found = []
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def file_of(module):
    """The project's file that holds a module, or a name in it; None for other packages."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return None
    for length in (len(parts), max(1, len(parts) - 1)):  # A name is the module's before it.
        path = pathlib.Path(*parts[:length])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if (ROOT / file).is_file():
                return file
    return None


@functools.cache
def imported(file, anywhere=False):
    """The project's files that a file imports itself."""
    files = {file_of(module) for _, module in imports(file, anywhere)}
    return frozenset(files - {None, file})


def reached(file):
    """The project's files that are loaded with a file, those of its packages included."""
    seen, waiting = set(), [file]
    while waiting:
        here = waiting.pop()
        if here not in seen:
            seen.add(here)
            packages = {parent / "__init__.py" for parent in here.parents[:-1]}
            waiting += [*imported(here), *(p for p in packages if (ROOT / p).is_file())]
    return seen - {file}


def folder(file):
    """The folder of a file of diffusion_jax, "" for the package's own files; None elsewhere."""
    if file.parts[0] != "diffusion_jax":
        return None
    return file.parts[1] if len(file.parts) > 2 else ""


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package):
    for file in FILES:
        for line, module in imports(file, anywhere=True):
            top = module.split(".")[0]
            bad = file.parts[0] == package and top in FORBIDDEN[package]
            assert not bad, f"{file}:{line} imports {module}"


@pytest.mark.parametrize("name", ALLOWED)
def test_folders_import_what_they_may(name):
    for file in FILES:
        if folder(file) == name:
            for other in imported(file, anywhere=True):
                there = folder(other)
                if there == "examples" and str(file) in WRITERS:
                    continue
                allowed = there == name or there in ALLOWED[name]
                assert allowed, f"{file} imports {other}"


def test_every_folder_has_its_arrows():
    assert {folder(file) for file in FILES} - {None, ""} == set(ALLOWED)


@pytest.mark.parametrize("name", ["diffusion", "nn"])
def test_the_maths_imports_jax_and_numpy_only(name):
    libraries = {"ast", "collections", "contextlib", "difflib", "functools", "importlib", "inspect"}
    libraries |= {"math", "typing"}
    libraries |= {"numpy", "jax", "jaxtyping"}
    allowed = libraries | ({"flax"} if name == "nn" else set())
    for file in FILES:
        if folder(file) == name:
            for line, module in imports(file, anywhere=True):
                if file_of(module) is None:
                    assert module.split(".")[0] in allowed, f"{file}:{line} imports {module}"


def circles(graph):
    """The groups of nodes that reach each other (Tarjan's strongly connected components)."""
    reach = {node: set(edges) for node, edges in graph.items()}
    for middle in graph:  # Warshall's closure: a few hundred files at most.
        for node in graph:
            if middle in reach[node]:
                reach[node] |= reach[middle]
    return {frozenset({a, b}) for a in graph for b in reach[a] if a in reach[b]}


def test_no_file_imports_itself_through_others():
    graph = {file: imported(file) for file in FILES}
    assert not circles(graph)


def test_no_folders_of_diffusion_jax_import_each_other():
    graph = {name: set() for name in ALLOWED}
    for file in FILES:
        if folder(file) and str(file) not in WRITERS:
            others = {folder(other) for other in imported(file, anywhere=True)}
            graph[folder(file)] |= others - {None, "", folder(file)}
    assert not circles(graph)


@pytest.mark.parametrize("file", CONTRACT, ids=str)
def test_the_contract_loads_alone(file):
    for path in reached(file):
        heavy = set(path.parts) & set(HEAVY)
        encoder = path.parts[:2] == ("diffusion_jax", "text") and str(path) not in TEXT
        assert not heavy and not encoder, f"{file} loads {path}"


def test_a_circle_and_a_way_round_are_seen():
    assert circles({1: {2}, 2: {3}, 3: {1}, 4: {1}}) == {
        frozenset({a, b}) for a in (1, 2, 3) for b in (1, 2, 3)
    }
    assert not circles({1: {2, 3}, 2: {3}, 3: set()})


@pytest.mark.parametrize("file", CONTRACT, ids=str)
def test_importing_the_contract_loads_what_its_imports_say(file):
    """In a process of its own: nothing is imported at run time that the walk does not see."""
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
def test_a_package_is_light_and_loads_runs_when_asked(package):
    file = pathlib.Path(package, "__init__.py")
    assert not reached(file)
    assert callable(importlib.import_module(package).load)


@pytest.mark.parametrize("file", ["imagen_jax/train.py", "sd_jax/train.py"])
def test_training_loads_metrics_and_judges_only_for_an_evaluation(file):
    loaded = reached(pathlib.Path(file))
    assert pathlib.Path("diffusion_jax/train/loop.py") in loaded
    unused = {"evaluate", "examples", "judges", "metrics"}
    assert not [path for path in loaded if unused & {*path.parts}]


def test_no_file_is_longer_than_400_lines():
    for file in FILES:
        assert len((ROOT / file).read_text().splitlines()) <= 400, f"{file} has two subjects?"
