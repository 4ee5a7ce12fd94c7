"""Write one HTML page about a run or several: scores, pictures, cards and training curves.

    python -m diffusion_jax.report runs/quickstart [runs/other ...] --out=report.html
    python -m diffusion_jax.report runs/sd2_512 --rcp

The page holds the Sweeps and Training tabs of the web page (imagen_jax.web) in one file that needs
no server and no network, with the current content of the workdirs.
"""

import pathlib
from collections.abc import Sequence

from absl import flags, logging

from diffusion_jax import cli
from diffusion_jax.evaluate.mlperf import rcp
from diffusion_jax.machine import files
from diffusion_jax.web import frozen


def main(argv: list[str]) -> None:
    """Write the HTML page about the workdirs in `argv`."""
    cli.start(alone=True)
    with cli.bad_input():
        if len(argv) < 2:
            raise ValueError("give one or more workdirs: python -m diffusion_jax.report WORKDIR")
        bands = [rcp.read_band()] if flags.FLAGS.rcp else []
        out = files.path(flags.FLAGS.out or _default_out(argv[1:]))
        files.write_whole(out, frozen.page(argv[1:], bands))
    logging.info("wrote %s", out)


def _default_out(workdirs: Sequence[str]) -> pathlib.Path:
    """Return a path in the first workdir, with the names of the other workdirs in the file name."""
    first, *others = map(files.path, workdirs)
    page = pathlib.PurePath(frozen.PAGE)
    name = "_".join([page.stem, "with", *(path.name for path in others)]) if others else page.stem
    return first / f"{name}{page.suffix}"


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "The file; default: in the first workdir report.html, or "
                        "report_with_B.html for the runs A and B.")  # fmt: skip
    flags.DEFINE_bool("rcp", False, "Add MLPerf's reference runs as a band.")
    cli.run(main)
