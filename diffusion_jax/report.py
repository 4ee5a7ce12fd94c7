"""One page of a run, or of several over one another: scores, pictures, cards, training.

    python -m diffusion_jax.report runs/quickstart [runs/other ...] --out=report.html
    python -m diffusion_jax.report runs/sd2_512 --rcp

The page is one file that needs no network: figures are SVG (points say their values under the
mouse), pictures stand inside it. It reads what training and evaluation wrote into the workdirs.
"""

import pathlib

from absl import flags, logging

from diffusion_jax import cli
from diffusion_jax.evaluate import report
from diffusion_jax.machine import files


def main(argv: list[str]) -> None:
    """Reads the runs, writes the page."""
    cli.start(alone=True)
    with cli.bad_input():
        if len(argv) < 2:
            raise ValueError("name one workdir or more: python -m diffusion_jax.report RUN")
        runs = [report.read_run(workdir) for workdir in argv[1:]]
        bands = [report.read_rcp()] if flags.FLAGS.rcp else []
        out = pathlib.Path(flags.FLAGS.out or pathlib.Path(argv[1]) / report.PAGE)
        files.write_whole(out, report.page(runs, bands))
    logging.info("wrote %s", out)


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "The page; default: report.html in the first run.")
    flags.DEFINE_bool("rcp", False, "Also MLPerf's reference runs, as a band.")
    cli.run(main)
