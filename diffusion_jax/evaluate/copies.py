"""Find drawn pictures that may be copies of training pictures (`evaluate --copies`).

The distance of two pictures is the distance between their features. If a model copies nothing, its
pictures are about as far from the nearest training pictures as real pictures that were not in
training (unseen pictures). A drawn picture counts as close if it is closer to a training picture
than 95 % of the unseen pictures are. About 5 % of a model's pictures are therefore close even if
the model copies nothing.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jaxtyping import Float, Int, UInt8

from diffusion_jax.data import sources
from diffusion_jax.data.captions import first
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.evaluate import drawn_features
from diffusion_jax.evaluate.scorers import FeaturesByKind, Scorer
from diffusion_jax.files import sheets, untrusted
from diffusion_jax.logs import progress
from diffusion_jax.metrics import bootstrap, neighbours

TABLE = "copies.csv"
CLOSE = 0.05
"""A picture is close if its distance to the nearest training picture is below this quantile of the
unseen pictures' distances."""
_BATCH, _PAIRS, _COLUMNS = 64, 16, 8
Redraw = Callable[[Sequence[int]], UInt8[np.ndarray, "B H W 3"]]
"""Maps indices of drawn pictures to these pictures, which it draws again."""


class Nearest(NamedTuple):
    """The distance of each picture to its nearest training picture, and that picture's index."""

    distances: Float[np.ndarray, "N"]
    indices: Int[np.ndarray, "N"]


class Training:
    """The training pictures and their features, to which other pictures are compared.

    The other pictures are drawn pictures, and unseen pictures: real ones that were not in training.
    """

    def __init__(self, pictures: Pictures, scorer: Any, unseen: Pictures | None = None):
        """Store the arguments. The features of the pictures are computed on first use.

        Args:
            pictures: The training pictures, in the size of the drawn pictures.
            scorer: The Scorer whose references compute the features, or an object with its fields
                prompts and picture_features and its method features.
            unseen: Real pictures that were not in training, in the size of the drawn pictures. If
                None, the scorer's stored features of real pictures are used.
        """
        self._pictures, self._scorer, self._unseen = pictures, scorer, unseen

    @functools.cached_property
    def _rows(self) -> FeaturesByKind:
        keys = [*self.unseen_features]
        return _features("training pictures", self._pictures, self._scorer, keys)

    @functools.cached_property
    def unseen_features(self) -> FeaturesByKind:
        """Features of the unseen pictures, keyed by kind of features (Metric.features)."""
        if self._unseen is None:
            return self._scorer.real_features
        keys = self._scorer.picture_features
        return _features("unseen pictures", self._unseen, self._scorer, keys)

    @functools.cached_property
    def unseen(self) -> dict[str, Nearest]:
        """The nearest training picture of each unseen picture, keyed by kind of features."""
        return {key: self.nearest(key, rows) for key, rows in self.unseen_features.items()}

    def nearest(self, key: str, rows: Float[np.ndarray, "N D"]) -> Nearest:
        """Find the nearest training picture of each picture whose features are a row of `rows`.

        `key` is the kind of features.
        """
        return Nearest(*neighbours.nearest(rows, self._rows[key]))

    def describe(self, key: str, nearest: Nearest) -> dict[str, Any]:
        """Return a row of copies.csv, which compares drawn pictures with unseen pictures.

        `nearest` holds the nearest training pictures of the drawn pictures, for features of the
        kind `key`. The row's columns are the kind of features, the numbers of drawn and training
        pictures, the median distances of drawn and of unseen pictures, and the share of drawn
        pictures that are close, with its confidence interval.
        """
        unseen = self.unseen[key].distances
        close = (nearest.distances < np.quantile(unseen, CLOSE)).astype(np.float64)
        low, high = bootstrap.interval(close, close.mean())
        return {
            "features": key,
            "drawn": len(close),
            "training": len(self._pictures),
            "median_distance": float(np.median(nearest.distances)),
            "median_distance_of_unseen": float(np.median(unseen)),
            "close": float(close.mean()),
            "close_low": low,
            "close_high": high,
        }

    def sheet(self, nearest: Nearest, draw: Redraw, prompts: Sequence[str] = ()) -> UInt8[np.ndarray, "H W 3"]:
        """Return a contact sheet of the 16 drawn pictures that are closest to training pictures.

        Each drawn picture is above its nearest training picture. With fewer than 16 drawn pictures,
        the sheet shows at most 8 of them, in one row. `prompts` holds the prompt of each drawn
        picture for the labels; () leaves them out.
        """
        shown = _PAIRS if len(nearest.distances) >= _PAIRS else _COLUMNS
        closest = np.argsort(nearest.distances, kind="stable")[:shown]
        real, texts = self._pictures.read(nearest.indices[closest])
        drawn = draw(closest.tolist())
        labels = [f"distance {distance:.3g}" for distance in nearest.distances[closest]]
        if prompts:
            labels = [f"{prompts[i]} ({label})" for i, label in zip(closest, labels, strict=True)]
        captions = [t if isinstance(t, str) else "training picture" for t in map(first, texts)]
        images, lines = [], []
        for start in range(0, len(closest), _COLUMNS):
            row = slice(start, start + _COLUMNS)
            images += [*drawn[row], *real[row]]
            lines += [*labels[row], *captions[row]]
        columns = min(_COLUMNS, len(closest))
        return sheets.contact_sheet(np.stack(images), lines, columns=columns)


def open_training(name: str, unseen: str, scorer: Scorer, size: int) -> Training | None:
    """Open the training pictures that --copies names. Return None if --copies is "".

    Args:
        name: The value of --copies: the training pictures, SOURCE:PATH or SOURCE:PATH::TEXT.
        unseen: The value of --unseen: real pictures that were not in training, SOURCE:PATH or
            SOURCE:PATH::TEXT. For "", the scorer's stored features of real pictures are used.
        scorer: The scorer whose references compute the features.
        size: The side in pixels to which the pictures are resized.

    Raises:
        ValueError: A source is unknown or empty, no reference has real pictures, there are no
            unseen pictures, --unseen is set without --copies, or the job has several processes.
    """
    if not name:
        if unseen:
            raise ValueError(f"--unseen={unseen} is used by --copies only: add --copies, or remove --unseen")
        return None
    if jax.process_count() > 1:
        raise ValueError(
            f"--copies={name} needs a single process: repeat the command in one process, which "
            "reuses all features that were saved"
        )
    if not scorer.picture_features:
        raise ValueError(f"--copies={name} needs features of pictures: add --reference or --judge")
    if not unseen and not scorer.real_features:
        raise ValueError(
            f"--copies={name} also needs real pictures that were not in training, but no reference "
            "file holds features of real pictures: name such pictures with --unseen, or write the "
            "reference with metrics stats --keep_features"
        )
    opened = _open("copies", name, size)
    return Training(opened, scorer, _open("unseen", unseen, size) if unseen else None)


def _open(flag: str, name: str, size: int) -> Pictures:
    with untrusted.naming(f"--{flag}={name}"):
        return sources.open_pictures(sources.named(name), size)


def write(
    out: pathlib.Path, sheet: str, training: Training, features: FeaturesByKind, draw: Redraw
) -> list[dict[str, Any]]:
    """For each kind of features, write a sheet of the drawn pictures closest to training pictures.

    The sheet shows each of these drawn pictures with its nearest training picture. Return one row
    of copies.csv per kind of features.

    Args:
        out: The folder of the sheets.
        sheet: The end of a sheet's file name, after "copies_KIND_".
        training: The training pictures.
        features: The features of the drawn pictures, keyed by kind (Metric.features).
        draw: Draws the pictures with the given indices again.
    """
    rows = []
    for key in training.unseen:
        nearest = training.nearest(key, features[key])
        rows.append(training.describe(key, nearest))
        sheets.write_png(out / f"copies_{key}_{sheet}", training.sheet(nearest, draw))
        logging.info(
            "copies, by %s features: a share of %.3g of the drawn pictures (confidence interval: "
            "%.3g to %.3g) is closer to a training picture than %g %% of the unseen pictures are",
            key,
            *(rows[-1][name] for name in ("close", "close_low", "close_high")),
            100 * (1 - CLOSE),
        )
        if rows[-1]["median_distance_of_unseen"] == 0:
            logging.warning(
                "copies, by %s features: this share says nothing, because at least half of the "
                "pictures that should be unseen are training pictures. With --unseen, name "
                "pictures that the model was not trained on",
                key,
            )
    return rows


def _features(name: str, pictures: Pictures, scorer: Any, keys: Sequence[str]) -> FeaturesByKind:
    total, parts = len(pictures), []
    meter = progress.Meter(name, total)
    for start in range(0, total, _BATCH):
        rows = np.arange(start, min(start + _BATCH, total))
        images, _ = pictures.read(drawn_features.filled(rows, _BATCH))
        features = scorer.features(images, [scorer.prompts[0]] * _BATCH)
        parts.append({key: features[key][: len(rows)] for key in keys})
        meter.add(len(rows))
    return {key: np.concatenate([part[key] for part in parts]) for key in keys}
