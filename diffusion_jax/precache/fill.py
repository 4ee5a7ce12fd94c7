"""Fill a store with the embeddings of captions, for `python -m diffusion_jax.precache`."""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from diffusion_jax import files
from diffusion_jax.config import settings
from diffusion_jax.config.settings import Data, Evaluation, Text
from diffusion_jax.data import engines, fingerprints, sources
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.data.engines import ALONE, Engine
from diffusion_jax.precache import encode, index, lookup, plan, shards, store
from diffusion_jax.text import TextEncoder, registry

_SAMPLE = 1024  # Captions whose lengths are measured for the estimate.


class EncodingJob:
    """A text encoder and the captions to encode."""

    def __init__(
        self, text: Text, encoder: TextEncoder, captions: plan.CaptionList, source: dict[str, Any]
    ):
        """Prepare to encode captions.

        Args:
            text: The config's text group.
            encoder: The text encoder.
            captions: The captions.
            source: JSON values that identify where the captions come from.
        """
        self.text, self.encoder, self.captions = text, encoder, captions
        self.identity = lookup.identity(text, encoder)
        self.source = {**source, "captions": len(captions)}
        self.encode = functools.cache(functools.partial(encode.on_own_devices, encoder))
        """A function of (format, batch_tokens); it returns the function encode(texts) that
        encode.on_own_devices makes for this encoder."""


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
        raise ValueError(
            "text.store is empty: name the folder to write to with --config.text.store=FOLDER"
        )
    captions, source = _captions(data, _prompts(config, data.source), captions_file)
    job = EncodingJob(text, registry.make_encoder(text), captions, source)
    return engines.record_call(job, open_job, config, captions_file)


def estimate(job: EncodingJob, format: str) -> str:
    """Return a line with the number of captions and the estimated size of the store.

    `format` is a key of store.FORMATS.

    Raises:
        ValueError: A caption is not a string.
    """
    items = len(job.captions)
    sample = np.unique(np.linspace(0, items - 1, min(items, _SAMPLE)).astype(np.int64))
    _, texts = job.captions.of_items(sample)
    total = round(items * len(texts) / len(sample))
    store.keys_of(texts, job.identity)  # Checks that they are strings.
    lengths = encode.lengths_of(job.encoder, texts)
    size = total * store.bytes_per_caption(lengths.mean(), job.encoder.width, format)
    free = plan.free_bytes(files.path(job.text.store))
    return (
        f"{total:,} captions of {lengths.mean():.1f} tokens on average ({lengths.max()} at most) "
        f"in a sample of {len(texts):,}: the store takes at most {size / 1e9:,.3g} GB as {format}"
        + ("" if free is None else f", and {free / 1e9:,.3g} GB are free")
    )


def run(job: EncodingJob, work: EncodingOptions) -> dict[str, Any]:
    """Encode the captions that are not in the store yet, and return the store's manifest.

    Raises:
        ValueError: The store was made with another text encoder or has another format.
    """
    path = files.path(job.text.store)
    manifest = shards.start(path, job.identity, work.format)
    file = path / store.MANIFEST
    # The state includes the time, because a worker may write the same content again.
    state = lambda: (file.read_bytes(), file.stat().st_mtime)
    written = state()
    try:
        manifest = _fill(job, work, path, [shard["file"] for shard in manifest["shards"]])
    except FileNotFoundError:
        # Another worker has finished the store and deleted the plan.
        if state() == written:
            raise
        manifest = store.read_manifest(path)
    plan.remove(path)
    return manifest


