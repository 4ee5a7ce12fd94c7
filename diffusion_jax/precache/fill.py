"""Fills a store with the embeddings of a data set's captions: the work of the command precache."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Int, Shaped

from diffusion_jax import settings
from diffusion_jax.data import digits, sources
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.machine.progress import Meter
from diffusion_jax.precache import cost, encode, lookup, plan, shards, store, workers
from diffusion_jax.precache.workers import Share
from diffusion_jax.settings import Data, Evaluation, Text
from diffusion_jax.text import TextEncoder, registry

_SAMPLE = 1024  # Captions that the table is measured on.


class Job(NamedTuple):
    """An encoder and the captions that it is to encode, checked."""

    text: Text
    encoder: TextEncoder
    identity: store.Identity
    captions: plan.Captions
    source: dict[str, Any]
    """Names the data of the captions: a plan of another source is another plan."""


class Work(NamedTuple):
    """Formats, sizes and shares of the work; the flags of precache say what each field means."""

    format: str = "int8"
    shard_captions: int = 16384
    batch_tokens: int = 8192
    verify: bool = False
    share: Share = Share()


def open_job(config: dict[str, Any], captions_file: str | None = None) -> Job:
    """The encoder and the captions of a config; ValueError or OSError that says what to change."""
    text = settings.read(Text, config["text"], "text")
    data = settings.read(Data, config["data"], "data")
    registry.check(text)
    if not text.store:
        raise ValueError("text.store is empty: say where to write with --config.text.store=FOLDER")
    captions, source = _captions(data, _prompts(config, data.source), captions_file)
    encoder = registry.make_encoder(text)
    source = {**source, "captions": len(captions)}
    return Job(text, encoder, lookup.identity(text, encoder), captions, source)


def table(job: Job, format: str) -> str:
    """The size of the store on disk, measured on a sample of captions, and the work it saves."""
    total = len(job.captions)
    sample = np.unique(np.linspace(0, total - 1, min(total, _SAMPLE)).astype(np.int64))
    texts = job.captions.read(sample)
    store.keys_of(texts, job.identity)  # Each is a text.
    return cost.table(
        encode.lengths_of(job.encoder, texts),
        width=job.encoder.width,
        max_tokens=job.encoder.max_tokens,
        format=format,
        captions=total,
        free=plan.free_bytes(pathlib.Path(job.text.store)),
        flops=encode.flops(job.encoder),
        parameters=encode.num_parameters(job.encoder),
    )


def run(job: Job, work: Work) -> dict[str, Any]:
    """Encodes what the store lacks; returns its manifest. ValueError if it is of another kind."""
    path = pathlib.Path(job.text.store)
    manifest = shards.start(path, job.identity, work.format)
    listed = [shard["file"] for shard in manifest["shards"]]
    held = shards.whole_shards(path, listed, verify=work.verify)
    if len(held) < len(listed):
        logging.warning("%d shards are missing or damaged: encoding them again",
                        len(listed) - len(held))  # fmt: skip
    have = shards.held_keys(path, held)
    planned = plan.folder_of(path, job.source, job.identity)
    reading = Meter("captions", len(job.captions), name="reading captions")
    keys = plan.read_keys(job.captions, planned, job.identity, work.share, reading.reach)
    missing, different = plan.pending(keys, have)
    logging.info("%s captions, %s different, %s of them to encode",
                 f"{len(keys):,}", f"{different:,}", f"{len(missing):,}")  # fmt: skip
    names = _encode_shards(job, work, path, keys, missing)
    manifest = shards.finish(path, [*held, *names])
    plan.remove(path)
    return manifest


def _encode_shards(
    job: Job,
    work: Work,
    path: pathlib.Path,
    keys: Shaped[np.ndarray, "N"],
    missing: Int[np.ndarray, "M"],
) -> list[str]:
    """Writes the shards that are not there yet; returns the names of all."""
    if not len(missing):
        return []
    size = work.shard_captions
    parts = [missing[i : i + size] for i in range(0, len(missing), size)]
    names = [shards.shard_name(keys[part]) for part in parts]
    shards.whole_shards(path, names, verify=work.verify)
    paths = [path / name for name in names]
    encode_texts = encode.on_own_devices(job.encoder, work.format, work.batch_tokens)
    done = sum(len(part) for part, file in zip(parts, paths, strict=True) if file.exists())
    meter = Meter("captions", len(missing), name="encoding", done=done)
    read = lambda i: job.captions.read(parts[i])
    for i, texts in workers.ahead(read, work.share.missing(paths)):
        if not paths[i].exists():  # Another worker may have been faster.
            shards.write_shard(path, keys[parts[i]], encode_texts(texts))
        meter.add(len(texts))
    return names


def _prompts(config: dict[str, Any], source: str) -> list[str]:
    """A config's prompts, to draw and to score on the way, of data from `source`.

    A negative prompt is one of them, and the empty one where dropped texts become it.
    """
    negative = config.get("sampler", {}).get("negative_prompt", "")
    empty = ("",) if "conditioning" in config else ()
    prompts = list(config["prompts"]) + sorted({*empty, *filter(None, [negative])})
    scored = settings.read(Evaluation, config.get("evaluation", {}), "evaluation")
    if scored.every and scored.prompts:
        prompts += prompt_files.read(scored.prompts, scored.num_prompts)
    elif scored.every and source == "digits":
        prompts += [*digits.seen_prompts(), *digits.heldout_prompts()]
    return prompts


def _captions(data: Data, prompts: Sequence[str], file: str | None):
    """The captions, and the name of their source."""
    if file is not None:
        try:
            lines = pathlib.Path(file).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"--captions={file} is no text in UTF-8: give a line each") from error
        texts = [*prompts, *(line.strip() for line in lines if line.strip())]
        if not texts:
            raise ValueError(f"{file} holds no captions: write one a line")
        return plan.Captions(texts, None, 0, 1), {"given": texts}
    opened = sources.open_pictures(data, size=16)  # No picture is made.
    # The synthetic source has one caption, for as many pictures as anyone likes.
    count = 1 if data.source == "synthetic" else len(opened)
    source = {"prompts": list(prompts), **data._asdict(), "threads": 0}
    return plan.Captions(tuple(prompts), opened, count, data.threads), source
