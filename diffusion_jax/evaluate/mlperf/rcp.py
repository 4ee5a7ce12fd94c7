"""Read the FID and CLIP scores of MLPerf's reference runs, to shade their range in plots."""

import csv
import pathlib

from diffusion_jax.evaluate.figures import Band

PATH = pathlib.Path(__file__).with_suffix(".csv")
"""A CSV file with 439 evaluations of MLCommons' reference runs of the text-to-image benchmark.

The runs have batch sizes 512, 1024 and 2048. Each evaluation scores 30,000 images of 512 pixels.
"""


def read_band(path: str | pathlib.Path = PATH) -> Band:
    """Return a band from the lowest to the highest FID of the reference runs at each CLIP score.

    CLIP scores are rounded to 0.01.
    """
    with open(path) as file:
        points = [(float(row["clip"]), float(row["fid"])) for row in csv.DictReader(file)]
    bins: dict[float, list[float]] = {}
    for clip, fid in points:
        bins.setdefault(round(clip * 100) / 100, []).append(fid)
    x = sorted(bins)
    return Band("MLPerf reference runs", x, [min(bins[b]) for b in x], [max(bins[b]) for b in x])
