"""Versions of config.json: a run outlives the code that wrote its config.

A workdir's config.json holds the whole config and its version. Fields that were added later take
their defaults when it is read back; a field that is renamed or removed needs a line in CHANGES.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

VERSION = 4
"""The version written today. Configs of version 0 hold neither a version nor a system."""
# The systems of version-0 configs: the first of these groups that a config has decides.
_GROUPS = {"reconstruction": "sd_jax.vae", "latents": "sd_jax", "unet": "imagen_jax"}
# Data sources of version 2 that moved out of data/, and the modules that they are now.
_SOURCES = {"digits": "diffusion_jax.examples.digits"}


class Change(NamedTuple):
    """A field that a version of the config renamed or removed, or whose values it renamed."""

    version: int
    """The first version without this field or these values."""
    field: str
    """The field's earlier name, such as unet.dropout."""
    renamed: str = ""
    """The field's new name; "" if it was removed, or if only `values` were renamed."""
    learned: tuple[Any, ...] = ()
    """Values of a removed field that today's code implements; other values raise ValueError.

    Empty for a field that does not affect the meaning of the weights: it is dropped.
    """
    values: Mapping[Any, Any] = MappingProxyType({})
    """New values by earlier values, for a field that keeps its name."""


CHANGES: tuple[Change, ...] = (
    # "precomputed" meant stored embeddings, which data.text now names; NeMo's come from T5.
    Change(2, "text.encoder", values={"precomputed": "t5"}),
    Change(3, "data.source", values=_SOURCES),
    Change(4, "optimizer.snapshot_dtype"),
    Change(4, "vae.image_channels", learned=(3,)),
    Change(4, "vae.query_chunk"),
)


def upgrade(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config of any version with today's field names, without its version.

    Raises:
        ValueError: If the config is of a later version, or has a removed value that mattered.
    """
    version = config.pop("version", 0)
    if version > VERSION:
        raise ValueError(f"the config is of version {version}, and this code reads {VERSION}")
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
                f"{change.field} is {value!r}, which this code no longer does: use the code of "
                f"before version {change.version} of configs"
            )
        if change.renamed:
            group, _, field = change.renamed.rpartition(".")
            (config.setdefault(group, {}) if group else config)[field] = value
    if version < 3:
        _rename_mixed_sources(config)
    return config


def _rename_mixed_sources(config: dict[str, Any]) -> None:
    """Apply _SOURCES to the parts (weight, source, path, text) of data.mixture, in place."""
    match config.get("data"):
        case {"mixture": [*parts]}:
            for part in parts:
                if isinstance(part, list) and len(part) > 1 and isinstance(part[1], str):
                    part[1] = _SOURCES.get(part[1], part[1])
