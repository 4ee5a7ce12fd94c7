"""Adapt a config to a data set and to this machine."""

import collections
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from diffusion_jax import systems
from diffusion_jax.config import shapes
from diffusion_jax.data.captions import every
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.records import Records
from diffusion_jax.start import written
from diffusion_jax.start.stages import TrainingStage
from diffusion_jax.start.training_pictures import PictureSet
from diffusion_jax.start.written import Changes
from diffusion_jax.text import hashed
from diffusion_jax.weights import pretrained

_PROMPTS = 8
_MOST_CAPTIONS = 2_000  # Captions read to choose prompts.
_MOST_WORDS = 64
_MOST_THREADS = 16
_ENCODERS = {"t5": ("t5", "d_model"), "clip": ("clip", "hidden_size")}


def prompts(records: Records) -> tuple[str, ...]:
    """Return up to eight captions as prompts for samples during training.

    Models learn frequent words first, so the captions whose rarest word is most frequent are
    chosen. No two prompts have the same rarest word. If no caption contains a word, the result is
    eight empty prompts.
    """
    rows = np.linspace(0, len(records) - 1, min(len(records), _MOST_CAPTIONS)).astype(int).tolist()
    texts = [t for text in records.texts(rows) for t in every(text)]
    texts = [t for t in texts if not isinstance(t, Unusable) and hashed.words(t)]
    counts = collections.Counter(word for text in texts for word in set(hashed.words(text)))
    of_rarest: dict[str, str] = {}
    for text in sorted(set(texts), key=lambda text: (len(text), text)):
        rarest = min(hashed.words(text), key=lambda word: (counts[word], word))
        of_rarest.setdefault(rarest, text)  # Keeps the first caption, which is the shortest.
    ranked = sorted(of_rarest, key=lambda word: (-counts[word], word))
    return tuple(of_rarest[word] for word in ranked[:_PROMPTS]) or ("",) * _PROMPTS


def of_data(
    photos: PictureSet, text_weights: str, keep_shapes: bool = False
) -> Callable[[TrainingStage], Changes]:
    """Return a function that maps a stage to config changes for a data set and this machine.

    Args:
        photos: the data set.
        text_weights: a folder of T5 or CLIP weights; "" keeps the base config's text encoder.
        keep_shapes: whether to train on several shapes (aspect buckets) instead of squares.
    """
    data, report = photos.data, photos.report
    on_cpu, longest = jax.default_backend() == "cpu", int(report["text_words"]["max"])
    broken = 1 - report["usable"] / report["read"]
    fields: dict[str, tuple[Any, str]] = {"prompts": (prompts(photos.records), "")}
    for name in ("source", "path", "text", "uncaptioned"):
        fields[f"data.{name}"] = (getattr(data, name), "")
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    fields["data.threads"] = (threads, f"One per core, at most {_MOST_THREADS}.")
    if broken > data.max_broken / 2:
        about = f"{broken:.0%} of the records are unusable."
        fields["data.max_broken"] = (min(1.0, round(2 * broken, 2)), about)
    if not longest:
        texts = {"text.drop_prob": (0.0, ""), "text.max_tokens": (1, "")}
        texts["sampler.guidance"] = (1.0, "Without captions there is no guidance.")
        texts["evaluation.guidance"] = ((1.0,), "")
    elif text_weights:
        texts = _encoder(text_weights, longest)
    else:
        most = min(_MOST_WORDS, max(4, -(-longest // 4) * 4))
        rest = "" if longest <= most else "; the rest is cut off"
        texts = {"text.max_tokens": (most, f"Captions have up to {longest} words{rest}.")}

    def of_stage(stage: TrainingStage) -> Changes:
        base, changes = written.config(stage.base, {}), dict(fields)
        for group in filter(base.get, ("unet", "vae")):
            changes[f"{group}.dtype"] = ("float32" if on_cpu else "bfloat16", "")
        if base["batch_size"] % jax.device_count():
            batch_size = base["batch_size"] * jax.device_count()
            changes["batch_size"] = (batch_size, "The base config's batch size on each device.")
        if keep_shapes:
            sides = systems.read(base, base["system"]).crop_sides
            about = "Height and width of the crops."
            changes["data.aspect_buckets"] = (shapes.up_to(*sides), about)
        return {**changes, **(texts if "text" in base else {})}

    return of_stage


def _encoder(weights: str, words: int) -> Changes:
    """Return config changes for the text encoder in `weights`, a folder of T5 or CLIP weights.

    `words` is the length of the longest caption in words. Raises ValueError if the folder holds
    weights of neither T5 nor CLIP.
    """
    config = pretrained.read_json(pretrained.locate(weights) / "config.json")
    config |= config.get("text_config") or {}
    kind = next((k for k in _ENCODERS if k in str(config.get("model_type"))), "")
    if not kind:
        raise ValueError(
            f"--text_weights={weights} has the model_type {config.get('model_type')!r}: give a "
            "folder of T5 or CLIP weights"
        )
    encoder, width = _ENCODERS[kind]
    tokens = 77 if kind == "clip" else min(128, max(8, -(-words // 4) * 8))
    values = {"encoder": encoder, "weights": weights, "width": config[width],
              "max_tokens": tokens, "read_tokens": tokens}  # fmt: skip
    return {f"text.{name}": (value, "") for name, value in values.items()}
