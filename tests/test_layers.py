"""The dependency arrows: systems import the shared package, never each other."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FORBIDDEN = {
    "diffusion_jax": {"imagen_jax", "sd_jax", "configs", "launch", "benchmarks"},
    "imagen_jax": {"sd_jax", "configs", "launch", "benchmarks"},
    "sd_jax": {"imagen_jax", "configs", "launch", "benchmarks"},
    "configs": {"diffusion_jax", "imagen_jax", "sd_jax", "launch", "benchmarks"},
    "launch": {"benchmarks"},
}


def imports(path):
    """(line, module) of every import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package):
    for path in (ROOT / package).rglob("*.py"):
        for line, module in imports(path):
            bad = {module.split(".")[0]} & FORBIDDEN[package]
            assert not bad, f"{path.relative_to(ROOT)}:{line} imports {bad}"


@pytest.mark.parametrize("name", ["precond", "noise", "samplers", "guidance"])
def test_the_maths_imports_jax_and_numpy_only(name):
    allowed = {"collections", "typing", "functools", "math", "numpy", "jax", "jaxtyping", "optax"}
    siblings = {f"diffusion_jax.{n}" for n in ("precond", "noise", "ops")} | {"diffusion_jax"}
    for line, module in imports(ROOT / "diffusion_jax" / f"{name}.py"):
        ok = module in siblings or module.split(".")[0] in allowed
        assert ok, f"diffusion_jax/{name}.py:{line} imports {module}"
