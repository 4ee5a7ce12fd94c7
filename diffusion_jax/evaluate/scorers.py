"""Scorers: the prompts of an evaluation, the features of their pictures, the scores of these."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float, UInt8

from diffusion_jax.config.settings import Evaluation
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.examples.digits import judge as judges
from diffusion_jax.examples.digits import pictures as digits
from diffusion_jax.machine import sheets
from diffusion_jax.metrics import (
    cards,
    clip_score,
    clip_towers,
    dinov2,
    extractors,
    frechet,
    stats_files,
    table,
)
from diffusion_jax.metrics.cards import Card
from diffusion_jax.metrics.features import gaussian
from diffusion_jax.metrics.judges import judge as own_judge
from diffusion_jax.metrics.judges import train as train_judge
from diffusion_jax.metrics.stats_files import Stats
from diffusion_jax.metrics.table import METRICS

Real = Callable[[Sequence[str]], tuple[UInt8[np.ndarray, "N H W 3"], Sequence[str]]]
"""Real pictures and their captions, which are the prompts where there are pictures of these."""
Features = dict[str, Float[np.ndarray, "N D"]]
Scores = dict[str, dict[str, float]]
"""The columns of the table that each judge's features give."""
_OF_PROMPTS = ("reference", "inception", "clip", "clip_reference", "dinov2", "dinov2_reference",
               "judge")  # fmt: skip
_NO_FEATURES = (
    "{} needs the features of each real image, and the reference has their moments alone: make it "
    "with python -m diffusion_jax.metrics stats --keep_features"
)
_SHOWN = 42  # Pictures on a sheet.
_REAL = 4_000  # Real pictures of digits that generated ones are compared with.


class Judge(NamedTuple):
    """An extractor of pictures and prompts, and the real pictures that it compares with."""

    card: Card
    """All that its scores depend on besides the model that drew."""
    features: tuple[str, ...]
    """The names of what it extracts (see table.Metric)."""
    extract: Callable[[UInt8[np.ndarray, "B H W 3"], Sequence[str]], tuple[np.ndarray, ...]]
    """(images, prompts) to these features, [B, D] each."""
    real: Stats | None = None


class Scorer:
    """Prompts, and how the pictures drawn from them are scored."""

    def __init__(
        self,
        prompts: Sequence[str],
        judges: Mapping[str, Judge],
        metrics: Sequence[str] = (),
        *,
        groups: Mapping[str, slice] | None = None,
        shown: Sequence[int] = range(_SHOWN),
        real: Real | None = None,
    ):
        """`groups` are the rows of prompts of each kind, `shown` those whose pictures people see.

        `metrics` are keys of METRICS, by default all that the judges allow; ValueError for one that
        they do not.
        """
        self.prompts, self.shown = list(prompts), [i for i in shown if i < len(prompts)]
        self.groups, self._real = {"": slice(None), **(groups or {})}, real
        self._judges = dict(judges)
        self._owners = {name: key for key, judge in judges.items() for name in judge.features}
        self._metrics = self._chosen(metrics)

    @property
    def cards(self) -> dict[str, Card]:
        """The card of each judge."""
        return {name: judge.card for name, judge in self._judges.items()}

    def caption(self, i: int) -> str:
        """The prompt, and whether it was held out of training."""
        held_out = i in range(len(self.prompts))[self.groups.get("heldout", slice(0))]
        return self.prompts[i] + (" (held out)" if held_out else "")

    def real_sheet(self) -> UInt8[np.ndarray, "H W 3"] | None:
        """Real pictures beside those that people see, in their order; None where there are none."""
        if self._real is None:
            return None
        images, captions = self._real([self.prompts[i] for i in self.shown])
        same = [self.caption(i) if self.prompts[i] == caption else caption
                for i, caption in zip(self.shown, captions, strict=True)]  # fmt: skip
        return sheets.contact_sheet(images, same)

    def features(self, images: UInt8[np.ndarray, "B H W 3"], prompts: Sequence[str]) -> Features:
        """The features that all judges take of the pictures of these prompts, a row each."""
        features = {}
        for judge in self._judges.values():
            features |= zip(judge.features, judge.extract(images, prompts), strict=True)
        return features

    def score(self, features: Features) -> Scores:
        """The scores of the features of all pictures, with their intervals."""
        scores: Scores = {name: {} for name in self._judges}
        for name, reference in self._metrics.items():
            metric = METRICS[name]
            owner = self._owners[metric.features]
            rows = features[metric.features][self.groups[metric.group]]
            score = metric.score(rows, *([reference] if metric.reference else []))
            column = table.column(name, self._judges[owner].card)
            scores[owner] |= table.columns(column, score)
        return scores

    def _chosen(self, names: Sequence[str]) -> dict[str, object]:
        """The metrics of these names, or all that can be taken, and what each compares with."""
        chosen = {}
        for name in names or [n for n, metric in METRICS.items() if not metric.by_name]:
            try:
                chosen[name] = self._reference(name)
            except LookupError as error:
                if names:
                    raise ValueError(error.args[0]) from error
        return chosen

    def _reference(self, name: str) -> object:
        """The real side of a metric; LookupError that says why the metric cannot be taken."""
        metric = METRICS.get(name)
        if metric is None:
            raise LookupError(f"there is no metric {name!r}: there are {', '.join(METRICS)}")
        if metric.features not in self._owners or metric.group not in self.groups:
            raise LookupError(
                f"{name} is of features of {metric.features}, which nothing here extracts: these "
                f"have {', '.join(self._owners)}"
            )
        if len(self.prompts) < metric.least:
            raise LookupError(
                f"{name} needs {metric.least} images or more, and there are {len(self.prompts)}"
            )
        if metric.reference is None:
            return None
        real = self._judges[self._owners[metric.features]].real
        reference = None if real is None else metric.reference(real)
        if reference is None:
            raise LookupError(_NO_FEATURES.format(name))
        return reference


