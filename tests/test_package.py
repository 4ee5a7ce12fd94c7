"""The installed package: its files, requirements, and that it works outside the checkout."""

import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import numpy as np
import pytest

import diffusion_jax
from diffusion_jax import cli

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = {"diffusion_jax", "imagen_jax", "sd_jax"}
OTHERS = ("configs", "launch", "benchmarks", "tests")
FILES = ("pyproject.toml", "README.md", "LICENSE")


def python(*arguments, code=0, **options):
    command = [sys.executable, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert ended.returncode == code, ended.stderr
    return ended.stdout


def test_requirements_txt_lists_the_dependencies_and_the_extra_train():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    required = [line.partition(" #")[0] for line in lines if line and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert required == project["dependencies"] + project["optional-dependencies"]["train"]


def test_importing_drawing_and_training_needs_only_the_core_dependencies():
    """Importing a package fails if sys.modules maps it to None."""
    train = "array_record clu datasets grain jinja2 matplotlib pyarrow sklearn starlette"
    absent = [*train.split(), "tensorboard", "tensorflow", "tensorflow_datasets", "uvicorn"]
    modules = "imagen_jax.cascade imagen_jax.web imagen_jax.train imagen_jax.evaluate"
    modules += " sd_jax.drawing sd_jax.train launch.plan launch.gke"
    code = f"import sys; sys.modules.update(dict.fromkeys({absent}))"
    python("-c", f"{code}; import {', '.join(modules.split())}; import diffusion_jax.text.tokenize", cwd=ROOT)


def test_the_newest_release_in_the_changelog_matches_the_version():
    releases = re.findall(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == diffusion_jax.__version__


@pytest.mark.parametrize(("package", "remedy"), [("grain", "-r requirements.txt"), ("uvicorn", '-e ".[web]"')])
def test_a_missing_package_is_a_one_line_error_with_the_pip_command(package, remedy, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as ended, cli.bad_input():
        importlib.import_module(package)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert package in error and error.endswith(f": run pip install {remedy}\n")


def test_memory_that_cannot_be_allocated_is_a_one_line_error_with_exit_code_1(capsys):
    with pytest.raises(SystemExit) as ended, cli.bad_input():
        np.empty(2**60, np.uint8)
    error = "error: out of memory: Unable to allocate 1.00 EiB for an array with shape "
    assert capsys.readouterr().err.startswith(error) and ended.value.code == 1


def test_a_missing_module_of_this_project_is_not_reported_as_bad_input():
    with pytest.raises(ModuleNotFoundError, match="absent"), cli.bad_input():
        importlib.import_module("diffusion_jax.absent")


@pytest.mark.gate
@pytest.mark.slow
def test_a_wheel_holds_only_the_packages_and_works_outside_the_checkout(tmp_path):
    source = tmp_path / "source"  # Building leaves files in the source folder.
    for name in (*PACKAGES, *OTHERS):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    build = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    python(*build, "-w", tmp_path, source)
    shutil.rmtree(source / "build")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == PACKAGES
    assert f"imagen_sd_jax-{diffusion_jax.__version__}.dist-info" in folders
    data = {name for name in names if not name.endswith(".py") and ".dist-info/" not in name}
    files = [path for package in PACKAGES for path in (source / package).rglob("*.*")]
    assert data == {str(path.relative_to(source)) for path in files if path.suffix != ".py"}
    outside = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path / "site")}}
    code = "import imagen_jax.cascade, sd_jax.drawing; print(sd_jax.drawing.__file__)"
    assert str(tmp_path) in python("-c", code, **outside)
    assert "--workdir" in python("-m", "imagen_jax.sample", "--helpshort", **outside)
