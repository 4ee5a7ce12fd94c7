"""Train a judge (see judge.py) on a captioned data set, and test its scores on damaged pictures.

Training takes minutes. A hash of the text selects about one in ten captions. All images with these
captions are held out, so training never sees a test caption. About half of the held-out captions
give the reference set of fd_judge. The others give the test set. The trained judge scores the test
set unchanged, blurred, with noise, and with shuffled captions. Optionally, it also scores images of
another data set with the same captions.
"""

import collections
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, Float, Int, UInt8, UInt32
from scipy import ndimage

from diffusion_jax.data import captions, sources
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.data.split import Subset
from diffusion_jax.logs.progress import Meter
from diffusion_jax.metrics import accuracy, fid, preprocess, table
from diffusion_jax.metrics.judges import judge
from diffusion_jax.metrics.judges.judge import CaptionMatcher, Pair
from diffusion_jax.text import hashed

HELD_OUT = 0.1
"""The share of captions that are held out of training."""
MAX_RECORDS = 200_000  # Largest number of records of a data set that are used.
_HELD_OUT_IMAGES = 1_000  # Largest number of images in the reference set and in the test set.
_CANDIDATES = 5_000  # Largest number of captions that are stored as a judge's candidates.
_BATCH = 128
_GROUP = 4  # Number of images with similar captions that are put into a batch together.
_GROUPED = 20_000  # Largest number of captions that are searched for similar ones.
_MAX_TOKENS = 64


class Split(NamedTuple):
    """The image indices of the training, reference and test sets, and all captions."""

    training: Int[np.ndarray, "N"]
    reference: Int[np.ndarray, "R"]
    test: Int[np.ndarray, "T"]
    captions: list[str]
    """The distinct captions, in the order in which they first occur."""


def train(data: str, *, size: int = 64, seen: int = 150_000, seed: int = 0, other: str = "") -> CaptionMatcher:
    """Train a judge on a captioned data set, and test it on the held-out captions.

    Args:
        data: The data set, "SOURCE:PATH::TEXT".
        size: The side in pixels to which the judge resizes images: a multiple of 16, at least 32.
        seen: Number of training images, counting repetitions.
        seed: Seed of the initial parameters and of the order of images.
        other: A data set with the same captions in another style, used as one more test.

    Raises:
        ValueError: `size` is not a multiple of 16 or is less than 32, or a data set is unreadable
            or too small, or no caption of `other` matches that of a test image.
        OSError: a data set is missing.
    """
    if size % judge.GRID or size < 2 * judge.GRID:
        raise ValueError(f"--size={size}: the size must be a multiple of {judge.GRID} and at least 32")
    pictures = sources.open_pictures(sources.named(data), size)
    parts = split(pictures)
    longest = max(len(text.split()) for text in parts.captions)
    max_tokens = min(_MAX_TOKENS, 2 * longest)  # Words such as "t-shirt" give two tokens.
    params = fit(Subset(pictures, parts.training), size, max_tokens, seen, seed)
    pairs = _read(pictures, parts.reference), _read(pictures, parts.test)
    card = {
        "data": data,
        "size": size,
        "seen": seen,
        "seed": seed,
        "training": len(parts.training),
        "heldout": HELD_OUT,
        "captions": len(parts.captions),
    }
    drawn = np.random.RandomState(0).permutation(len(parts.captions))[:_CANDIDATES]
    candidates = [parts.captions[i] for i in sorted(drawn)]
    trained = judge.of_params(params, size, max_tokens, candidates, pairs, card)
    # Scores of the test images, unchanged ("real") and with each kind of damage, as {set of images:
    # {table column: value}}. The columns are fd_judge, r1_judge and the ends of their intervals.
    images, captions = trained.test
    shuffled = [captions[i] for i in np.random.RandomState(0).permutation(len(captions))]
    sets: dict[str, Pair] = {
        "real": trained.test,
        "blurred by 1/32": Pair(blurred(images, 1 / 32), captions),
        "blurred by 1/16": Pair(blurred(images, 1 / 16), captions),
        "noise of 10 %": Pair(noisy(images, 0.1), captions),
        "noise of 30 %": Pair(noisy(images, 0.3), captions),
        "captions shuffled": Pair(images, shuffled),
    }
    if other:
        sets["another style"] = _same_captions(other, trained)
    read = judge.reader(trained, captions)
    real = fid.reference(judge.vectors(trained, trained.reference.images))
    card["scores"] = {name: scores(read, real, pair) for name, pair in sets.items()}
    return trained


