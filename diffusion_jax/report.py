"""One page of a run, or of several over one another: scores, pictures, cards, training.

    python -m diffusion_jax.report runs/quickstart [runs/other ...] --out=report.html
    python -m diffusion_jax.report runs/sd2_512 --rcp

It is the Sweeps and Training of the page (imagen_jax.web) in one file that needs no server and no
network, with what training and evaluation wrote into the workdirs by now.
"""

from absl import flags, logging

from diffusion_jax import cli
from diffusion_jax.evaluate.mlperf import rcp
from diffusion_jax.machine import files
from diffusion_jax.web import frozen


def main(argv: list[str]) -> None:
    """Reads the runs, writes the page."""
    cli.start(alone=True)
    with cli.bad_input():
        if len(argv) < 2:
            raise ValueError("name one workdir or more: python -m diffusion_jax.report RUN")
        bands = [rcp.read_band()] if flags.FLAGS.rcp else []
        out = files.path(flags.FLAGS.out or files.path(argv[1]) / frozen.PAGE)
        files.write_whole(out, frozen.page(argv[1:], bands))
    logging.info("wrote %s", out)


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "The page; default: report.html in the first run.")
    flags.DEFINE_bool("rcp", False, "Also MLPerf's reference runs, as a band.")
    cli.run(main)
