"""Make scorers. A scorer holds the prompts of an evaluation, and references for its scores."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float, UInt8

from diffusion_jax.config.settings import Evaluation
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.data import sources
from diffusion_jax.files import sheets
from diffusion_jax.metrics import cards, clip_towers, dinov2, extractors, fid, stats_files, table
from diffusion_jax.metrics.cards import Card
from diffusion_jax.metrics.features import gaussian
from diffusion_jax.metrics.judges import judge as own_judge
from diffusion_jax.metrics.judges import train as train_judge
from diffusion_jax.metrics.preferences import PREFERENCES, Preference
from diffusion_jax.metrics.stats_files import Stats
from diffusion_jax.metrics.table import METRICS

RealPictures = Callable[[Sequence[str]], tuple[UInt8[np.ndarray, "N H W 3"], Sequence[str]]]
"""Maps prompts to real pictures and the captions of these pictures.

A prompt without a real picture gets a picture with another caption."""
FeaturesByKind = dict[str, Float[np.ndarray, "N D"]]
"""Features with one row per picture, keyed by kind (Metric.features)."""
Scores = dict[str, dict[str, float]]
"""Maps names of references to scores, which are keyed by table column."""
OF_PROMPTS = (
    "reference",
    "inception",
    "inception_mode",
    "clip",
    "clip_reference",
    "dinov2",
    "dinov2_reference",
    "judge",
    *PREFERENCES,
)
"""Fields of the config group `evaluation` that name the files from which references are made."""
_NO_FEATURES = (
    "{} needs features that the reference file does not hold: write the file with python -m "
    "diffusion_jax.metrics stats --keep_features (for sfid, with --spatial)"
)
_SHOWN = 42  # Number of pictures on a sheet.


class Reference(NamedTuple):
    """What scores a picture: a function that extracts features, and features of real pictures."""

    card: Card
    """A record of everything that the scores depend on, except the scored model."""
    features: tuple[str, ...]
    """The kinds of features (Metric.features) that `extract` returns."""
    extract: Callable[[UInt8[np.ndarray, "B H W 3"], Sequence[str]], tuple[np.ndarray, ...]]
    """Maps (images, prompts) to one array of features [B, D] for each kind."""
    real: Stats | None = None
    """Statistics of real pictures, or None if the scores need no real pictures."""


class Scorer:
    """The prompts of an evaluation, with the references and metrics that score its pictures."""

    def __init__(
        self,
        prompts: Sequence[str],
        references: Mapping[str, Reference],
        metrics: Sequence[str] = (),
        *,
        groups: Mapping[str, slice] | None = None,
        shown: Sequence[int] = range(_SHOWN),
        real: RealPictures | None = None,
        guidance: Sequence[int | float] = (),
    ):
        """Store the arguments, and prepare the metrics.

        Args:
            prompts: the prompts.
            references: the references, keyed by name.
            metrics: keys of METRICS. By default, all metrics that the references allow, except
                those with by_name=True.
            groups: slices of the prompts, keyed by name. A metric scores the pictures of the slice
                that Metric.group names.
            shown: indices of the prompts whose pictures are on the contact sheet.
            real: maps prompts to real pictures and captions. None if there are no real pictures.
            guidance: the default guidance scales of a sweep. With (), the command's defaults apply.

        Raises:
            ValueError: one of `metrics` is unknown, needs features that no reference computes or
                that the real pictures lack, or needs more prompts than there are.
        """
        self.prompts, self.shown = list(prompts), [i for i in shown if i < len(prompts)]
        self.groups, self._real = {"": slice(None), **(groups or {})}, real
        self._references, self.guidance = dict(references), guidance
        self._owners = {name: key for key, one in references.items() for name in one.features}
        chosen = {}
        prepare = functools.cache(lambda owner, make: make(self._references[owner].real))
        for name in metrics or [n for n, metric in METRICS.items() if not metric.by_name]:
            try:
                chosen[name] = self._prepared(name, prepare)
            except LookupError as error:
                if metrics:
                    raise ValueError(error.args[0]) from error
        self._metrics = chosen

    @property
    def cards(self) -> dict[str, Card]:
        """The cards of the references, keyed by the reference's name."""
        return {name: reference.card for name, reference in self._references.items()}

    @property
    def picture_features(self) -> list[str]:
        """The first kind of features (Metric.features) of each reference with real pictures."""
        return [one.features[0] for one in self._references.values() if one.real is not None]

    @property
    def real_features(self) -> FeaturesByKind:
        """Stored features of the references' real pictures, keyed by kind (Metric.features).

        References that have only the mean and covariance of such features are left out.
        """
        real = {one.features[0]: one.real for one in self._references.values()}
        kept = {name: stats.features for name, stats in real.items() if stats is not None}
        return {name: rows for name, rows in kept.items() if rows is not None}

    def caption(self, i: int) -> str:
        """Return prompt i, with " (held out)" appended if it was held out of training."""
        held_out = i in range(len(self.prompts))[self.groups.get("heldout", slice(0))]
        return self.prompts[i] + (" (held out)" if held_out else "")

    def real_sheet(self) -> UInt8[np.ndarray, "H W 3"] | None:
        """Return a contact sheet of real pictures for the shown prompts.

        Return None if the scorer has no real pictures.
        """
        if self._real is None:
            return None
        images, captions = self._real([self.prompts[i] for i in self.shown])
        labels = [
            self.caption(i) if self.prompts[i] == caption else caption
            for i, caption in zip(self.shown, captions, strict=True)
        ]
        return sheets.contact_sheet(images, labels)

    def features(self, images: UInt8[np.ndarray, "B H W 3"], prompts: Sequence[str]) -> FeaturesByKind:
        """Compute all kinds of features of `images` in 0..255, which were drawn for `prompts`."""
        features = {}
        for one in self._references.values():
            features |= zip(one.features, one.extract(images, prompts), strict=True)
        return features

    def score(self, features: FeaturesByKind) -> Scores:
        """Compute all scores and the ends of their intervals from the features of all pictures.

        `features` must have a row for each prompt, in the order of the prompts.
        """
        scores: Scores = {name: {} for name in self._references}
        # Real.compared caches distances by the identity of the array, so make each array once.
        rows_of = functools.cache(lambda name, group: features[name][self.groups[group]])
        for name, prepared in self._metrics.items():
            metric = METRICS[name]
            owner = self._owners[metric.features]
            rows = rows_of(metric.features, metric.group)
            score = metric.score(rows, *([prepared] if metric.reference else []))
            column = table.column(name, self._references[owner].card)
            scores[owner] |= table.columns(column, score)
        return scores

    def _prepared(self, name: str, prepare: Callable[[str, Callable], object]) -> object:
        """Return the prepared statistics of real images for a metric, or None if it needs none.

        `prepare` maps (reference's name, Metric.reference) to the prepared statistics. Raises
        LookupError if the scorer does not support the metric.
        """
        metric = METRICS.get(name)
        if metric is None:
            raise LookupError(f"unknown metric {name!r}: choose from {', '.join(METRICS)}")
        if metric.features not in self._owners or metric.group not in self.groups:
            raise LookupError(
                f"{name} needs the features {metric.features}, but only {', '.join(self._owners)} "
                f"are available: set the weights that compute {metric.features}, or remove {name}"
            )
        if len(self.prompts) < metric.least:
            raise LookupError(
                f"{name} needs at least {metric.least} images, but there are only "
                f"{len(self.prompts)} prompts: add prompts"
            )
        if metric.reference is None:
            return None
        owner = self._owners[metric.features]
        real = self._references[owner].real
        prepared = None if real is None else prepare(owner, metric.reference)
        if prepared is None:
            raise LookupError(_NO_FEATURES.format(name))
        return prepared


