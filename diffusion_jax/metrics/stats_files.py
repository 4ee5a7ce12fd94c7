"""Statistics of features in .npz files: `mu` and `sigma` as every FID program has them.

Other programs leave the further keys alone: `n`, `card` (JSON), and `features` where they are kept.
"""

import io
import json
import os
from typing import Any, NamedTuple

import numpy as np

from diffusion_jax.machine import files, untrusted
from diffusion_jax.metrics.cards import Card
from diffusion_jax.metrics.extractors import Extractor
from diffusion_jax.metrics.features import Gaussian, Rows


class Stats(NamedTuple):
    """One side of a distance."""

    gaussian: Gaussian
    features: Rows | None
    card: Card | None
    """How the features were made; files of other programs do not say it: None."""


def write(path: str | os.PathLike[str], stats: Stats) -> None:
    """Writes a file, whole or not at all."""
    arrays: dict[str, Any] = {"mu": stats.gaussian.mean, "sigma": stats.gaussian.cov}
    if stats.gaussian.n is not None:
        arrays["n"] = np.array(stats.gaussian.n)
    if stats.card is not None:
        arrays["card"] = np.array(json.dumps(stats.card))
    if stats.features is not None:
        arrays["features"] = stats.features
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # Covariances do not compress.
    files.write_whole(path, buffer.getvalue())


def read(path: str | os.PathLike[str]) -> Stats:
    """FileNotFoundError, or ValueError for another or a damaged file. Nothing is unpickled."""
    file = files.local(path)
    if not file.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        with file.open("rb") as file:
            contents = untrusted.read_archive(file)
    except Exception as error:  # Damaged files fail in many ways of their own.
        raise ValueError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    mean, cov = contents.get("mu"), contents.get("sigma")
    if mean is None or cov is None or cov.shape != (mean.size, mean.size):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in contents.items())
        raise ValueError(f"{path} holds no mu [D] and sigma [D, D], but {shapes}")
    if not (np.isfinite(mean).all() and np.isfinite(cov).all()):
        raise ValueError(f"{path} holds values that are not finite")
    n = int(contents["n"]) if "n" in contents else None
    card = json.loads(str(contents["card"])) if "card" in contents else None
    moments = Gaussian(mean.astype(np.float64), cov.astype(np.float64), n)
    return Stats(moments, contents.get("features"), card)


def check(path: str | os.PathLike[str], stats: Stats, extractor: Extractor) -> None:
    """ValueError unless statistics are of this extractor, as far as they say."""
    width = stats.gaussian.mean.size
    if width != extractor.width:
        raise ValueError(
            f"{path} is of {width} dimensions, and the extractor {extractor.name} has "
            f"{extractor.width}: it is of another extractor or level"
        )
    for field in ("extractor", "weights", "preprocessing") if stats.card else ():
        theirs, ours = (stats.card or {}).get(field), getattr(extractor, _FIELDS[field])
        if theirs != ours:
            raise ValueError(
                f"{path} is of {field} {theirs}, and the images would be of {ours}: make both with "
                "the same"
            )


_FIELDS = {"extractor": "name", "weights": "weights", "preprocessing": "preprocessing"}
