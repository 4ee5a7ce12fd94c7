"""The flags of a Choice: one for each of its fields that has a help text."""

import dataclasses
import itertools
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

from diffusion_jax.config import ranges
from diffusion_jax.draw.model import Choice

C = TypeVar("C", bound=Choice)
Holders = Mapping[str, flags.FlagHolder]
_DEFINE: Mapping[type, Callable[..., flags.FlagHolder]] = {
    str: flags.DEFINE_string, int: flags.DEFINE_integer, float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
}  # fmt: skip
flags.disclaim_key_flags()  # They belong to the command that defines them: --help shows them.


def define(kind: type[Choice], without: Collection[str] = ()) -> Holders:
    """Defines a flag for each field; those left out of the command line have its default."""
    return {
        field.name: _DEFINE[_type(field)](field.name, field.default, field.metadata["help"])
        for field in _fields(kind, without)
    }


def define_lists(kind: type[Choice], without: Collection[str] = ()) -> Holders:
    """The same for models in a row: a flag holds one value for all, or one for each.

    Free texts, which may hold commas, are repeated for the next model.
    """
    holders = {}
    for field in _fields(kind, without):
        start = [] if field.default is None else [str(field.default)]
        text, free = field.metadata["help"], _is_free(field)
        more = "Repeated for the next stage." if free else "One for all stages, or one for each."
        make = flags.DEFINE_multi_string if free else flags.DEFINE_list
        holders[field.name] = make(field.name, start, f"{text} {more}")
    return holders


def define_axes(kind: type[Choice], without: Collection[str] = ()) -> Holders:
    """The same for a sweep: each may have several values, which `axes` reads."""
    return {
        field.name: flags.DEFINE_multi_string(
            field.name,
            [] if field.default is None else [str(field.default)],
            f"{field.metadata['help']} Several make an axis."
            if not field.metadata["loads"]
            else field.metadata["help"],
        )
        for field in _fields(kind, without)
    }


def axes(kind: type[C], holders: Holders, models: int) -> list[list[C]]:
    """The points of a sweep, of each a Choice for each of so many models; ValueError if unfit.

    A flag of one model holds values with commas between them; of models in a row it holds one value
    for all, or one for each, and is repeated for further ones. Points are all combinations.
    """
    fields = {field.name: field for field in _fields(kind)}
    columns = []
    for name, holder in holders.items():
        field, given = fields[name], holder.value
        if models == 1 and not _is_free(field) and not field.metadata["loads"]:
            given = _parts(given)
        rows = [_row(field, [value], models) for value in given] or [_row(field, [], models)]
        if len(rows) > 1 and field.metadata["loads"]:
            raise ValueError(f"--{name} is given {len(rows)} times: it is no axis, give it once")
        columns.append(rows)
    return [
        [kind(**dict(zip(holders, of_one, strict=True))) for of_one in zip(*point, strict=True)]
        for point in itertools.product(*columns)
    ]


def values(holders: Holders) -> dict[str, Any]:
    """What the flags of `define` hold, by their names."""
    return {name: holder.value for name, holder in holders.items()}


def choices(kind: type[C], holders: Holders, models: int) -> list[C]:
    """A Choice for each of so many models, of the flags of `define_lists`; ValueError if unfit."""
    fields = {field.name: field for field in _fields(kind)}
    columns = [_row(fields[name], holder.value, models) for name, holder in holders.items()]
    rows = zip(*columns, strict=True)
    return [kind(**dict(zip(holders, row, strict=True))) for row in rows]


def each(
    name: str, given: Sequence[str], kind: Callable[[str], Any], models: int, least: int = 1
) -> list[Any]:
    """A flag's values, one a model: it may hold one for all, one for each, or none (None)."""
    return _each(name, _parts(given), kind, models, least)


def _each(name: str, given: Sequence[str], kind: Any, models: int, least: int) -> list[Any]:
    written = f"--{name}={','.join(given)}"
    if len(given) not in (0, 1, models):
        raise ValueError(
            f"{written} has {len(given)} values for {models} stages: "
            "give one for all, or one for each"
        )
    parse = flags.BooleanParser().parse if kind is bool else kind
    try:
        read = [parse(value) for value in given] or [None]
    except ValueError as error:
        raise ValueError(f"{written} is no list of numbers") from error
    if kind is int and any(value is not None and value < least for value in read):
        raise ValueError(f"{written}: give numbers from {least} on")
    return read * models if len(read) == 1 else read


def _row(field: dataclasses.Field, given: Sequence[str], models: int) -> list[Any]:
    """A field's values, one a model."""
    hint, kind = field.metadata.get("kind"), _type(field)
    least = 0 if hint and kind is int and ranges.allows(hint, 0) else 1
    parts = given if _is_free(field) else _parts(given)
    return _each(field.name, parts, kind, models, least)


def _parts(given: Sequence[str]) -> list[str]:
    """Values with commas between them; one between brackets, as in apg(eta=0, norm=5), is none."""
    parts = re.split(r",(?![^(]*\))", ",".join(given))
    return [part.strip() for part in parts if part.strip()]


def _is_free(field: dataclasses.Field) -> bool:
    """Whether any text may be its value."""
    return field.metadata.get("kind") is str


def _fields(kind: type[Choice], without: Collection[str] = ()) -> list[dataclasses.Field]:
    fields = dataclasses.fields(kind)
    return [field for field in fields if "help" in field.metadata and field.name not in without]


def _type(field: dataclasses.Field) -> type:
    """The type of a field, int of `int | None`."""
    types_of: tuple[Any, ...] = typing.get_args(field.type) or (field.type,)
    return next(kind for kind in types_of if kind is not types.NoneType)