def split(pictures: Pictures) -> Split:
    """Split the images by a hash of their captions, so that no caption is in two sets.

    A data set with more than MAX_RECORDS images is reduced to MAX_RECORDS evenly spaced ones.
    Raises ValueError if a set has too few images.
    """
    rows = _spread(np.arange(len(pictures)), MAX_RECORDS)
    texts = _first(pictures.texts(rows))
    share = {text: _hashed(text) for text in texts}
    shares = np.array([share[text] for text in texts])
    kinds = [shares >= HELD_OUT, shares < HELD_OUT / 2, (shares >= HELD_OUT / 2) & (shares < HELD_OUT)]
    training, reference, test = (rows[kind] for kind in kinds)
    few = min(len(reference), len(test))
    if few < 2 or len(training) < _BATCH:
        raise ValueError(
            f"{len(pictures)} pictures with {len(share)} different captions are too few to train a "
            "judge: about 50 different captions are needed, of which a tenth are held out of "
            f"training, and at least {_BATCH} pictures whose captions are not held out"
        )
    return Split(training, _spread(reference, _HELD_OUT_IMAGES), _spread(test, _HELD_OUT_IMAGES), list(share))


def fit(pictures: Pictures, size: int, max_tokens: int, seen: int, seed: int) -> Any:
    """Train both towers, and return their parameters as {"image": params, "text": params}.

    Images are resized to `size` x `size` pixels, and captions are cut or padded to `max_tokens`
    tokens. `seen` counts training images with repetitions. `seed` sets the initial parameters and
    the order of the images.
    """
    steps = max(1, seen // _BATCH)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, steps // 10, steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))
    keys = jax.random.split(jax.random.key(seed))
    params = {
        "image": judge.IMAGE.init(keys[0], jnp.zeros((1, size, size, 3)))["params"],
        "text": judge.TEXT.init(keys[1], jnp.zeros((1, max_tokens), jnp.uint32))["params"],
        "scale": jnp.log(1 / 0.07),  # CLIP's initial value.
    }
    prepare = preprocess.bicubic_square(size)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, images, ids):
        x = prepare(images) * (2 / 255) - 1
        loss, grads = jax.value_and_grad(contrast)(params, x, ids)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, meter = tx.init(params), Meter("pictures", steps * _BATCH)
    rows_of = batches(_first(pictures.texts(np.arange(len(pictures)))), seed)
    for number in range(1, steps + 1):
        images, texts = pictures.read(next(rows_of))
        ids = hashed.tokenize(_first(texts), max_tokens)["text_ids"]
        params, state, loss = step(params, state, images, ids)
        if number % 100 == 0:
            logging.info("step %d of %d: loss %.3f", number, steps, float(loss))
        meter.reach(number * _BATCH)
    return {name: params[name] for name in ("image", "text")}


def batches(texts: Sequence[str], seed: int) -> Iterator[Int[np.ndarray, "B"]]:
    """Yield the indices of the images in each batch, without end. `texts` holds all captions.

    One half of a batch are random images. The other half are groups of images with similar captions
    (see `similar`), so that the loss compares an image with captions that differ in one word, such
    as a colour. Without similar captions, the whole batch is random.
    """
    random = np.random.RandomState(seed)
    rows: dict[str, list[int]] = collections.defaultdict(list)
    for row, text in enumerate(texts):
        rows[text].append(row)
    captions = list(rows)
    groups = similar([captions[i] for i in random.permutation(len(captions))[:_GROUPED]])
    num_groups = _BATCH // 2 // _GROUP if groups else 0
    order = np.zeros(0, np.int64)
    while True:
        grouped = [
            random.choice(rows[caption])
            for i in random.randint(len(groups), size=num_groups)
            for caption in random.permutation(groups[i])[:_GROUP]
        ]
        count = _BATCH - len(grouped)
        while len(order) < count:
            order = np.concatenate([order, random.permutation(len(texts))])
        yield np.array([*grouped, *order[:count]])
        order = order[count:]


