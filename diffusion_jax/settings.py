"""Configs at the edge: groups of values become typed tuples, and a stray key is an error.

A config is written in configs/ as plain values. Below the entry points nobody sees it: functions
take these tuples or single values.
"""

import difflib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from diffusion_jax.machine import files

CONFIG = "config.json"
CROPS = ("center", "random")
MOMENTS = "moments"
"""The data source of what an autoencoder makes of images; the others give images."""
# What a run may change when it is continued: none of it changes what is learned.
_FREE = ("steps", "log_every", "sample_every", "save_every", "keep_last", "keep_every",
         "step_timeout", "prompts", "mesh.", "sampler.", "evaluation.", "data.threads", "data.path",
         "data.max_broken", "text.store")  # fmt: skip


class Run(NamedTuple):
    """A config's own values, outside the groups: what is done when."""

    seed: int
    steps: int
    batch_size: int
    log_every: int
    sample_every: int
    save_every: int
    keep_last: int
    keep_every: int
    step_timeout: int
    """Seconds for a step with its save, after which the process ends: it hangs."""
    prompts: tuple[str, ...]


class Text(NamedTuple):
    """The text encoder, and how often training drops the text.

    `weights` (a folder or a Hugging Face name), `read_tokens` (what T5 reads of a text, of which
    `max_tokens` are kept) and `dtype` are for pretrained encoders alone. Where `store` is not
    empty, captions are looked up in this store of the encoder's embeddings.
    """

    encoder: str
    weights: str
    store: str
    width: int
    max_tokens: int
    read_tokens: int
    dtype: str
    drop_prob: float


class Optimizer(NamedTuple):
    """AdamW, its schedule, and the averages of its parameters."""

    lr: float
    schedule: str
    warmup: int
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip: float
    accumulate: int
    ema_decays: tuple[float, ...]
    ema_warmup: bool


class MeshShape(NamedTuple):
    """Sizes of the mesh axes; -1 takes the devices that are left."""

    replica: int
    fsdp: int
    tensor: int


class Evaluation(NamedTuple):
    """Scores on the way: every so many images, of prompts from a file or of the data's own.

    0 images: never. `prompts` "" stands for those of the coloured digits.
    """

    every: int
    guidance: tuple[float, ...]
    prompts: str
    num_prompts: int
    reference: str
    inception: str
    clip: str


class Data(NamedTuple):
    """Where pictures come from."""

    source: str
    path: str
    text: str
    uncaptioned: str
    mixture: tuple[tuple[float, str, str, str], ...]
    min_size: int
    max_aspect: float
    min_chars: int
    max_broken: float
    resize: int
    crop: str
    flip: bool
    threads: int


def read(kind: type, group: Mapping[str, Any], name: str) -> Any:
    """A config group as a tuple of `kind`; ValueError for unknown and missing fields.

    `name` is the group's, "" for the config's own values (its groups are not among them).
    """
    fields = kind._fields
    values = {key: value for key, value in group.items() if name or not isinstance(value, Mapping)}
    check_fields(values, fields, name)
    return kind(**{key: plain(value) for key, value in values.items()})


def read_network(kind: type, group: Mapping[str, Any], name: str) -> Any:
    """A config group as a network, a Flax module of class `kind`; ValueError as `read`."""
    values = {key: plain(value) for key, value in group.items()}
    fields = [field for field in kind.__dataclass_fields__ if field not in ("parent", "name")]
    check_fields(values, fields, name)
    return kind(**values | {"dtype": jnp.dtype(values["dtype"])})


def check_fields(values: Iterable[str], fields: Iterable[str], name: str) -> None:
    """ValueError unless the group `name` has exactly these fields."""
    dot = f"{name}." if name else ""
    unknown, missing = sorted(set(values) - set(fields)), sorted(set(fields) - set(values))
    if unknown:
        close = difflib.get_close_matches(unknown[0], list(fields), n=1)
        hint = f"did you mean {dot}{close[0]}?" if close else f"known are {', '.join(fields)}"
        raise ValueError(f"unknown config field {dot}{unknown[0]}: {hint}")
    if missing:
        raise ValueError(f"the config lacks {', '.join(dot + m for m in missing)}")


def check_groups(config: Mapping[str, Any], groups: Iterable[str]) -> None:
    """ValueError unless the config has exactly these groups."""
    check_fields([key for key, value in config.items() if isinstance(value, Mapping)], groups, "")


def one_of(field: str, value: str, known: Iterable[str]) -> None:
    """ValueError unless `value` is known, with what was probably meant."""
    known = list(known)
    if value not in known:
        close = difflib.get_close_matches(value, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}"
        raise ValueError(f"{field} is {value!r}: {hint}")


def positive(**fields: int | float) -> None:
    """ValueError for the first field that is not above 0; NaN is not."""
    for field, value in fields.items():
        if not value > 0:
            raise ValueError(f"{field.replace('__', '.')} is {value}: it must be above 0")


def within(low: int, high: int, **fields: int | float) -> None:
    """ValueError for the first field that is not from `low` to `high`; NaN is not."""
    for field, value in fields.items():
        if not low <= value <= high:
            name = field.replace("__", ".")
            raise ValueError(f"{name} is {value}: it must be from {low} to {high}")


def plain(value: Any) -> Any:
    """A list, which is what JSON makes of a tuple, as a tuple again, at any depth."""
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


def claim(workdir: str | os.PathLike[str], config: ConfigDict) -> None:
    """Writes the config into a new workdir; ValueError if another config made the workdir.

    Fields that change nothing of what is learned may differ: how long, how often, on which mesh.
    """
    scheme, found, rest = str(workdir).partition(":/")
    if found:
        raise ValueError(
            f"workdir {scheme}://{rest.lstrip('/')} is a URL: give a folder, such as the one where "
            "a bucket is mounted (launch.gke does that, at /gcs/BUCKET)"
        )
    path = pathlib.Path(workdir) / CONFIG
    now = json.loads(json.dumps(config.to_dict()))
    if path.exists():
        before = _flat(json.loads(path.read_text()))
        differing = [
            f"{key}: {before.get(key)!r} there, {_flat(now).get(key)!r} now"
            for key in sorted(before.keys() | _flat(now).keys())
            if before.get(key) != _flat(now).get(key) and not key.startswith(_FREE)
        ]
        if differing:
            raise ValueError(
                f"{workdir} was made with another config ({'; '.join(differing)}): "
                "choose another --workdir, or give the config that it was made with"
            )
    if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps(now, indent=1))


def load(workdir: str | os.PathLike[str]) -> ConfigDict:
    """The config of a workdir, as `claim` wrote it; FileNotFoundError if there is none."""
    path = pathlib.Path(workdir) / CONFIG
    if not path.exists():
        raise FileNotFoundError(
            f"{workdir} holds no {CONFIG}: it is no workdir of a training run. Train one with\n"
            f"  python -m imagen_jax.train --config=configs/quickstart.py --workdir={workdir}"
        )
    return ConfigDict(json.loads(path.read_text())).lock()


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    flat = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping)
        flat |= _flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat
