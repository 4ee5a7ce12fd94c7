"""A second process uses the compiled program of the first one."""

import os
import pathlib
import subprocess
import sys
import tarfile

import pytest

from tests.imagen_jax.test_earlier_runs import PACKED

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.gate
@pytest.mark.slow
def test_a_second_sample_command_compiles_nothing_even_for_another_guidance(tmp_path):
    with tarfile.open(PACKED / "imagen_de86e1f.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"), "JAX_PLATFORMS": "cpu"}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def draw(name, guidance):
        arguments = (f"--workdir={tmp_path}/imagen_de86e1f", f"--out={tmp_path}/{name}")
        text = ("--prompt=a red seven on gray paper", f"--guidance={guidance}", "--steps=2")
        command = [sys.executable, "-m", "imagen_jax.sample", *arguments, *text]
        subprocess.run(command, cwd=ROOT, env=os.environ | cache, check=True, capture_output=True)
        programs = {path.name for path in (tmp_path / "programs").glob("jit_from_seeds*-cache")}
        return (tmp_path / name / "seed_000000.png").read_bytes(), programs

    first, programs = draw("first", 2)
    other, programs_then = draw("second", 3)
    assert len(programs) == 1 and programs_then == programs and other != first
