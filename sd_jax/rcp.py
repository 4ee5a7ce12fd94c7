"""Compare runs of the MLPerf benchmark with the convergence of MLPerf's reference runs.

    python -m sd_jax.rcp runs/mlperf/0 runs/mlperf/1 ... --out=convergence

Each argument is a file of mllog lines, written by any program, or a folder with result.txt (a
workdir of sd_jax.mlperf) or result_*.txt (a submission to MLPerf). For each run, the command prints
the samples to target: the number of training images when the run first met the targets. It also
prints the mean without the fastest and the slowest run, MLPerf's verdict (ruleset 5.0.0), and the
FID and CLIP score of these runs and of the reference runs. --out names a folder for plots of both
scores, fid.png and clip.png. The exit code is 1 if the verdict is FAIL.
"""

import pathlib
import sys

from absl import flags

from diffusion_jax import cli
from sd_jax.mlperf import comparison, convergence

_FAILED_EXIT = 1


def main(argv: list[str]) -> None:
    """Compare the given runs with MLPerf's reference runs.

    Prints the comparison and, with --out, writes plots.
    """
    cli.start(alone=True)
    with cli.bad_input(ModuleNotFoundError):
        if len(argv) < 2:
            raise ValueError("no run is given: name workdirs or logs, as in python -m sd_jax.rcp runs/mlperf/0")
        runs = [convergence.read(path) for path in convergence.find(argv[1:])]
        samples = [run.samples_to_target for run in runs]
        verdict = convergence.judge(comparison.check_alike(runs), samples)
    print(comparison.describe(runs, verdict))
    with cli.bad_input():
        if out := flags.FLAGS.out:
            comparison.write(pathlib.Path(out), runs)
    sys.exit(0 if verdict.passed else _FAILED_EXIT)


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "Folder for the plots fid.png and clip.png.")
    cli.run_with_arguments(main)
