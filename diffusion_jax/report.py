"""Write an HTML page about one or more runs: scores, pictures, cards and training curves.

    python -m diffusion_jax.report runs/quickstart [runs/other ...] --out=report.html
    python -m diffusion_jax.report runs/sd2_512 --rcp

The HTML page holds the Sweeps and Training tabs of the web page (imagen_jax.web), with the content
that the workdirs have now. It is one file that needs no server and no network. If the pictures
take more than 16 MB, it holds small copies, which link to the pictures in the workdirs.
"""

import pathlib
from collections.abc import Sequence

from absl import flags, logging

from diffusion_jax import cli, files
from diffusion_jax.evaluate.mlperf import rcp
from diffusion_jax.web import frozen


def main(argv: list[str]) -> None:
    """Write the HTML page about the workdirs in `argv`."""
    cli.start(alone=True)
    with cli.bad_input():
        if len(argv) < 2:
            raise ValueError("give one or more workdirs: python -m diffusion_jax.report WORKDIR")
        bands = [rcp.read_band()] if flags.FLAGS.rcp else []
        out = files.path(flags.FLAGS.out or _default_out(argv[1:]))
        files.write_whole(out, frozen.page(argv[1:], bands, out.parent))
    logging.info("wrote %s", out)


def _default_out(workdirs: Sequence[str]) -> pathlib.Path:
    """Return the default path of the page, in the first workdir.

    The file name contains the names of the other workdirs: report_with_B.html.
    """
    first, *others = map(files.path, workdirs)
    page = pathlib.PurePath(frozen.PAGE)
    name = "_".join([page.stem, "with", *(path.name for path in others)]) if others else page.stem
    return first / f"{name}{page.suffix}"


if __name__ == "__main__":
    flags.DEFINE_string(
        "out",
        None,
        "The file to write; default: report.html in the first workdir (A/report_with_B.html for two runs A and B).",
    )
    flags.DEFINE_bool("rcp", False, "Show MLPerf's reference runs as a band in the plots.")
    cli.run_with_arguments(main)
