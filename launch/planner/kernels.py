"""Cycles of attention's Pallas kernels, of which the TPU compiler makes no estimate.

A kernel is one loop over its grid, unrolled inside, so that it takes about as many cycles as a step
has instruction bundles, times the steps. The bundles are those of the compiler's last schedule
(libtpu's dump, "schedule-analysis_final_bundles"), of a program that holds the kernel alone.
Stalls are left out, and what a step skips is counted.

    python -m launch.planner.kernels v5e 1024 1152 64

compiles a forward and a backward kernel, of so many queries and keys and that width, and prints
their bundles as JSON: a process of its own, since libtpu reads where to dump but once.
"""

import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diffusion_jax.machine import sharding
from diffusion_jax.nn import attention
from launch.planner import compiling, hlo
from launch.planner.hlo import Instruction

_OPERANDS = re.compile(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}")


class Grid(NamedTuple):
    """What a call of splash attention works on."""

    queries: int
    keys: int
    head_dim: int
    steps: int
    backward: bool


def cycles(kind: str, instruction: Instruction) -> float | None:
    """Bundles times steps of a kernel of attention; None for any other kernel."""
    grid = grid_of(instruction)
    if grid is None:
        return None
    return bundles(kind, grid.queries, grid.keys, grid.head_dim)[grid.backward] * grid.steps


def grid_of(instruction: Instruction) -> Grid | None:
    """Read from the operands of splash attention: masks [N, T blocks, S blocks], q, k [..., K]."""
    match = re.match(r"splash_mha_(fwd|dkv)", instruction.name)
    operands = _OPERANDS.search(instruction.rest)
    if not match or not operands:
        return None
    mask, _, q, k, *_ = hlo.arrays(operands[1])
    *rows, queries, head_dim = q.sizes
    steps = math.prod(rows) * math.prod(mask.sizes[-2:])
    return Grid(queries, k.sizes[-2], head_dim, steps, match[1] == "dkv")


@functools.cache
def bundles(kind: str, queries: int, keys: int, head_dim: int) -> tuple[int, int]:
    """Of a step forwards and backwards; kept beside JAX's programs, since it takes 15 s."""
    words = [kind, str(queries), str(keys), str(head_dim)]

    def measure() -> list[int]:
        command = [sys.executable, "-m", "launch.planner.kernels", *words]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise ValueError(f"a kernel of attention cannot be compiled: {ended.stderr[-2000:]}")
        return json.loads(ended.stdout.splitlines()[-1])

    forward, backward = compiling.kept("kernel", [*words, *versions()], measure)
    return forward, backward


def versions() -> list[str]:
    """What the bundles depend on: compilers, and the sizes of blocks."""
    return [*compiling.versions(), pathlib.Path(attention.__file__).read_text()]


def main() -> None:
    """Compiles the two kernels and prints their bundles."""
    kind, *sizes = sys.argv[1:]
    queries, keys, head_dim = map(int, sizes)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder}"
        compiling.prepare(1)
        mesh = compiling.one_device(kind)
        whole = sharding.replicated(mesh)
        array = lambda length: jax.ShapeDtypeStruct(
            (1, length, 1, head_dim), jnp.bfloat16, sharding=whole
        )

        def gradient(q: Any, k: Any, v: Any, cotangent: Any):
            attend = functools.partial(attention.attend, implementation="splash")
            return jax.vjp(attend, q, k, v)[1](cotangent)

        arrays = array(queries), array(keys), array(keys), array(queries)
        jax.jit(sharding.ambient(mesh, gradient)).lower(*arrays).compile()
        print(json.dumps([_bundles(pathlib.Path(folder), name) for name in ("fwd", "dkv")]))


def _bundles(folder: pathlib.Path, name: str) -> int:
    (path,) = folder.glob(f"*splash_mha_{name}*schedule-analysis_final_bundles.txt")
    return int(path.read_text().partition("total scheduled bundles:")[2].split()[0])


if __name__ == "__main__":
    main()
