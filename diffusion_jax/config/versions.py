"""Upgrade the config.json of an older run, so that newer code can read it.

The config.json in a workdir holds the whole config and its version. When it is read back, fields
that were added later take their defaults. Each renamed or removed field has an entry in CHANGES.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from absl import logging

from diffusion_jax.config import named

VERSION = 7
"""The version that this code writes. Configs of version 0 hold neither a version nor a system."""
IMAGE_KEYS = 5
"""The first version in which training draws the noise of each image from a key of its own."""
# A version-0 config names no system. The first of these groups that it has determines the system.
_GROUPS = {"reconstruction": "sd_jax.vae", "latents": "sd_jax", "unet": "imagen_jax"}
# Data sources of version 2 whose module has moved, and their present modules.
_SOURCES = {"digits": "diffusion_jax.examples.digits"}


class Change(NamedTuple):
    """A change to a config field: the field or its values are renamed, or the field is removed."""

    version: int
    """The first version with this change."""
    field: str
    """The name of the field before the change, such as unet.dropout."""
    renamed: str = ""
    """The new name of the field; "" if the field is removed, or if only its values are renamed."""
    learned: tuple[Any, ...] = ()
    """Values of a removed field that the present code implements.

    `upgrade` raises ValueError for any other value, because the code no longer supports weights
    that were trained with it. With (), any value is accepted, because the field does not affect
    what the weights mean.
    """
    values: Mapping[Any, Any] = MappingProxyType({})
    """Maps old values to new values, for a field that keeps its name. Other values stay."""
    convert: Callable[[Any, Mapping[str, Any]], Any] | None = None
    """Computes the new field's value from the old value and the config. None: it is equal."""
    value: str = ""
    """With `convert`, what the new field's value is, for users who convert a config by hand."""


def _micro_batch(passes: int, config: Mapping[str, Any]) -> int:
    """Return the optimizer.micro_batch that divides a step into `passes` passes.

    A mesh axis of size -1 is filled with the devices of this machine.
    """
    micro_batch = config["optimizer"].get("micro_batch", 0)
    if passes == 1 or micro_batch:
        return micro_batch
    mesh = {"replica": 1, "fsdp": -1, "tensor": 1} | config.get("mesh", {})
    sizes = [mesh["replica"], mesh["fsdp"], mesh["tensor"]]
    if -1 in sizes:
        sizes[sizes.index(-1)] = max(1, jax.device_count() // -math.prod(sizes))
    micro_batch = max(1, config["batch_size"] // (passes * math.prod(sizes[:2])))
    logging.warning("optimizer.accumulate=%d is now optimizer.micro_batch=%d", passes, micro_batch)
    return micro_batch


def _weight(gamma: float, config: Mapping[str, Any]) -> str:
    """Return the diffusion.weight that contains the limit `gamma` of "min_snr"; 0 meant none."""
    text = config["diffusion"].get("weight", "min_snr")
    call = named.calls("diffusion.weight", text)[0]
    if call.name != "min_snr":
        return text
    limit = [*call.positional, *call.by_name.values(), gamma][0]
    return f"min_snr({limit})" if limit else "none"


CHANGES: tuple[Change, ...] = (
    # "precomputed" meant stored embeddings of T5, as in NeMo. Now data.text names the embeddings.
    Change(2, "text.encoder", values={"precomputed": "t5"}),
    Change(3, "data.source", values=_SOURCES),
    Change(4, "optimizer.snapshot_dtype"),
    Change(4, "vae.image_channels", learned=(3,)),
    Change(4, "vae.query_chunk"),
    Change(5, "diffusion.precond", "diffusion.predicts"),
    Change(
        6, "optimizer.accumulate", "optimizer.micro_batch", convert=_micro_batch, value="batch_size / passes / devices"
    ),
    Change(
        7,
        "diffusion.min_snr",
        "diffusion.weight",
        convert=_weight,
        value='"min_snr(5)" with your number, or "none" for 0',
    ),
    Change(7, "diffusion.weight", values={"min_snr": "none"}),
)


def renamed(field: str) -> str:
    """Return the new name of a config field that was renamed, or "" for other fields."""
    change = next((change for change in CHANGES if change.field == field), Change(0, ""))
    return f"{change.renamed} = {change.value}" if change.value else change.renamed


def upgrade(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a config of any version to the present field names, and remove its version.

    `config` may be changed in place.

    Raises:
        ValueError: The config has a later version than this code, or a removed field has a value
            that this code does not implement.
    """
    version = config.pop("version", 0)
    if version > VERSION:
        raise ValueError(
            f"the config has version {version}, but this code reads up to {VERSION}: use a newer "
            "version of this project"
        )
    if "system" not in config:
        names = [system for group, system in _GROUPS.items() if group in config]
        config = {"system": names[0] if names else "", **config}
    for change in CHANGES:
        group, _, field = change.field.rpartition(".")
        place = config.get(group, {}) if group else config
        if version >= change.version or field not in place:
            continue
        if change.values:
            renamed = [new for old, new in change.values.items() if place[field] == old]
            place[field] = renamed[0] if renamed else place[field]
            continue
        value = place.pop(field)
        if change.learned and value not in change.learned:
            raise ValueError(
                f"{change.field} is {value!r}, which this code no longer supports: use an older "
                f"version of this project, which writes config versions below {change.version}"
            )
        if change.renamed:
            group, _, field = change.renamed.rpartition(".")
            try:
                new = change.convert(value, config) if change.convert else value
            except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
                raise ValueError(
                    f"{change.field} {value!r} cannot become {change.renamed}, because this config "
                    f"is damaged ({type(error).__name__}: {error})"
                ) from error
            (config.setdefault(group, {}) if group else config)[field] = new
    if version < 3:
        _rename_mixed_sources(config)
    return config


def _rename_mixed_sources(config: dict[str, Any]) -> None:
    """Rename old data sources in the entries (weight, source, path, text) of data.mixture."""
    match config.get("data"):
        case {"mixture": [*parts]}:
            for part in parts:
                if isinstance(part, list) and len(part) > 1 and isinstance(part[1], str):
                    part[1] = _SOURCES.get(part[1], part[1])
