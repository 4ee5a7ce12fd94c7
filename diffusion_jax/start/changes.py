"""Change a config of configs/ for a data set and this machine, and write the changes as a file."""

import collections
import json
import os
import textwrap
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from diffusion_jax import systems
from diffusion_jax.config import shapes
from diffusion_jax.data.captions import every
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.records import Records
from diffusion_jax.data.split import hashed as hashed_keys
from diffusion_jax.start.training_pictures import PictureSet
from diffusion_jax.text import hashed
from diffusion_jax.weights import pretrained

Changes = Mapping[str, tuple[Any, str]]
"""Maps config fields, such as unet.dtype, to (new value, comment). The comment may be "".

A group that the base config lacks is a single entry, whose value is a dict of the group's fields.
"""
_PROMPTS = 8
_HELD_OUT = 8  # The smallest number of pictures to hold out.
_MOST_CAPTIONS = 2_000  # Captions read to choose prompts.
_MOST_WORDS = 64
_MOST_THREADS = 16
_ENCODERS = {"t5": ("t5", "d_model"), "clip": ("clip", "hidden_size")}


def of_data(base: str, photos: PictureSet, text_weights: str, keep_shapes: bool = False) -> Changes:
    """Return the changes to the config `base` for a data set and this machine.

    Args:
        base: the name of a config in configs/.
        photos: the data set.
        text_weights: a folder of T5 or CLIP weights; "" keeps the base config's text encoder.
        keep_shapes: whether to train on several shapes (aspect buckets) instead of squares.
    """
    data, report, c = photos.data, photos.report, full_config(base, {})
    changes = {f"data.{name}": (getattr(data, name), "") for name in ("source", "path", "text", "uncaptioned")}
    share = held_out(photos.records)
    if share:
        changes["data.heldout"] = (share, "Not trained on; diffusion_jax.verdict compares them.")
    changes["prompts"] = (prompts(photos.records), "")
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    changes["data.threads"] = (threads, f"One per core, at most {_MOST_THREADS}.")
    broken = 1 - report["usable"] / report["read"]
    if broken > data.max_broken / 2:
        about = f"{broken:.0%} of the records are unusable."
        changes["data.max_broken"] = (min(1.0, round(2 * broken, 2)), about)
    for group in filter(c.get, ("unet", "vae")):
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        changes[f"{group}.dtype"] = (dtype, "")
    batch_size, devices = c["batch_size"], jax.device_count()
    if batch_size % devices:
        batch_size *= devices
        changes["batch_size"] = (batch_size, "The base config's batch size on each device.")
    keys = photos.records.keys(np.arange(min(len(photos.records), 4 * batch_size)))
    if (trained := int((hashed_keys(keys) >= share).sum())) < batch_size:
        batch_size = max(1, trained // devices) * devices
        changes["batch_size"] = (batch_size, "A larger batch would repeat pictures.")
    if keep_shapes:
        sides = systems.read(c, c["system"]).crop_sides
        changes["data.aspect_buckets"] = (shapes.up_to(*sides), "Height and width of the crops.")
    longest = int(report["text_words"]["max"])
    if "text" not in c:
        return changes
    if not longest:
        about = "Without captions there is no guidance."
        return {
            **changes,
            "text.drop_prob": (0.0, ""),
            "text.max_tokens": (1, ""),
            "sampler.guidance": (1.0, about),
            "evaluation.guidance": ((1.0,), ""),
        }
    if text_weights:
        return {**changes, **_encoder(text_weights, longest)}
    most = min(_MOST_WORDS, max(4, -(-longest // 4) * 4))
    rest = "" if longest <= most else "; the rest is cut off"
    return {**changes, "text.max_tokens": (most, f"Captions have up to {longest} words{rest}.")}


def held_out(records: Records) -> float:
    """Return the share of records to hold out: a tenth, or the share that gives at least eight.

    Of fewer than 24 records, none is held out.
    """
    if len(records) < 3 * _HELD_OUT:
        return 0.0
    hashes = hashed_keys(records.keys(np.arange(min(len(records), _MOST_CAPTIONS))))
    shares = (n / 100 for n in range(10, 100))
    return next(share for share in shares if (hashes < share).sum() >= _HELD_OUT)


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


def source(base: str, changes: Changes, about: str) -> str:
    """Return the source of a config file that loads configs/{base}.py and changes some fields.

    `changes` holds the changed fields. `about` becomes the docstring of the file.
    """
    lines = [f"    c.{field} = {_literal(value)}" for field, (value, _) in changes.items()]
    notes = [f"  # {note}" if note else "" for _, note in changes.values()]
    body = "\n".join(line + note for line, note in zip(lines, notes, strict=True))
    # `about` contains the path of the data, which may contain """ or a backslash.
    about = about.replace("\\", "/").replace('"""', "'''")
    return textwrap.dedent('''\
        """{about}
        """

        from ml_collections import ConfigDict

        from configs import {base}


        def get_config() -> ConfigDict:
            c = {base}.get_config()
        {body}
            return c
        ''').format(about=about, base=base, body=body)


def full_config(base: str, changes: Changes) -> dict[str, Any]:
    """Return the complete config: configs/BASE.py, `changes`, and defaults for all other fields.

    Raises ValueError if configs/ cannot be imported.
    """
    names: dict[str, Any] = {}
    try:
        exec(source(base, changes, ""), names)  # The same text that training will read.
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: run this command from the root of a checkout of this repository") from error
    return systems.complete(names["get_config"]().to_dict())


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
    values = {"encoder": encoder, "weights": weights, "width": config[width], "max_tokens": tokens}
    values |= {"read_tokens": tokens} if encoder == "t5" else {}
    return {f"text.{name}": (value, "") for name, value in values.items()}


def _literal(value: Any) -> str:
    """Format a value as Python source in this project's style.

    Strings get double quotes, a tuple of strings gets one line per string, and large integers get
    underscores.
    """
    if isinstance(value, dict):
        return f"dict({', '.join(f'{name}={_literal(each)}' for name, each in value.items())})"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return "(\n" + "".join(f"        {_literal(text)},\n" for text in value) + "    )"
    return f"{value:_}" if isinstance(value, int) and abs(value) >= 10_000 else repr(value)
