"""What an installed project puts beside other people's packages, and that it works there."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = {"diffusion_jax", "imagen_jax", "sd_jax"}
OTHERS = ("configs", "launch", "benchmarks", "tests")
FILES = ("pyproject.toml", "requirements.txt", "README.md", "LICENSE")


def python(*arguments, code=0, **options):
    command = [sys.executable, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert ended.returncode == code, ended.stderr
    return ended.stdout


@pytest.mark.gate
@pytest.mark.slow
def test_a_wheel_holds_the_packages_alone_and_they_work_outside_the_checkout(tmp_path):
    source = tmp_path / "source"  # Building leaves files in the folder that is built.
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
    data = {name for name in names if not name.endswith(".py") and ".dist-info/" not in name}
    files = [path for package in PACKAGES for path in (source / package).rglob("*.*")]
    assert data == {str(path.relative_to(source)) for path in files if path.suffix != ".py"}
    outside = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path / "site")}}
    code = "import imagen_jax.cascade, sd_jax.drawing; print(sd_jax.drawing.__file__)"
    assert str(tmp_path) in python("-c", code, **outside)
    assert "--workdir" in python("-m", "imagen_jax.sample", "--helpshort", code=1, **outside)