def columns(scores: Scores) -> dict[str, float]:
    """The scores of all judges in one row."""
    return {name: value for of_one in scores.values() for name, value in of_one.items()}


def open_scorer(source: str, size: int, prompts: Sequence[str], evaluation: Evaluation) -> Scorer:
    """The scorer of these prompts as a config's group says; without prompts, that of the digits.

    `size` is the pictures' side. ValueError for a data `source` that has no prompts of its own.
    """
    if prompts:
        return of_prompts(size, prompts, evaluation)
    if source != "digits":
        raise ValueError(
            f"the run's data.source is {source!r}: only 'digits' has prompts and a judge of its "
            "own, so give a file of prompts, and a reference with Inception's weights or CLIP's"
        )
    check_unused("evaluation.", {name: getattr(evaluation, name) for name in _OF_PROMPTS})
    return of_digits(size, metrics=evaluation.metrics)


def check_unused(prefix: str, given: Mapping[str, str]) -> None:
    """ValueError for files that pictures of the digits' own prompts are not compared with."""
    for name in _OF_PROMPTS:
        if given[name]:
            raise ValueError(
                f"{prefix}{name} is for pictures of a file of prompts, and the digits have a judge "
                f"of their own: give {prefix}prompts=FILE too, or leave it out"
            )


def of_prompts(size: int, prompts: Sequence[str], evaluation: Evaluation) -> Scorer:
    """Inception against a reference's statistics, and CLIP of each picture with its prompt.

    Without the public weights a distance is named after its extractor, never FID (see table).
    ValueError or FileNotFoundError if these cannot be.
    """
    reference, inception, clip = evaluation.reference, evaluation.inception, evaluation.clip
    known = (inception, clip, evaluation.dinov2, evaluation.judge)
    if bool(reference) != bool(inception) or not any(known):
        raise ValueError(
            "FID needs both the reference's statistics and Inception's weights, the CLIP score a "
            "CLIP, fd_judge and r1_judge a judge (metrics train_judge): give the two, the third or "
            "the fourth"
        )
    if bool(evaluation.dinov2) != bool(evaluation.dinov2_reference):
        raise ValueError(
            "FD-DINOv2 needs DINOv2's weights and its statistics of real images, a "
            "dinov2_reference that metrics stats --dinov2 makes: give both"
        )
    if evaluation.clip_reference and not clip:
        raise ValueError("a clip_reference, for CMMD, needs the CLIP that made it: give both")
    card = {"image_size": (size, size), "n": len(prompts)}
    card["prompts"] = prompt_files.fingerprint(prompts)
    chosen: dict[str, Judge] = {}
    if inception:
        if len(prompts) < 2:
            raise ValueError("1 prompt: a Fréchet distance needs 2 images or more")
        make = lambda mode: extractors.load_inception(inception, mode)
        chosen["inception"] = _against("inception", reference, make, "pytorch", card)
    if evaluation.dinov2:
        make = lambda mode: dinov2.load(evaluation.dinov2)
        chosen["dinov2"] = _against("dinov2", evaluation.dinov2_reference, make, "dgm_eval", card)
    if clip:
        chosen["clip"] = _pairs(clip_towers.load(clip), card)
    if evaluation.clip_reference:
        make = lambda mode: clip_towers.load_image(clip, mode)
        clip_image = _against("clip_image", evaluation.clip_reference, make, "squash", card)
        if clip_image.real is None or clip_image.real.features is None:
            raise ValueError(_NO_FEATURES.format("cmmd"))
        chosen["clip_image"] = clip_image
    real = None
    if evaluation.judge:
        made = own_judge.load(evaluation.judge)
        chosen["judge"], real = _own(made, prompts, card), own_judge.real_pictures(made, size)
    return Scorer(prompts, chosen, evaluation.metrics, real=real)


