"""Estimate the cycles of Pallas attention kernels, for which the TPU compiler has no estimates.

A kernel runs an unrolled body once per step of its grid, so it needs about as many cycles as grid
steps times instruction bundles per step. libtpu writes the number of bundles into its dump of the
final schedule ("schedule-analysis_final_bundles"), for a program that contains only this kernel.
The estimate ignores stalls, and it counts instructions that a step may skip.

    python -m benchmarks.profile.pallas v5e 1024 1152 64 masked

This command compiles the forward and the backward kernel for 1024 queries, 1152 keys with a mask
(or "unmasked") and head dimension 64 on a v5e, and prints the number of bundles of each as JSON.
The profile runs this command in a new process for each size, because libtpu reads the path of its
dump only once per process.
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

from benchmarks.profile import hlo
from benchmarks.profile.hlo import Instruction
from diffusion_jax.devices import sharding
from diffusion_jax.nn import attention
from launch.planner import compiling

_OPERANDS = re.compile(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}")


class KernelGrid(NamedTuple):
    """Sizes of one call of a splash attention kernel."""

    queries: int
    keys: int
    head_dim: int
    steps: int
    """Number of grid steps."""
    backward: bool
    """Whether the call is the backward kernel."""
    masked: bool
    """Whether the call has a mask of keys."""


def cycles(kind: str, instruction: Instruction) -> float | None:
    """Estimate the cycles of a splash attention call on a TPU of this kind, such as "v5e".

    Returns None for other instructions. Raises ValueError if the kernel cannot be compiled.
    """
    grid = grid_of(instruction)
    if grid is None:
        return None
    both = bundles(kind, grid.queries, grid.keys, grid.head_dim, grid.masked)
    return both[grid.backward] * grid.steps


def grid_of(instruction: Instruction) -> KernelGrid | None:
    """Return the sizes of a splash attention call; None for other instructions.

    The sizes come from the first four operands: a mask [N, T blocks, S blocks], another array, the
    queries [..., T, K] and the keys [..., S, K]. T is the number of queries, S the number of keys
    and K the head dimension.
    """
    match = re.match(r"splash_mha_(fwd|dkv)", instruction.name)
    operands = _OPERANDS.search(instruction.arguments)
    if not match or not operands:
        return None
    mask, _, (*rows, queries, head_dim), k, *_ = hlo.sizes(operands[1])
    steps = math.prod(rows) * math.prod(mask[-2:])
    masked = "segmented" in instruction.name
    return KernelGrid(queries, k[-2], head_dim, steps, match[1] == "dkv", masked)


@functools.cache
def bundles(kind: str, queries: int, keys: int, head_dim: int, masked: bool) -> tuple[int, int]:
    """Return the number of instruction bundles per grid step: (forward, backward kernel).

    Results are cached, because compiling the kernels takes 15 s. Raises ValueError if the kernels
    cannot be compiled.
    """
    words = [kind, str(queries), str(keys), str(head_dim), "masked" if masked else "unmasked"]

    def measure() -> list[int]:
        command = [sys.executable, "-m", "benchmarks.profile.pallas", *words]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            raise ValueError(f"an attention kernel cannot be compiled: {process.stderr[-2000:]}")
        return json.loads(process.stdout.splitlines()[-1])

    forward, backward = compiling.cached("kernel", [*words, *versions()], measure)
    return forward, backward


def versions() -> list[str]:
    """Return strings for cache keys: the compilers' versions and the source of attention.py."""
    return [*compiling.versions(), pathlib.Path(attention.__file__).read_text()]


def main() -> None:
    """Compile the forward and backward kernels, and print the number of bundles of each as JSON."""
    kind, *sizes, masked = sys.argv[1:]
    queries, keys, head_dim = map(int, sizes)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder}"
        compiling.prepare(1)
        mesh = compiling.one_device(kind)
        replicated = sharding.replicated(mesh)
        array = lambda length: jax.ShapeDtypeStruct((1, length, 1, head_dim), jnp.bfloat16, sharding=replicated)

        def gradient(q: Any, k: Any, v: Any, mask: Any, cotangent: Any):
            mask = mask if masked == "masked" else None
            attend = functools.partial(attention.attend, mask=mask, implementation="splash")
            return jax.vjp(attend, q, k, v)[1](cotangent)

        mask = jax.ShapeDtypeStruct((1, keys), jnp.bool_, sharding=replicated)
        arrays = array(queries), array(keys), array(keys), mask, array(queries)
        jax.jit(sharding.ambient(mesh, gradient)).lower(*arrays).compile()
        print(json.dumps([_bundles(pathlib.Path(folder), name) for name in ("fwd", "dkv")]))


def _bundles(folder: pathlib.Path, name: str) -> int:
    (path,) = folder.glob(f"*splash_mha_{name}*schedule-analysis_final_bundles.txt")
    return int(path.read_text().partition("total scheduled bundles:")[2].split()[0])


if __name__ == "__main__":
    main()
