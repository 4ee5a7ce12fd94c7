"""Compares runs of the MLPerf benchmark with the reference's convergence.

    python -m sd_jax.rcp runs/mlperf/0 runs/mlperf/1 ... --out=convergence

Each argument is a result file of mllog lines, of any program, or a folder that holds result.txt
(a workdir of sd_jax.mlperf) or result_*.txt (a submission). It prints each run's samples to target,
their olympic mean and MLPerf's verdict (ruleset 5.0.0), then FID and CLIP beside the reference's
curves. --out gets fid.png and clip.png. The exit code is 1 where the verdict is a fail.

    python -m sd_jax.rcp runs/mlperf/* --package=submission --system=our_system.json

also writes the submission of ten runs as MLCommons' package checker reads it: the logs, the
system's description (what logs and manifests say of it, and the fields of --system), the code.

    python -m sd_jax.rcp runs/*/* --tables

prints convergence by batch size and the mean curves alone, in Markdown, of runs of any batch sizes.
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from diffusion_jax import cli
from diffusion_jax.weights import pretrained
from sd_jax.mlperf import comparison, convergence, mllog, package, rules, tables

_FAILED_EXIT = 1


def main(argv: list[str]) -> None:
    """Reads, prints, and writes into --out."""
    cli.start(alone=True)
    with cli.bad_input(ModuleNotFoundError):
        if len(argv) < 2:
            raise ValueError("name one result or more: python -m sd_jax.rcp runs/mlperf/0")
        paths = convergence.find(argv[1:])
        runs = [convergence.read(path) for path in paths]
        if flags.FLAGS.tables:
            return print(tables.markdown(runs))
        samples = [run.samples_to_target for run in runs]
        verdict = convergence.judge(comparison.check_alike(runs), samples)
    print(comparison.describe(runs, verdict))
    with cli.bad_input():
        if out := flags.FLAGS.out:
            comparison.write(pathlib.Path(out), runs)
        if out := flags.FLAGS.package:
            pack(pathlib.Path(out), paths, flags.FLAGS.system)
    sys.exit(0 if verdict.passed else _FAILED_EXIT)


def pack(out: pathlib.Path, paths: Sequence[pathlib.Path], described: str | None) -> None:
    """Writes the submission of these logs, and says what it still lacks.

    `described` is a file with fields of the system's description.
    """
    system = pretrained.read_json(described) if described else {}
    folder, empty = package.write(out, paths, system)
    for path in paths:
        if package.values(mllog.read(path), "cache_clear") != [True]:
            print(f"{path} says that the caches were not cleared (--cache_cleared): no closed run")
    if empty:
        print(f"{folder}/systems: fill in {', '.join(empty)}, or give them with --system")
    print(f"{folder}: python -m mlperf_logging.package_checker {folder} training {rules.VERSION}")


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "Folder for fid.png and clip.png; default: none.")
    flags.DEFINE_string("package", None, "Folder for the submission of ten runs; default: none.")
    flags.DEFINE_bool("tables", False, "Print convergence by batch size, and nothing else.")
    flags.DEFINE_string("system", None, "JSON: fields of the system's description.")
    cli.run(main)