def _against(
    name: str,
    path: str,
    make: Callable[[str], extractors.Extractor],
    default_mode: str,
    card: Mapping,
) -> Judge:
    """Compares with the statistics in a file, by the preprocessing that its own card names."""
    real = stats_files.read(path)
    extractor = make((real.card or {}).get("preprocessing", default_mode))
    stats_files.check(path, real, extractor)
    if real.features is None:
        logging.info("%s keeps no features: no KID, precision or recall", path)
    run = extractors.on_host(extractor)
    known = cards.reference_name(path, real.gaussian.n)
    return Judge(
        cards.make_card(extractor, **card, reference=known), (name,),
        lambda images, prompts: (run(images),), real,
    )  # fmt: skip


def _own(made: own_judge.Judge, prompts: Sequence[str], card: Mapping) -> Judge:
    """A judge of the set's own, against its held-out pictures at the size of those drawn."""
    size = card["image_size"][0]
    at_size = lambda pair: pair._replace(images=own_judge.seen_at(pair.images, size))
    made = made._replace(reference=at_size(made.reference), test=at_size(made.test))
    read = own_judge.reader(made, [*prompts, *made.test.captions])
    vectors = own_judge.vectors(made, made.reference.images)
    real, known = gaussian(vectors), f"held-out pictures of {made.card['data']}, n {len(vectors)}"
    of_real = train_judge.scores(read, frechet.reference(real), made.test)
    own = cards.make_card(made.image, **card, reference=known) | {
        "captions_told_from": len({*made.candidates, *prompts, *made.test.captions}),
        **{f"{name}_of_real": value for name, value in of_real.items()},
    }
    return Judge(own, ("judge", "nearest"), read, Stats(real, vectors, own))


def _pairs(clip: clip_towers.Clip, card: Mapping) -> Judge:
    """The cosine of each picture with its prompt."""
    image, text = extractors.on_host(clip.image), extractors.on_host(clip.text)
    extract = lambda images, prompts: (
        clip_score.cosines(image(images), text(clip.tokenize(list(prompts)))),
    )
    return Judge(cards.make_card(clip.image, **card), ("clip",), extract)


def of_digits(
    size: int, num_seen: int = 1, num_heldout: int = 8, metrics: Sequence[str] = ()
) -> Scorer:
    """The coloured digits: a judge of prompts seen and never shown, and its features' distance.

    `size` is the pictures' side; `num_seen` and `num_heldout`, how many pictures a prompt gets.
    """
    judge, seen = judges.fit_judge(), digits.seen_prompts() * num_seen
    prompts = seen + digits.heldout_prompts() * num_heldout
    of_seen = list(itertools.islice(itertools.cycle(digits.seen_prompts()), _REAL))
    real = judge.features(judges.real_pictures(size, of_seen))
    right_on_real = judges.compare_on_real(judge, size).min(axis=1).mean()
    card = cards.make_card(
        judge, image_size=(size, size), n=len(prompts), prompts=prompt_files.fingerprint(prompts),
        reference=f"held-out digits, n {_REAL}",
    ) | {
        "images_seen": len(seen),
        "images_heldout": len(prompts) - len(seen),
        "judge_accuracy_on_real": round(float(right_on_real), 4),
    }  # fmt: skip
    extract = lambda images, prompts: (
        judge.features(images), judges.compare(judge(images), prompts)
    )  # fmt: skip
    every = max(1, len(seen) // 24)
    return Scorer(
        prompts,
        {"digits": Judge(card, ("digits", "right"), extract, Stats(gaussian(real), real, card))},
        metrics,
        groups={"seen": slice(len(seen)), "heldout": slice(len(seen), None)},
        shown=[*range(0, len(seen), every), *range(len(seen), len(seen) + 18)],
        real=lambda shown: (judges.real_pictures(size, shown), shown),
    )