def similar(captions: Sequence[str]) -> list[list[str]]:
    """Return groups of captions that become equal if at most one word of each is removed."""
    groups = collections.defaultdict(list)
    for caption in captions:
        words = caption.split()
        for key in {caption, *(" ".join(words[:i] + words[i + 1 :]) for i in range(len(words)))}:
            groups[key].append(caption)
    return [group for group in groups.values() if len(group) > 1]


def contrast(params: Any, x: Float[Array, "B S S 3"], ids: UInt32[Array, "B L"]) -> Float[Array, ""]:
    """Return the InfoNCE loss, averaged over both directions (image to text, and text to image).

    `x` holds images in [-1, 1], and `ids` their hashed captions. If several images have equal
    captions, each caption matches all of these images.
    """
    towers: tuple[Any, Any] = (judge.IMAGE, judge.TEXT)
    images = judge.unit(towers[0].apply({"params": params["image"]}, x))
    texts = judge.unit(towers[1].apply({"params": params["text"]}, ids))
    logits = jnp.minimum(jnp.exp(params["scale"]), 100) * images @ texts.T
    alike = (ids[:, None] == ids[None]).all(-1)
    target = alike / alike.sum(1, keepdims=True)
    both = jax.nn.log_softmax(logits, 0) + jax.nn.log_softmax(logits, 1)
    return -(target * both).sum(axis=1).mean() / 2


def scores(read: judge.ReadPictures, real: fid.ReferenceFeatures, pair: Pair) -> dict[str, float]:
    """Compute fd_judge and r1_judge of the captioned images `pair`.

    Return {table column: value}, with the scores and the ends of their intervals, rounded to 4
    decimals. `read` is a function from judge.reader. `real` is the reference set of fd_judge.
    """
    vectors, right = read(*pair)
    both = {"fd_judge": fid.score(vectors, real), "r1_judge": accuracy.all_right(right)}
    return {k: round(v, 4) for n, one in both.items() for k, v in table.columns(n, one).items()}


def blurred(images: UInt8[np.ndarray, "N S S 3"], share: float) -> UInt8[np.ndarray, "N S S 3"]:
    """Blur images by a Gaussian filter whose standard deviation is `share` x the image side."""
    sigma = share * images.shape[1]
    return ndimage.gaussian_filter(images, (0, sigma, sigma, 0))


def noisy(images: UInt8[np.ndarray, "N S S 3"], share: float) -> UInt8[np.ndarray, "N S S 3"]:
    """Add normal noise with a standard deviation of `share` times the white value, 255."""
    noise = np.random.RandomState(0).standard_normal(images.shape) * 255 * share
    return np.clip(np.rint(images + noise), 0, 255).astype(np.uint8)


def _same_captions(other: str, trained: CaptionMatcher) -> Pair:
    """Find images of another data set whose captions match those of the test images.

    Return these images with the matching test captions. Words that all captions of a data set
    share, such as the name of its style, are ignored. Raises ValueError if no caption matches.
    """
    pictures = sources.open_pictures(sources.named(other), trained.card["size"])
    rows = _spread(np.arange(len(pictures)), MAX_RECORDS)  # Those of `split`.
    texts = _first(pictures.texts(rows))
    row_of = dict(zip(_own_words(texts, texts), rows.tolist(), strict=True))
    words = _own_words(trained.test.captions, trained.candidates)
    pairs = [(row_of[key], caption) for key, caption in zip(words, trained.test.captions, strict=True) if key in row_of]
    if not pairs:
        raise ValueError(
            f"no image of --other={other} has the caption of a test image: choose a data set with the same captions"
        )
    rows, images, _ = pictures.usable(np.array([row for row, _ in pairs]))
    return Pair(images, [caption for row, caption in pairs if row in set(rows.tolist())])


def _own_words(captions: Sequence[str], among: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the words of each caption, except those that occur in every caption of `among`."""
    shared = set.intersection(*(set(text.split()) for text in among))
    return [tuple(word for word in text.split() if word not in shared) for text in captions]


def _read(pictures: Pictures, rows: Int[np.ndarray, "N"]) -> Pair:
    _, images, texts = pictures.usable(rows)
    return Pair(images, _first(texts))


def _first(texts: Sequence[Any]) -> list[str]:
    return [str(captions.first(text)) for text in texts]


def _spread(rows: Int[np.ndarray, "N"], most: int) -> Int[np.ndarray, "M"]:
    count = min(len(rows), most)
    return rows[np.arange(count) * len(rows) // count] if count else rows


def _hashed(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little") / 2**56
