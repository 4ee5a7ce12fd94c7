"""Print docs/settings.md, the reference of all config fields.

    python -m diffusion_jax.reference > docs/settings.md

This module also generates the list of config fields in --help. Both come from the annotations of
the fields, and from the strings that follow the fields in the code.
"""

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from diffusion_jax import exits, systems
from diffusion_jax.config import named, ranges
from diffusion_jax.config.field_docs import FieldDoc, fields, sentences
from diffusion_jax.config.settings import Run
from diffusion_jax.systems import SystemEntry

_INTRODUCTION = (
    "# Settings",
    "This page is generated from the code by `python -m diffusion_jax.reference`. A config in "
    "`configs/` sets the fields of one model. Every field that it omits has the default below, and "
    "a field without a default must be in the config. The command line can change each field:",
    "```\npython -m imagen_jax.train --config=configs/quickstart.py --workdir=runs/mine "
    "--config.optimizer.lr=2e-4\n```",
    "With `--help`, the training commands list the same fields. The fields of `sampler` are also "
    "options of `sample`, of `evaluate`, of the web page and of notebooks, without the name of the "
    "group: `--steps=20` sets `sampler.steps`, and `--sampler=ddim` sets `sampler.name`.",
    "Some values are names of functions. Their parameters may follow in brackets, such as "
    '`sampler.name="restart(low=0.5)"`; [Names](#names) lists them.',
)
_TITLES = {"imagen_jax": "Imagen", "sd_jax": "Stable Diffusion", "sd_jax.vae": "Autoencoder"}
_NAMES = ("sampler.name", "sampler.grid", "sampler.guiding", "diffusion.noise", "diffusion.weight", "diffusion.method")
"""Fields whose values are names of functions. The section "Names" describes the functions.

A name means the same function in both systems.
"""


def page() -> str:
    """Return the content of docs/settings.md."""
    imagen, sd = (systems.find(name).groups for name in ("imagen_jax", "sd_jax"))
    shared = {group: kind for group, kind in imagen.items() if sd.get(group) == kind}
    parts = [*_INTRODUCTION, "## All systems"]
    for group, kind in {"": Run, **shared}.items():
        parts += _section(f"`{group}`" if group else "Fields outside groups", group, kind)
    for name, title in _TITLES.items():
        system = systems.find(name)
        parts.append(f"## {title}")
        for group, networks in _networks(system).items():
            if group in shared or (name, group) == ("sd_jax.vae", "vae"):  # sd_jax lists it.
                continue
            for kind, network in networks.items():
                heading = f"{title}: `{group}`{f' of kind {kind}' if kind else ''}"
                parts += _section(heading, group, network, _extra(system, group, kind))
    return "\n\n".join([*parts, "## Names", *map(_names, _NAMES)]) + "\n"


def in_help(name: str, kinds: Mapping[str, str]) -> str:
    """Return one line for each config field of a system, for --help.

    `kinds` selects the network of a config group, such as {"unet": "magnitude"}. For a group that
    is not in `kinds`, the fields of its first network are listed.
    """
    system = systems.find(name)
    lines = [_help_line(field.name, field) for field in fields(Run)]
    for group, networks in _networks(system).items():
        kind = kinds.get(group, next(iter(networks)))
        for field in (*_extra(system, group, kind), *fields(networks[kind])):
            lines.append(_help_line(f"{group}.{field.name}", field))
    return "\n".join(lines)


def _networks(system: SystemEntry) -> dict[str, dict[str, type]]:
    """Return the classes of each config group, keyed by the value of its field `kind`.

    A group without this field has one class, with the key "".
    """
    return {
        group: {name: typing.cast(type, named.resolved(network)) for name, network in kind.items()}
        if isinstance(kind, Mapping)
        else {"": kind}
        for group, kind in system.groups.items()
    }


def _extra(system: SystemEntry, group: str, kind: str) -> list[FieldDoc]:
    """Return the fields `kind` and `weights` of a config group, if it has them.

    They are not fields of the network's class.
    """
    extra = []
    if kind:
        names = tuple(system.networks[group])
        words = f"one of {', '.join(names)}"
        extra.append(FieldDoc("kind", words, names[0], "The network, which has the fields below."))
    if meaning := sentences(system.settings).get(f"{group}_weights"):
        extra.append(FieldDoc("weights", "a string", "", meaning))
    return extra


def _help_line(path: str, field: FieldDoc) -> str:
    default = f"; default: {_default(field)}" if _default(field) else ""
    return f"--config.{path}: {field.meaning} ({field.values}{default})"


def _section(heading: str, group: str, kind: type, extra: list[FieldDoc] | None = None) -> list[str]:
    """Return a heading, the description of a config group, and a table of its fields, as Markdown.

    `kind` is the class of the group. `extra` holds fields to list before those of the class.
    """
    rows = []
    for field in (*(extra or []), *fields(kind)):
        path, default = f"{group}.{field.name}" if group else field.name, _default(field)
        values = "one of its [names](#names)" if path in _NAMES else field.values
        rows.append(_row(f"`{path}`", field.meaning, values, f"`{default}`" if default else ""))
    about = (inspect.getdoc(kind) or "").split("\n\n")
    table = ["| field | meaning | values | default |", "|---|---|---|---|", *rows]
    return [f"### {heading}", *(" ".join(text.split()) for text in about), "\n".join(table)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(field: FieldDoc) -> str:
    """Return the default of a field, written as in a config file; "" if it has no default."""
    if field.default is dataclasses.MISSING:
        return ""
    return "inf" if field.default == float("inf") else repr(field.default)


def _names(path: str) -> str:
    """Return a Markdown table of the names that the field `path` allows.

    Each row holds a name, the first line of the function's docstring, and the function's
    parameters.
    """
    group, _, name = path.partition(".")
    kind = systems.find("imagen_jax").groups[group]
    table: Any = ranges.names_of(typing.get_type_hints(kind, include_extras=True)[name])
    lines = [f"### Names of `{path}`\n", "| name | function | parameters |", "|---|---|---|"]
    for word in table:
        parameters = [
            f"`{p.name}`" if p.default is p.empty else f"`{p.name}={p.default}`"
            for p in table.parameters(word).values()
        ]
        lines.append(_row(f"`{word}`", table.about(word), ", ".join(parameters)))
    return "\n".join(lines)


if __name__ == "__main__":
    with exits.unless_unread():
        print(page(), end="")
