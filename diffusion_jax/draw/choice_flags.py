"""The flags of a Choice: one for each of its fields that has a help text."""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

from diffusion_jax.draw.model import Choice

C = TypeVar("C", bound=Choice)
Holders = Mapping[str, flags.FlagHolder]
_DEFINE: Mapping[type, Callable[..., flags.FlagHolder]] = {
    str: flags.DEFINE_string, int: flags.DEFINE_integer, float: flags.DEFINE_float,
}  # fmt: skip
flags.disclaim_key_flags()  # They belong to the command that defines them: --help shows them.


def define(kind: type[Choice], without: Collection[str] = ()) -> Holders:
    """Defines a flag for each field; those left out of the command line have its default."""
    return {
        field.name: _DEFINE[_type(field)](field.name, field.default, field.metadata["help"])
        for field in _fields(kind, without)
    }


def define_lists(kind: type[Choice], without: Collection[str] = ()) -> Holders:
    """The same for models in a row: a flag holds one value for all, or one for each."""
    return {
        field.name: flags.DEFINE_list(
            field.name,
            [] if field.default is None else [str(field.default)],
            f"{field.metadata['help']} One for all stages, or one for each.",
        )
        for field in _fields(kind, without)
    }


def values(holders: Holders) -> dict[str, Any]:
    """What the flags of `define` hold, by their names."""
    return {name: holder.value for name, holder in holders.items()}


def choices(kind: type[C], holders: Holders, models: int) -> list[C]:
    """A Choice for each of so many models, of the flags of `define_lists`; ValueError if unfit."""
    types_of = {field.name: _type(field) for field in _fields(kind)}
    columns = [each(name, h.value, types_of[name], models) for name, h in holders.items()]
    rows = zip(*columns, strict=True)
    return [kind(**dict(zip(holders, row, strict=True))) for row in rows]


def each(name: str, given: Sequence[str], kind: Callable[[str], Any], models: int) -> list[Any]:
    """A flag's values, one a model: it may hold one for all, one for each, or none (None).

    A comma between brackets, as in apg(eta=0, norm=5), separates none.
    """
    given = [part.strip() for part in re.split(r",(?![^(]*\))", ",".join(given)) if part]
    written = f"--{name}={','.join(given)}"
    if len(given) not in (0, 1, models):
        raise ValueError(
            f"{written} has {len(given)} values for {models} stages: "
            "give one for all, or one for each"
        )
    try:
        read = [kind(value) for value in given] or [None]
    except ValueError as error:
        raise ValueError(f"{written} is no list of numbers") from error
    if kind is int and any(value is not None and value < 1 for value in read):
        raise ValueError(f"{written}: give numbers from 1 on")
    return read * models if len(read) == 1 else read


def _fields(kind: type[Choice], without: Collection[str] = ()) -> list[dataclasses.Field]:
    fields = dataclasses.fields(kind)
    return [field for field in fields if "help" in field.metadata and field.name not in without]


def _type(field: dataclasses.Field) -> type:
    """The type of a field, int of `int | None`."""
    types_of: tuple[Any, ...] = typing.get_args(field.type) or (field.type,)
    return next(kind for kind in types_of if kind is not types.NoneType)