def columns(scores: Scores) -> dict[str, float]:
    """Merge the scores of all references into one table row."""
    return {name: value for row in scores.values() for name, value in row.items()}


def own_scorer(source: str) -> Callable[..., Scorer] | None:
    """Return the function `open_scorer` of a data source's module, or None if it has none.

    A data source whose module has this function provides its own prompts and judge.
    """
    return getattr(sources.own_module(source), "open_scorer", None)


def open_scorer(source: str, size: int, prompts: Sequence[str], evaluation: Evaluation) -> Scorer:
    """Return the scorer that a config's evaluation group describes.

    Args:
        source: the config field data.source of the scored run.
        size: side of the pictures in pixels.
        prompts: the prompts. If there are none, the data source must provide prompts and a judge.
        evaluation: the config's evaluation group.

    Raises:
        FileNotFoundError: a file or folder that the evaluation group names does not exist.
        ValueError: there are no prompts and the data source provides none; there are no prompts,
            but the evaluation group sets a field that needs them; or `of_prompts` raises it.
    """
    if prompts:
        return of_prompts(size, prompts, evaluation)
    source_scorer = own_scorer(source)
    if source_scorer is None:
        reason = "there is no data source that provides prompts and a judge"
        if source:
            reason = f"the run's data.source is {source!r}, which provides no prompts and no judge"
        raise ValueError(
            f"{reason}: set prompts to a file, and set reference and inception for FID, or clip for the CLIP score"
        )
    check_unused("evaluation.", {name: getattr(evaluation, name) for name in OF_PROMPTS})
    return source_scorer(size, metrics=evaluation.metrics)


