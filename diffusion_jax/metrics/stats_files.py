"""Read and write statistics of features in .npz files.

The keys `mu` and `sigma` hold the mean and covariance, as in the files of other FID programs. The
additional keys `n` (number of images), `card` (JSON) and, optionally, `features` are ignored by
those programs. As in ADM's files, `mu_s` and `sigma_s` optionally hold the statistics of
Inception's spatial features.
"""

import io
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from diffusion_jax import files
from diffusion_jax.files import untrusted
from diffusion_jax.metrics.cards import Card
from diffusion_jax.metrics.extractors import Extractor
from diffusion_jax.metrics.features import FeatureRows, Gaussian

_ASYMMETRY = 1e-3  # Largest relative difference between a covariance and its transpose.


class Stats(NamedTuple):
    """Statistics of one set of images: mean, covariance, and optionally features and a card."""

    gaussian: Gaussian
    features: FeatureRows | None  # [n, D]
    card: Card | None
    """A record of how the features were computed. It is None for a file of another program."""
    spatial: FeatureRows | Gaussian | None = None
    """Inception's spatial features, or their mean and covariance, for sFID."""
    more: Mapping[str, FeatureRows] = {}
    """Other kinds of features, keyed by kind (Metric.features). They are not written to files."""


def write(path: str | os.PathLike[str], stats: Stats) -> None:
    """Write statistics to a file atomically."""
    arrays: dict[str, Any] = {"mu": stats.gaussian.mean, "sigma": stats.gaussian.cov}
    if stats.gaussian.n is not None:
        arrays["n"] = np.array(stats.gaussian.n)
    if stats.card is not None:
        arrays["card"] = np.array(json.dumps(stats.card))
    if stats.features is not None:
        arrays["features"] = stats.features
    if isinstance(stats.spatial, Gaussian):
        arrays |= {"mu_s": stats.spatial.mean, "sigma_s": stats.spatial.cov}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # Covariances do not compress.
    files.write_whole(path, buffer.getvalue())


def read(path: str | os.PathLike[str]) -> Stats:
    """Read statistics from a file. No code in the file is executed.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or holds no statistics.
    """
    file = files.local(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {path}: write it with python -m diffusion_jax.metrics stats")
    with untrusted.readable(path), file.open("rb") as opened:
        contents = untrusted.read_archive(opened)
    n = contents.get("n")
    n = int(n.item()) if n is not None and n.size == 1 else None
    card = json.loads(str(contents["card"])) if "card" in contents else None
    moments = _moments(path, contents, "mu", "sigma", n)
    spatial = _moments(path, contents, "mu_s", "sigma_s", n) if "mu_s" in contents else None
    return Stats(moments, contents.get("features"), card, spatial)


def check(path: str | os.PathLike[str], stats: Stats, extractor: Extractor) -> None:
    """Check that the statistics from the file `path` were computed with this extractor.

    Raises:
        ValueError: the number of features differs from the extractor's; or the card names a
            different extractor, different weights or different preprocessing. For statistics
            without a card, only the number of features is checked.
    """
    width, own_width = stats.gaussian.mean.size, [*extractor.parts.values(), extractor.width][0]
    if width != own_width:
        raise ValueError(
            f"{path} has {width} dimensions, but the extractor {extractor.name} has {own_width}: "
            "use the extractor and level with which the file was computed"
        )
    for field in ("extractor", "weights", "preprocessing") if stats.card else ():
        saved, current = (stats.card or {}).get(field), getattr(extractor, _FIELDS[field])
        if saved != current:
            raise ValueError(
                f"{path} was computed with {field} {saved}, but the images use {current}: use the same for both"
            )


def check_mode(path: str | os.PathLike[str], stats: Stats, mode: str, setting: str) -> None:
    """Raise ValueError if neither the card of the statistics nor `mode` names the preprocessing.

    `path` is the file of the statistics. `setting` is the flag or config field that sets `mode`.
    The message names both.
    """
    if stats.card is None and not mode:
        raise ValueError(
            f"{path} has no card that names the preprocessing: set {setting} to the preprocessing "
            "of the program that wrote the file: pytorch (pytorch-fid, MLPerf), tf (ADM, "
            "torch-fidelity), clean (clean-fid) or nemo (NeMo)"
        )


def _moments(path: str | os.PathLike[str], contents: Mapping[str, Any], mu: str, sigma: str, n: int | None) -> Gaussian:
    mean, cov = contents.get(mu), contents.get(sigma)
    if mean is None or cov is None or cov.shape != (mean.size, mean.size):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in contents.items())
        raise ValueError(f"{path} must hold {mu} [D] and {sigma} [D, D], but holds {shapes}")
    if not (np.isfinite(mean).all() and np.isfinite(cov).all()):
        raise ValueError(f"{path} holds values that are not finite: compute the statistics again")
    mean, cov = mean.ravel().astype(np.float64), cov.astype(np.float64)  # Some means are [1, D].
    if np.abs(cov - cov.T).max() > _ASYMMETRY * np.abs(cov).max() or np.diag(cov).min() < 0:
        raise ValueError(
            f"{sigma} in {path} is not a covariance (symmetric, without negative variances): "
            "compute the statistics again"
        )
    return Gaussian(mean, cov, n)


_FIELDS = {"extractor": "name", "weights": "weights", "preprocessing": "preprocessing"}