def _fill(
    job: EncodingJob, work: EncodingOptions, path: pathlib.Path, listed: list[str]
) -> dict[str, Any]:
    """Run all stages in order (read, compare, encode, index), and return the store's manifest.

    `listed` names the shards in the manifest of an earlier run.
    """
    kind = work.shard_captions, work.verify, listed
    folder = plan.open_plan(path, job.source, job.identity, *kind)
    before = index.listed(path, folder, listed)
    names = index.whole(before, work.engine, verify=work.verify)
    # The folder of the plan's files depends on which shards are undamaged.
    remaining = plan.open_plan(path, job.source, job.identity, *kind, names)
    p = plan.Plan(remaining, len(job.captions), work.shard_captions)
    if len(names) < len(listed):
        logging.warning("%d shards of %s are missing or damaged: encoding them again",
                        len(listed) - len(names), path)  # fmt: skip
    stages, engine = _Stages(job, work._replace(engine=ALONE), p, before), work.engine
    size = lambda chunk: len(p.chunk(chunk))
    engine.fill(p.chunks, p.keys, stages.write_keys, noun="captions", name="reading", size=size)
    engine.fill(
        p.ranges, p.new_captions, stages.write_new_captions, noun="ranges", name="comparing"
    )
    total = plan.write_counts(p)
    logging.info("%s records and prompts, %s captions to encode", f"{p.items:,}", f"{total:,}")
    new = range(-(-total // p.size))
    encoded = {name: path / name.read_text() for name in files.present(map(p.name, new))}
    for file in encoded.values():  # Delete shards of an earlier run that are now damaged.
        shards.usable(file, False)
    engine.fill(
        new, lambda shard: encoded.get(p.name(shard), p.name(shard)), stages.encode,
        noun="captions", name="encoding",
        size=lambda shard: min(p.size, total - shard * p.size), read=stages.read,
    )  # fmt: skip
    names = list(dict.fromkeys([*names, *(p.name(shard).read_text() for shard in new)]))
    return index.finish(path, names, folder, engine)


class _Stages(NamedTuple):
    """The functions that the engine calls for each chunk, range of keys, or shard."""

    job: EncodingJob
    work: EncodingOptions
    plan: plan.Plan
    held: index.Listed
    """The shards that the store holds already."""

    def write_keys(self, chunk: int) -> None:
        numbers, texts = self.job.captions.of_items(self.plan.chunk(chunk))
        plan.write_keys(self.plan, numbers, store.keys_of(texts, self.job.identity), chunk)

    def write_new_captions(self, part: int) -> None:
        plan.write_new_captions(self.plan, self.held, part)

    def read(self, shard: int) -> list[Any]:
        return self.job.captions.read(plan.to_encode(self.plan, shard))

    def encode(self, shard: int, texts: list[Any]) -> None:
        path = files.path(self.job.text.store)
        keys = store.keys_of(texts, self.job.identity)
        name = shards.shard_name(keys)
        if not shards.usable(path / name, self.work.verify):
            rows = self.job.encode(self.work.format, self.work.batch_tokens)(texts)
            if len(bad := np.flatnonzero(~np.isfinite(rows.errors).all(1))):
                text = texts[np.searchsorted(np.cumsum(rows.tokens), bad[0], side="right")]
                raise ValueError(
                    f"the embeddings of {text!r} are not finite: check text.weights, and try "
                    "text.dtype=float32"
                )
            shards.write_shard(path, keys, rows)
        files.write_whole(self.plan.name(shard), name)


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


def _captions(data: Data, prompts: Sequence[str], file: str | None):
    """Return (captions, source): the Captions, and JSON values that identify where they come from.

    The captions are `prompts`, followed by the captions of the data set or, if `file` is not None,
    by those of this file.
    """
    if file is not None:
        texts = [*prompts, *prompt_files.read(file, every=True, flag="--captions")]
        return plan.CaptionList(texts, None, 0, 1), {"given": texts}
    opened = sources.open_pictures(data, size=16)  # No image is decoded.
    # The synthetic source has one caption for any number of images.
    count = 1 if data.source == "synthetic" else len(opened)
    source = {"prompts": list(prompts), **data._asdict(), "threads": 0}
    source["files"] = fingerprints.stamp(opened)  # Keys of edited captions are found again.
    return plan.CaptionList(tuple(prompts), opened, count, data.threads), source
