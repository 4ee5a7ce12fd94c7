"""Check config values against annotations, which state the valid values of each field.

The annotation of a field holds its type and its valid values:

- `Annotated[float, "[0, 1)"]` allows the numbers of an interval.
- `Annotated[str, TABLE]` allows the keys of a table.
- `Annotated[int, "(0, inf)", (-1,)]` allows the numbers of an interval, and -1.
- `Annotated[str, FUNCTION]` allows names of functions, with parameters such as "ddim(eta=0.5)".
  FUNCTION(field, text) parses the text, and raises ValueError if the text is invalid.
"""

import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax.numpy as jnp

from diffusion_jax.config import named

DTYPES = ("float32", "bfloat16", "float16")
Count = Annotated[int, "(0, inf)"]
Counts = Annotated[Sequence[int], "(0, inf)"]
Side = Annotated[int, "[1, 16384]"]
"""The length of an image's side in pixels."""
Width = Annotated[int, "[1, 65536]"]
"""A number of channels."""
Multiples = Annotated[Sequence[int], "[1, 1024]"]
"""The number of channels at each level of a network, as multiples of the network's width."""
Amount = Annotated[int, "[0, inf)"]
Positive = Annotated[float, "(0, inf)"]
Share = Annotated[float, "[0, 1]"]
Decay = Annotated[float, "[0, 1)"]
Scale = Annotated[float, "[0, 1000]"]
LowLevel = Annotated[float, "[0, inf)"]
"""The lower end of an interval of noise levels."""
HighLevel = Annotated[float, "(0, inf]"]
"""The upper end of an interval of noise levels."""
_TRUTH = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def check(kind: type, values: Mapping[str, Any], name: str) -> None:
    """Check the values of a config group against the annotations of its class.

    The default of a field is always valid. An empty tuple is valid only if the annotation allows
    it explicitly with ().

    Args:
        kind: The NamedTuple or network class that annotates the fields.
        values: Maps field names to values.
        name: The group's name for error messages; "" for fields outside groups.

    Raises:
        ValueError: A value has the wrong type or is out of range. The message names the first such
            field.
    """
    dot, default = f"{name}." if name else "", defaults(kind)
    for field, hint in typing.get_type_hints(kind, include_extras=True).items():
        if field in values and values[field] != default.get(field):
            check_value(f"{dot}{field}", values[field], hint)


def check_value(field: str, value: Any, hint: Any) -> None:
    """Raise ValueError if a value does not fit `hint`, the annotation of its field.

    `field` is the name of the field for the message.
    """
    kind, ranges = kind_of(hint), getattr(hint, "__metadata__", ())
    if ranges and callable(ranges[0]):
        calls = ranges[0](field, value)
        for call in calls if isinstance(calls, list) else [calls]:
            parameters = inspect.signature(call.func).parameters
            for name, argument in call.keywords.items():
                check_value(f"{field}: {name}", argument, parameters[name].annotation)
        return
    tables = [table for table in ranges if not isinstance(table, str)]
    if any(value in table for table in tables):
        return
    if len(tables) == len(ranges) > 0:
        named.one_of(field, value, tables[0])
    if words := _misfit(value, kind):
        raise ValueError(f"{field} is {value!r}: it must be {words}")
    for interval in (part for part in ranges if isinstance(part, str)):
        if value == ():
            raise ValueError(f"{field} is empty: give one number or more")
        for number in value if isinstance(value, tuple) else (value,):
            if not _inside(number, interval):
                others = "".join(f", or {x}" for table in tables for x in table if x != ())
                words = _in_words(interval, number)
                raise ValueError(f"{field} is {value}: it must be {words}{others}")


def kind_of(hint: Any) -> Any:
    """Return an annotation's type without its valid values: Annotated[int, "[0, 1]"] -> int."""
    return getattr(hint, "__origin__", hint) if hasattr(hint, "__metadata__") else hint


def read_value(field: str, value: Any, hint: Any) -> Any:
    """Convert a value to the type of its field's annotation `hint`, check it, and return it.

    `field` is the name of the field. Raises ValueError if the value has another type or is out of
    range.
    """
    value = typed(value, hint)
    check_value(field, value, hint)
    return value


