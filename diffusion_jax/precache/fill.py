"""Fill a store with the embeddings of captions, for `python -m diffusion_jax.precache`."""

import functools
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float, Int

from diffusion_jax import files
from diffusion_jax.config import settings
from diffusion_jax.config.settings import Data, Evaluation, Text
from diffusion_jax.data import captions, columns, engines, sources
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.data.engines import ALONE, Engine
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.precache import encode, lookup, store
from diffusion_jax.text import TextEncoder, registry

_BLOCK = 2**16  # Items whose captions are listed together.
_READ = 256  # Pictures whose captions are read together.
_SAMPLE = 1024  # Captions whose lengths are measured for the estimate.


class EncodingJob:
    """A text encoder and the captions to encode: those of a list of items."""

    def __init__(self, text: Text, encoder: TextEncoder, prompts: Sequence[str], data: Pictures | None = None):
        """Prepare to encode captions. The items are `prompts`, then the pictures of `data`.

        `text` is the config's text group. `prompts` holds the config's prompts, followed by the
        lines of a file of captions, if one is used.
        """
        self.text, self.encoder, self.prompts, self.data = text, encoder, prompts, data
        self.identity = lookup.identity(text, encoder)
        self.encode = functools.cache(functools.partial(encode.on_own_devices, encoder))
        """A function of (format, batch_tokens); it returns the function encode(texts) that
        encode.on_own_devices makes for this encoder."""

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.prompts) + len(self.data or ())

    def captions(self, items: Int[np.ndarray, "N"]) -> tuple[Int[np.ndarray, "M"], list[Any]]:
        """Return all captions of the items with these sorted indices, and the item of each."""
        first = len(self.prompts)  # Index of the first picture.
        texts = [self.prompts[i] for i in items[items < first].tolist()]
        rows = items[items >= first] - first
        if self.data is not None:
            for start in range(0, len(rows), _READ):
                texts += self.data.texts(rows[start : start + _READ])
        several = list(map(captions.every, texts))
        return np.repeat(items, list(map(len, several))), [one for each in several for one in each]


class EncodingOptions(NamedTuple):
    """Options of an encoding run, named like the flags of `python -m diffusion_jax.precache`."""

    format: str = "int8"
    shard_captions: int = 16384
    batch_tokens: int = 8192
    verify: bool = False
    engine: Engine = ALONE


def open_job(config: dict[str, Any], captions_file: str | None = None) -> EncodingJob:
    """Open a config's text encoder and captions.

    Args:
        config: The config as nested dictionaries.
        captions_file: A file of captions (see data.prompts.read), which replaces the config's data
            group. None uses the captions of the data group.

    Raises:
        ValueError: The config is invalid, or the captions cannot be read.
        OSError: A file is missing.
    """
    text = settings.read(Text, config["text"], "text")
    data = settings.read(Data, config["data"], "data")
    registry.check(text)
    if not text.store:
        raise ValueError("text.store is empty: name the folder to write to with --config.text.store=FOLDER")
    prompts, pictures = _prompts(config, data.source), None
    if captions_file is not None:
        prompts += prompt_files.read(captions_file, every=True, flag="--captions")
    else:
        pictures = sources.open_pictures(data, size=16)  # No image is decoded.
        if data.source == "synthetic":  # All pictures have one caption.
            prompts, pictures = [*prompts, *pictures.texts(np.arange(1))], None
    job = EncodingJob(text, registry.make_encoder(text), prompts, pictures)
    return engines.record_call(job, open_job, config, captions_file)


def estimate(job: EncodingJob, format: str) -> str:
    """Return a line with the number of captions and the estimated size of the store.

    `format` is a key of store.FORMATS.

    Raises:
        ValueError: A caption is not a string.
    """
    items = len(job)
    sample = np.unique(np.linspace(0, items - 1, min(items, _SAMPLE)).astype(np.int64))
    _, texts = job.captions(sample)
    total = round(items * len(texts) / len(sample))
    store.keys_of(texts, job.identity)  # Checks that they are strings.
    lengths = encode.lengths_of(job.encoder, texts)
    size = total * store.bytes_per_caption(lengths.mean(), job.encoder.width, format)
    free = _free_bytes(files.path(job.text.store))
    return (
        f"{total:,} captions of {lengths.mean():.1f} tokens on average ({lengths.max()} at most) "
        f"in a sample of {len(texts):,}: the store takes at most {size / 1e9:,.3g} GB as {format}"
        + ("" if free is None else f", and {free / 1e9:,.3g} GB are free")
    )


