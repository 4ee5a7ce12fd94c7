"""The Dockerfile: packages with hashes, a base image with a digest, and no root user."""

import pathlib
import re

import pytest

from launch import lock
from tests.imagen_jax.commands import ROOT

RECIPE = (ROOT / "launch" / "Dockerfile").read_text()
STAGES = {
    match[2]: (match[1], match[3])
    for match in re.finditer(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", RECIPE, re.M | re.S)
}
"""The base and the instructions of each stage."""


def instructions(stage):
    """Return all lines of a stage, after those of the stages that it is built from."""
    base, own = STAGES[stage]
    return (instructions(base) if base in STAGES else [f"FROM {base}"]) + own.splitlines()


@pytest.mark.parametrize("target", ["tpu", "cuda"])
def test_an_image_requires_hashes_and_a_digest_and_does_not_run_as_root(target):
    lines = instructions(target)
    installs = [line for line in lines if "pip" in line and line.startswith("RUN")]
    assert installs == [f"RUN pip install --require-hashes --no-deps -r {target}.txt"]
    assert lines[0] == "FROM ${BASE}" and "\nARG BASE\n" in RECIPE  # BASE has no default.
    (check,) = [line for line in lines if line.startswith("RUN case")]
    assert '"$BASE" in *@sha256:*) ;; *)' in check and "exit 1" in check
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000"]
    assert "RUN useradd --uid 1000 --create-home app" in lines


@pytest.mark.parametrize("target", ["tpu", "cuda"])
def test_every_package_of_the_images_is_pinned_with_one_hash(target):
    lines = (ROOT / "launch" / f"{target}.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9.-]+==[\w.+!]+ --hash=sha256:[0-9a-f]{64}", x) for x in lines)
    versions = dict(line.partition(" ")[0].split("==") for line in lines)
    assert len(versions) == len(lines) > 100
    pinned = {}
    for name in ("constraints.txt", "launch/constraints.txt"):
        for line in pathlib.Path(ROOT, name).read_text().splitlines():
            requirement, _, marker = line.partition(";")
            if "==" in requirement and (not marker or "3.12" in marker):
                package, version = requirement.strip().split("==")
                pinned[re.sub(r"[-_.]+", "-", package.partition("[")[0]).lower()] = version
    different = {n: (v, pinned.get(n)) for n, v in versions.items() if pinned.get(n, v) != v}
    assert different == {}
    assert {"jax", "gcsfs", "s3fs", "mlperf-logging", "flax"} <= versions.keys()
    assert ("libtpu" if target == "tpu" else "jax-cuda13-plugin") in versions


def test_lock_selects_the_wheel_for_the_images_python_and_glibc():
    wheel = lambda name, digest: {"url": f"https://x/{name}.whl", "hashes": {"sha256": digest}}
    wheels = [
        wheel("a-1-cp311-cp311-manylinux_2_17_x86_64", "old"),
        wheel("a-1-cp312-cp312-manylinux_2_38_x86_64", "new glibc"),
        arm := wheel("a-1-cp312-cp312-manylinux2014_aarch64", "arm"),
        wheel("a-1-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64", "right"),
        wheel("a-1-py3-none-any", "slow"),
    ]
    package = {"name": "a", "version": "1", "wheels": wheels}
    source = {"name": "b", "version": "2", "sdist": {"hashes": {"sha256": "source"}}}
    locked = list(lock.requirements({"packages": [package, source]}))
    assert locked == ["a==1 --hash=sha256:right", "b==2 --hash=sha256:source"]
    with pytest.raises(ValueError, match=r"a 1 has neither a wheel for Python 3.12 on Linux"):
        list(lock.requirements({"packages": [package | {"wheels": [arm]}]}))