def typed(value: Any, hint: Any) -> Any:
    """Convert a string to the type of the annotation `hint`, and an int to float if needed.

    Other values, and strings that cannot be converted, are returned unchanged. `check_value` can
    then reject them.
    """
    kind = kind_of(hint)
    if not isinstance(value, str):
        return float(value) if kind is float and type(value) is int else value
    if kind is bool:
        return _TRUTH.get(value.lower(), value)
    try:
        return kind(value)
    except ValueError:
        return value


def description(hint: Any) -> str:
    """Describe the values that an annotation allows, such as "a number from 0 to 1"."""
    if names := options(hint):
        listed = [name or '""' for name in names]
        return f"one of {', '.join(listed)}"
    kind, limits = kind_of(hint), getattr(hint, "__metadata__", ())
    parts = typing.get_args(kind)
    if typing.get_origin(kind) in (tuple, Sequence):
        text = _PLURALS.get(parts[0], "tuples")
    else:
        scalar = next(part for part in parts or (kind,) if part in _WORDS)
        text = _WORDS[scalar]
    for limit in limits:
        if not isinstance(limit, str):
            text += f", or {limit[0]}"
        elif limit != "(-inf, inf)":
            text += " " + re.sub(r"(\S+) or more", r"from \1", _in_words(limit, 0))
            text += ", or inf" if limit.endswith("inf]") else ""
    return text + (", or one for each level" if len(parts) > 1 and Ellipsis not in parts else "")


def options(hint: Any) -> list[str]:
    """Return the names that an annotation allows, or [] if it allows no names."""
    table = getattr(hint, "__metadata__", ("",))[0]
    if not callable(table):
        return [] if isinstance(table, str) else list(map(str, table))
    # FUNCTION(field, text) does not expose its table of names. But the error message for an unknown
    # name, here "_", lists all names.
    try:
        table("", "_")
    except ValueError as error:
        return str(error).partition(": choose from ")[2].split(", ")
    return []


def defaults(kind: type) -> dict[str, Any]:
    """Map the field names of a NamedTuple or network to their defaults.

    A field without a default maps to dataclasses.MISSING. For a network, Flax's own fields are left
    out.
    """
    if not dataclasses.is_dataclass(kind):
        default: Mapping[str, Any] = kind._field_defaults
        return {field: default.get(field, dataclasses.MISSING) for field in kind._fields}
    fields: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(kind)}
    fields["dtype"] = jnp.dtype(fields["dtype"]).name
    return {name: fields[name] for name in fields if name not in ("parent", "name")}


def _misfit(value: Any, kind: Any) -> str:
    """Return the name of the type that `value` must have, or "" if its type is allowed."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (tuple, Sequence):
        inner = parts[0] if origin is Sequence or parts[1:] == (...,) else Any
        fits = isinstance(value, tuple) and not any(_misfit(part, inner) for part in value)
        return "" if fits else f"a tuple, with each entry {_misfit(None, inner) or 'a tuple'}"
    if origin is not None:
        each = [_misfit(value, part) for part in parts if _misfit(None, part)]
        return " or ".join(each) if all(each) else ""
    if kind not in _WORDS:
        return ""
    fits = isinstance(value, (int, float) if kind is float else kind)
    fits = fits and isinstance(value, bool) == (kind is bool)
    return "" if fits else _WORDS[kind]


def _inside(number: int | float, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(", "))
    above = low <= number if interval[0] == "[" else low < number
    return above and (number <= high if interval[-1] == "]" else number < high)


def _in_words(interval: str, number: int | float) -> str:
    """Describe an interval in words, for the error message about a number outside it."""
    (low, high), opened = interval[1:-1].split(", "), interval[0] == "("
    if low == "-inf":
        return "finite"
    if high == "inf":
        finite = " and finite" if math.isinf(number) else ""
        return (f"above {low}" if opened else f"{low} or more") + finite
    return f"{'above' if opened else 'from'} {low} to {'below ' * (interval[-1] == ')')}{high}"