def check_unused(prefix: str, settings: Mapping[str, str]) -> None:
    """Raise ValueError if `settings` sets a field that needs a file of prompts.

    A data source's own scorer does not use these fields. In the message, `prefix` ("evaluation." or
    "--") precedes the names of fields.
    """
    for name in OF_PROMPTS:
        if settings[name]:
            raise ValueError(
                f"{prefix}{name} has no effect without a file of prompts: the run's data source "
                f"then uses its own prompts and judge. Set {prefix}prompts=FILE, or remove "
                f"{prefix}{name}"
            )


def of_prompts(size: int, prompts: Sequence[str], evaluation: Evaluation) -> Scorer:
    """Return a scorer for prompts from a file, with the references that the evaluation group names.

    Args:
        size: side of the pictures in pixels.
        prompts: the prompts.
        evaluation: the config's evaluation group.

    Raises:
        FileNotFoundError: a file or folder that the evaluation group names does not exist.
        ValueError: the group names neither weights nor a judge; of `reference` and `inception`, or
            of `dinov2` and `dinov2_reference`, only one is set; `clip_reference` is set without
            `clip`, or holds no features; `reference`, `dinov2_reference` or `clip_reference` was
            not computed with the weights `inception`, `dinov2` or `clip`; a file is damaged; or a
            metric is not possible (see Scorer).
    """
    reference, inception, clip = evaluation.reference, evaluation.inception, evaluation.clip
    preferred = {name: path for name in PREFERENCES if (path := getattr(evaluation, name))}
    networks = (inception, clip, evaluation.dinov2, evaluation.judge, *preferred)
    if not any(networks) and not reference:
        raise ValueError(
            "no score is possible: set reference and inception for FID, clip for the CLIP score, "
            "or judge (from metrics train_judge) for fd_judge and r1_judge"
        )
    if bool(reference) != bool(inception):
        raise ValueError("FID needs both reference (statistics of real images) and inception (weights): set both")
    if bool(evaluation.dinov2) != bool(evaluation.dinov2_reference):
        raise ValueError(
            "FD-DINOv2 needs both dinov2 (weights) and dinov2_reference (statistics, written by "
            "metrics stats --dinov2): set both"
        )
    if evaluation.clip_reference and not clip:
        raise ValueError("clip_reference is set, but clip is empty: CMMD needs both, from the same CLIP")
    card = {"image_size": (size, size), "n": len(prompts)}
    card["prompts"] = prompt_files.fingerprint(prompts)
    chosen: dict[str, Reference] = {}
    if inception:
        if len(prompts) < 2:
            raise ValueError("a Fréchet distance needs at least 2 images, but there is 1 prompt: add prompts")
        wanted = {METRICS[name].features for name in evaluation.metrics if name in METRICS}
        levels = ["2048", *(x for x in ("spatial", "unbiased") if f"inception_{x}" in wanted)]
        make = lambda mode: extractors.load_inception(inception, mode, "+".join(levels))
        mode = evaluation.inception_mode
        chosen["inception"] = _against("inception", reference, make, mode, card)
    if evaluation.dinov2:
        make = lambda mode: dinov2.load(evaluation.dinov2)
        chosen["dinov2"] = _against("dinov2", evaluation.dinov2_reference, make, "dgm_eval", card)
    if clip:
        towers = clip_towers.load(clip)
        chosen["clip"] = _alone("clip", Preference(towers.image, clip_towers.pair_cosines(towers)), card)
    if evaluation.clip_reference:
        make = lambda mode: clip_towers.load_image(clip, mode)
        clip_image = _against("clip_image", evaluation.clip_reference, make, "squash", card)
        if clip_image.real is None or clip_image.real.features is None:
            raise ValueError(
                "cmmd needs the features of single images, but clip_reference "
                f"({evaluation.clip_reference}) holds only statistics: write it again with `python "
                "-m diffusion_jax.metrics stats --clip=FOLDER --clip_mode=squash --keep_features`"
            )
        chosen["clip_image"] = clip_image
    for name, path in preferred.items():
        chosen[name] = _alone(name, PREFERENCES[name](path), card)
    real = None
    if evaluation.judge:
        trained = own_judge.load(evaluation.judge)
        chosen["judge"] = _trained(trained, prompts, card)
        real = own_judge.real_pictures(trained, size)
    return Scorer(prompts, chosen, evaluation.metrics, real=real)