def start(job: EncodingJob, work: EncodingOptions) -> None:
    """Create the store if it is missing.

    Raises:
        ValueError: The store was made with another text encoder or has another format.
    """
    columns.start(files.path(job.text.store), _Captions(job, work).identity, store.KIND)


def run(job: EncodingJob, work: EncodingOptions) -> dict[str, Any]:
    """Encode the captions that are not in the store yet; return a summary of the whole store.

    Raises:
        ValueError: The store was made with another text encoder or has another format.
    """
    start(job, work)
    todo = _Captions(job, work._replace(engine=ALONE))
    items = todo.items()
    logging.info("%s records and prompts, %s captions", f"{len(job):,}", f"{len(items):,}")
    how = columns.Work(todo.read, todo.encode, work.shard_captions, "captions", work.engine, work.verify)
    filled = columns.fill(files.path(job.text.store), items, how)
    errors = np.array([chunk["errors"] for chunk in filled.chunks])
    weights = [max(1, int(chunk["first"][-1])) for chunk in filled.chunks]
    return {
        "captions": filled.items,
        "bytes_per_caption": filled.bytes / filled.items,
        "mean_relative_error": float(np.average(errors[:, 0], weights=weights)),
        "largest_relative_error": float(errors[:, 1].max()),
        "least_cosine": float(errors[:, 2].min()),
    }


class _Captions(NamedTuple):
    """The captions of a job as the items of a column."""

    job: EncodingJob
    work: EncodingOptions

    @property
    def identity(self) -> columns.Identity:
        return {**self.job.identity, "format": self.work.format}

    def items(self) -> np.ndarray:
        """Return the key of each caption, and an item of the list that has it."""
        total, identity, parts = len(self.job), self.identity, []
        for first in range(0, total, _BLOCK):
            numbers, texts = self.job.captions(np.arange(first, min(first + _BLOCK, total)))
            part = np.zeros(len(texts), columns.ITEM)
            part["key"], part["number"] = store.keys_of(texts, identity), numbers
            _, firsts = np.unique(part["key"], return_index=True)
            parts.append(part[np.sort(firsts)])
        return np.concatenate(parts)

    def read(self, items: np.ndarray) -> list[str]:
        _, texts = self.job.captions(np.unique(items["number"]))
        found = dict(zip(store.keys_of(texts, self.identity).tolist(), texts, strict=True))
        try:
            return [found[key] for key in items["key"].tolist()]
        except KeyError:
            raise ValueError("the captions of the data changed while they were encoded: repeat the command") from None

    def encode(self, texts: list[str]) -> columns.Computed:
        rows = self.job.encode(self.work.format, self.work.batch_tokens)(texts)
        if len(bad := np.flatnonzero(~np.isfinite(rows.errors).all(1))):
            text = texts[np.searchsorted(np.cumsum(rows.tokens), bad[0], side="right")]
            raise ValueError(
                f"the embeddings of {text!r} are not finite: check text.weights, and try text.dtype=float32"
            )
        scales = {} if rows.scales is None else {"scales": rows.scales}
        errors = _summary(rows.errors)
        return columns.Computed(rows.tokens, {"values": rows.values, **scales}, errors)


def _summary(errors: Float[np.ndarray, "T 2"]) -> Float[np.ndarray, "3"]:
    """Return the mean relative error, the largest one, and the least cosine similarity."""
    relative, cosine = errors.T.astype(np.float64)
    return np.array([relative.mean(), relative.max(), cosine.min()] if len(errors) else [0, 0, 1.0])


def _free_bytes(path: pathlib.Path) -> int | None:
    """Return the number of free bytes on the disk of a folder, or None for a bucket.

    If the folder does not exist, its nearest existing parent counts.
    """
    if files.store_path(path):
        return None
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _prompts(config: dict[str, Any], source: str) -> list[str]:
    """Return the prompts of a training run: those of its samples and those of its evaluation.

    The negative prompt is included. If the config has a `conditioning` group, so is the empty
    prompt, because it may replace dropped captions.
    """
    negative = config.get("sampler", {}).get("negative_prompt", "")
    empty = ("",) if "conditioning" in config else ()
    prompts = list(config["prompts"]) + sorted({*empty, *filter(None, [negative])})
    scored = settings.read(Evaluation, config.get("evaluation", {}), "evaluation")
    if scored.every and scored.prompts:
        prompts += prompt_files.read(scored.prompts, scored.num_prompts, flag="evaluation.prompts")
    elif scored.every:
        prompts += sources.own_prompts(source)
    return prompts
