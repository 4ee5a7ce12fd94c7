"""Configs at the edge: groups of values become typed tuples, and a stray key is an error.

A config is written in configs/ as plain values. Below the entry points nobody sees it: functions
take these tuples or single values.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

CROPS = ("center", "random")
MOMENTS = "moments"
"""The data source of what an autoencoder makes of images; the others give images."""


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
    clip_reference: str = ""
    metrics: tuple[str, ...] = ()
    """Names in metrics.table; none: all that the reference and the weights allow."""


class Data(NamedTuple):
    """Where pictures come from."""

    source: str
    path: str = ""
    text: str = "txt"
    uncaptioned: str = "error"
    mixture: tuple[tuple[float, str, str, str], ...] = ()
    """Parts (weight, source, path, text), for the source "mixture"."""
    min_size: int = 0
    """Filters: the pixels of the smaller side; the larger by the smaller, 0 for any; characters."""
    max_aspect: float = 0.0
    min_chars: int = 0
    max_broken: float = 0.1
    """The share of damaged records that does not end the run."""
    resize: int = 0
    """Of the smaller side, to be cut then; 0 stands for the size of the cut."""
    crop: str = "center"
    flip: bool = False
    threads: int = 16


def split(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config's own values, and its groups."""
    groups = {key: value for key, value in config.items() if isinstance(value, Mapping)}
    return {key: value for key, value in config.items() if key not in groups}, groups


def read(kind: type, group: Mapping[str, Any], name: str) -> Any:
    """A config group as a tuple of `kind`; ValueError for unknown and missing fields.

    `name` is the group's, "" for the config's own values (its groups are not among them).
    """
    fields = kind._fields
    values = {key: value for key, value in group.items() if name or not isinstance(value, Mapping)}
    check_fields(values, fields, name, kind._field_defaults)
    return kind(**{key: plain(value) for key, value in values.items()})


def read_network(kind: type, group: Mapping[str, Any], name: str) -> Any:
    """A config group as a network, a Flax module of class `kind`; ValueError as `read`."""
    values = {key: plain(value) for key, value in group.items()}
    fields = [field for field in kind.__dataclass_fields__ if field not in ("parent", "name")]
    check_fields(values, fields, name)
    return kind(**values | {"dtype": jnp.dtype(values["dtype"])})


def check_fields(
    values: Iterable[str], fields: Iterable[str], name: str, optional: Iterable[str] = ()
) -> None:
    """ValueError unless the group `name` has exactly these fields, maybe without optional ones."""
    dot = f"{name}." if name else ""
    unknown = sorted(set(values) - set(fields))
    missing = sorted(set(fields) - set(values) - set(optional))
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