def _against(name: str, path: str, make: Callable[[str], extractors.Extractor], mode: str, card: Mapping) -> Reference:
    """Return a reference that compares pictures with the statistics in the file `path`.

    Args:
        name: the kind of features.
        path: the file with statistics of real pictures.
        make: loads the extractor with the given preprocessing.
        mode: the preprocessing to use if the file has no card. Otherwise, the card names it.
        card: fields for the reference's card.
    """
    real = stats_files.read(path)
    stats_files.check_mode(path, real, mode, "inception_mode")
    extractor = make((real.card or {}).get("preprocessing", mode))
    stats_files.check(path, real, extractor)
    if real.features is None:
        logging.info("%s holds no features, so there is no KID, precision or recall", path)
    run = extractors.on_host(extractor)
    reference = cards.reference_name(path, real.gaussian.n)
    return Reference(
        cards.make_card(extractor, **card, reference=reference),
        (name, *[*extractor.parts][1:]),
        lambda images, prompts: tuple(extractors.split(extractor, run(images)).values()),
        real,
    )


def _trained(trained: own_judge.CaptionMatcher, prompts: Sequence[str], card: Mapping) -> Reference:
    """Return a reference that compares pictures with a trained judge's held-out pictures.

    The held-out pictures are shrunk to the size of the drawn pictures, which were drawn for
    `prompts`. `card` holds fields for the reference's card, including this size.
    """
    size = card["image_size"][0]
    at_size = lambda pair: pair._replace(images=own_judge.seen_at(pair.images, size))
    trained = trained._replace(reference=at_size(trained.reference), test=at_size(trained.test))
    read = own_judge.reader(trained, [*prompts, *trained.test.captions])
    vectors = own_judge.vectors(trained, trained.reference.images)
    real = gaussian(vectors)
    reference = f"held-out pictures of {trained.card['data']}, n {len(vectors)}"
    real_scores = train_judge.scores(read, fid.reference(real), trained.test)
    trained_card = cards.make_card(trained.image, **card, reference=reference) | {
        "captions_told_from": len({*trained.candidates, *prompts, *trained.test.captions}),
        **{f"{name}_of_real": value for name, value in real_scores.items()},
    }
    return Reference(trained_card, ("judge", "nearest"), read, Stats(real, vectors, trained_card))


def _alone(name: str, preference: Preference, card: Mapping) -> Reference:
    extract = lambda images, prompts: (preference.score(images, prompts),)
    return Reference(cards.make_card(preference.network, **card), (name,), extract)
