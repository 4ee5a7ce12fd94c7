"""Define METRICS, the table of all scores. To add a score, write a function and add a line here.

Sweeps, evaluation during training and the metrics command look up their scores in METRICS. Tables,
figures and pages show the scores under the names and in the order of METRICS.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from diffusion_jax.metrics import accuracy, bootstrap, clip_score, fid, inception_score, mmd, neighbours
from diffusion_jax.metrics.bootstrap import Score
from diffusion_jax.metrics.cards import Card
from diffusion_jax.metrics.stats_files import Stats


class Metric(NamedTuple):
    """A score: the function that computes it, and settings for tables and figures."""

    label: str
    """Name of the metric in figures and pages. If it is "", they do not show the metric."""
    features: str
    """Name of the features that `score` takes.

    "inception", "inception_spatial", "inception_unbiased", "dinov2" and "clip_image" are image
    features. "clip" is the cosine between image and prompt. "pickscore", "hpsv2" and "aesthetic"
    are scores of single images (preferences.py). A trained judge gives "judge" (its
    image vectors) and "nearest" (whether an image is nearest to its own caption). The judge of the
    coloured digits gives "digits" (its features) and "right" (whether digit, ink and paper are
    right)."""
    score: Callable[..., Score]
    """Maps features of generated images to the score. If `reference` is set, `score` has a second
    argument: the value that `reference` returned for the real images."""
    reference: Callable[[Stats], Any] | None = None
    """Prepares statistics of real images as the second argument of `score`.

    The function returns None if the statistics lack the features that `score` needs. The field is
    None if `score` needs no real images."""
    lower_is_better: bool = False
    axis: str = ""
    """Label of the metric's axis in figures. Metrics with the same axis are shown in the same
    figure. By default, `label` is used."""
    group: str = ""
    """Name of the group of prompts whose pictures are scored (Scorer.groups). By default, the
    pictures of all prompts are scored."""
    least: int = 1
    """Smallest number of images that the metric needs."""
    public_weights: bool = False
    """Whether the public weights are part of the metric's definition. With other weights, the
    column's name contains the extractor's name."""
    by_name: bool = False
    """Whether sweeps compute the metric only on request, because it is slow or redundant."""

    @property
    def is_share(self) -> bool:
        """Whether the score is a share of the pictures, which is shown in per cent."""
        return self.features in ("right", "nearest")


def _moments(stats: Stats) -> fid.ReferenceFeatures:
    # With fewer images than dimensions, features are more exact than moments.
    return fid.reference(stats.gaussian if stats.features is None else stats.features)


def _features(stats: Stats) -> Any:
    return stats.features


def _spatial(stats: Stats) -> fid.ReferenceFeatures | None:
    return None if stats.spatial is None else fid.reference(stats.spatial)


def _spheres(stats: Stats) -> neighbours.RealFeatures | None:
    return None if stats.features is None else neighbours.RealFeatures(stats.features)


_ALL_RIGHT, _NEIGHBOURS = "share all right (digit, ink, paper)", "precision and recall"
_DENSITY = "density and coverage"
_PARTS = ("digit", "ink", "paper")  # The columns of the features "right".
METRICS: dict[str, Metric] = {
    "fid": Metric("FID", "inception", fid.score, _moments, True, least=2, public_weights=True),
    "fd_digits": Metric(
        "Fréchet distance (digits, prompts seen)", "digits", fid.score, _moments, True, group="seen", least=2
    ),
    "kid": Metric("KID", "inception", mmd.score_kid, _features, True, least=2, public_weights=True),
    "cmmd": Metric("CMMD", "clip_image", mmd.score_cmmd, _features, True),
    "clip_score": Metric("CLIP score", "clip", clip_score.score),
    "pickscore": Metric("PickScore", "pickscore", clip_score.score),
    "hpsv2": Metric("HPSv2", "hpsv2", clip_score.score),
    "aesthetic": Metric("LAION's aesthetic score", "aesthetic", clip_score.score),
    "seen_prompt_accuracy": Metric(
        "all right, prompts seen", "right", accuracy.all_right, axis=_ALL_RIGHT, group="seen"
    ),
    "heldout_prompt_accuracy": Metric(
        "all right, prompts never shown", "right", accuracy.all_right, axis=_ALL_RIGHT, group="heldout"
    ),
    "precision": Metric(
        "precision", "inception", neighbours.precision, _spheres, axis=_NEIGHBOURS, least=4, public_weights=True
    ),
    "recall": Metric(
        "recall", "inception", neighbours.recall, _spheres, axis=_NEIGHBOURS, least=4, public_weights=True
    ),
    "density": Metric(
        "density", "inception", neighbours.density, _spheres, axis=_DENSITY, least=6, public_weights=True, by_name=True
    ),
    "coverage": Metric(
        "coverage",
        "inception",
        neighbours.coverage,
        _spheres,
        axis=_DENSITY,
        least=6,
        public_weights=True,
        by_name=True,
    ),
    "fd_judge": Metric("Fréchet distance (judge)", "judge", fid.score, _moments, True, least=2),
    "r1_judge": Metric("own caption the nearest (judge)", "nearest", accuracy.all_right),
    "fd_dinov2": Metric("FD-DINOv2", "dinov2", fid.score, _moments, True, least=2),
    "dino_mmd": Metric("DINO-MMD", "dinov2", mmd.score_cmmd, _features, True),
    "fid_infinity": Metric(
        "FID at infinitely many images",
        "inception",
        fid.score_at_infinity,
        _moments,
        True,
        least=20,
        public_weights=True,
        by_name=True,
    ),
    "sfid": Metric("sFID", "inception_spatial", fid.score, _spatial, True, least=2, public_weights=True, by_name=True),
    "inception_score": Metric(
        "Inception Score", "inception_unbiased", inception_score.score, public_weights=True, by_name=True
    ),
} | {
    f"{group}_{part}_accuracy": Metric("", "right", accuracy.part_right(i), group=group)
    for group in ("seen", "heldout")
    for i, part in enumerate(_PARTS)
}


def column(name: str, card: Card) -> str:
    """Return the name of a metric's column.

    This is the metric's name, except if the metric is defined by the public weights but was
    computed with other weights, according to `card`. In that case, "fid" becomes "fd_EXTRACTOR",
    "fid_infinity" becomes "fd_EXTRACTOR_infinity", and any other NAME becomes "NAME_EXTRACTOR". So
    scores with different weights do not share a column.
    """
    if card["official"] or not METRICS[name].public_weights:
        return name
    if name.startswith("fid"):
        return name.replace("fid", f"fd_{card['extractor']}", 1)
    return f"{name}_{card['extractor']}"


def columns(name: str, score: Score, *, seed: int = 0, interval: bool = True) -> dict[str, float]:
    """Return the table columns of a score, keyed by column name.

    The value has the key NAME. The ends of its interval have the keys NAME_low and NAME_high; they
    are left out if `interval` is False or the score has no interval. An entry KEY of Score.more has
    the key NAME_KEY. `seed` is the seed of the bootstrap.
    """
    row = {name: score.value}
    if interval and score.each is not None:
        low, high = bootstrap.interval(score.each, score.value, seed=seed)
        row |= {f"{name}_low": low, f"{name}_high": high}
    row |= {f"{name}_{key}": value for key, value in (score.more or {}).items()}
    return row if score.decimals is None else {k: round(v, score.decimals) for k, v in row.items()}


def shown() -> dict[str, Metric]:
    """Return the metrics that figures show, keyed by column.

    A metric that is defined by the public Inception weights also has a second column and label, for
    scores that were computed with other weights.
    """
    standin = {"official": False, "extractor": "inception"}
    metrics = {}
    for name, metric in METRICS.items():
        if metric.label:
            metrics[name] = metric
            label = metric.label.replace("FID", "Fréchet distance")
            metrics.setdefault(column(name, standin), metric._replace(label=f"{label} (stand-in Inception)"))
    return metrics
