"""Compare runs of the MLPerf benchmark with the convergence of MLPerf's reference runs.

    python -m sd_jax.rcp runs/mlperf/0 runs/mlperf/1 ... --out=convergence

Each argument is a file of mllog lines, written by any program, or a folder with result.txt (a
workdir of sd_jax.mlperf) or result_*.txt (a submission). For each run the command prints the
samples to target: the number of training images when the run met the targets. It also prints the
mean without the fastest and slowest run, MLPerf's verdict (ruleset 5.0.0), and the FID and CLIP
score of these runs and of the reference runs. --out names a folder for fid.png and clip.png. The
exit code is 1 if the verdict is FAIL.

    python -m sd_jax.rcp runs/mlperf/* --package=submission --system=our_system.json

also writes a submission of ten runs, in the layout that MLCommons' package checker expects: the
logs, the code, and the system's description (from the logs, the manifests and the file --system).

    python -m sd_jax.rcp runs/*/* --tables

prints only Markdown tables of convergence and mean scores by batch size. Here the runs may differ
in batch size.
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
    """Read the results, print the comparison, and write the figures and the submission."""
    cli.start(alone=True)
    with cli.bad_input(ModuleNotFoundError):
        if len(argv) < 2:
            raise ValueError("name one or more results: python -m sd_jax.rcp runs/mlperf/0")
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
    """Write a submission from the logs of benchmark runs, and print what it still lacks.

    Args:
        out: The folder to write to.
        paths: The logs of the runs.
        described: A JSON file with fields of the system's description, or None.
    """
    system = pretrained.read_json(described) if described else {}
    folder, empty = package.write(out, paths, system)
    for path in paths:
        if package.values(mllog.read(path), "cache_clear") != [True]:
            print(f"{path}: the caches were not cleared, as the rules require (--cache_cleared)")
    if empty:
        print(f"{folder}/systems: fill in {', '.join(empty)}, or give them with --system")
    print(
        f"{folder}: check it with python -m mlperf_logging.package_checker {folder} training "
        f"{rules.VERSION}"
    )


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "Folder for fid.png and clip.png.")
    flags.DEFINE_string("package", None, "Folder for the submission of ten runs.")
    flags.DEFINE_bool("tables", False, "Print only tables of convergence by batch size.")
    flags.DEFINE_string("system", None, "JSON file with fields of the system's description.")
    cli.run(main)
