"""Compare runs of the MLPerf benchmark with the convergence of MLPerf's reference runs.

    python -m sd_jax.rcp runs/mlperf/0 runs/mlperf/1 ... --out=convergence

Each argument is a file of mllog lines, written by any program, or a folder with result.txt (a
workdir of sd_jax.mlperf) or result_*.txt (a submission). For each run, the command prints the
samples to target: the number of training images when the run first met the targets. It also prints
the mean without the fastest and the slowest run, MLPerf's verdict (ruleset 5.0.0), and the FID and
CLIP score of these runs and of the reference runs. --out names a folder for plots of both scores,
fid.png and clip.png. The exit code is 1 if the verdict is FAIL.

    python -m sd_jax.rcp runs/mlperf/* --package=submission --system=our_system.json

This command also writes a submission of ten runs, in the layout that MLCommons' package checker
expects: the logs, the code, and a description of the computer system. The description is read from
the logs, manifest.json in the workdirs, and the file given by --system.

    python -m sd_jax.rcp runs/*/* --tables

This command prints only Markdown tables of convergence and mean scores by batch size. The runs may
have different batch sizes.
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
    """Compare the given runs with MLPerf's reference runs.

    Prints the comparison, and writes plots (--out) and a submission (--package) if asked. With
    --tables, only prints tables.
    """
    cli.start(alone=True)
    with cli.bad_input(ModuleNotFoundError):
        if len(argv) < 2:
            raise ValueError(
                "no run is given: name workdirs or logs, as in python -m sd_jax.rcp runs/mlperf/0"
            )
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
    """Write a submission from the logs of benchmark runs, and print what is missing in it.

    Args:
        out: The folder to write to.
        paths: The logs of the runs.
        described: The path of a JSON file with fields of the system's description, or None.
    """
    system = pretrained.read_json(described) if described else {}
    folder, empty = package.write(out, paths, system)
    for path in paths:
        if package.values(mllog.read(path), "cache_clear") != [True]:
            print(
                f"{path} does not state that the system's caches were cleared, which MLPerf's "
                "rules require: clear them, and run sd_jax.mlperf with --cache_cleared"
            )
    if empty:
        print(
            f"in the description in {folder}/systems, these fields are empty: {', '.join(empty)}. "
            "Fill them in, or give them with --system=FILE"
        )
    print(
        f"the submission is in {folder}: check it with python -m mlperf_logging.package_checker "
        f"{folder} training {rules.VERSION}"
    )


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "Folder for the plots fid.png and clip.png.")
    flags.DEFINE_string("package", None, "Folder for a submission of ten runs.")
    flags.DEFINE_bool("tables", False, "Print only tables of convergence by batch size.")
    flags.DEFINE_string(
        "system", None, "JSON file with fields of the system's description, for --package."
    )
    cli.run_with_arguments(main)
