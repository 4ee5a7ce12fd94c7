"""Check config values against annotations, which state the valid values of each field.

The annotation of a field holds its type and its valid values:

- `Annotated[float, Interval("[0, 1)")]` allows the numbers of an interval.
- `Annotated[str, NAMES]` allows the strings in a tuple or the keys of a dict.
- `Annotated[int, Interval("(0, inf)"), (-1,)]` allows the numbers of an interval, and -1.
- `Annotated[str, TABLE]` with a named.Table allows the names of its functions, with parameters such
  as "ddim(eta=0.5)".
"""

import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import jax.numpy as jnp

from diffusion_jax.config import named
from diffusion_jax.config.named import Table


class Interval:
    """The numbers between two ends, written as "[0, 1)": from 0, included, to 1, excluded."""

    def __init__(self, text: str) -> None:
        """Parse the text of an interval."""
        self.low, self.high = text[1:-1].split(", ")
        self.includes_low, self.includes_high = text[0] == "[", text[-1] == "]"
        self._ends = float(self.low), float(self.high)

    def __contains__(self, number: int | float) -> bool:
        """Return whether the number lies in the interval."""
        low, high = self._ends
        above = low <= number if self.includes_low else low < number
        return above and (number <= high if self.includes_high else number < high)

    def words(self, number: int | float = 0) -> str:
        """Describe the interval, for the error message about `number`, which lies outside it."""
        if self.low == "-inf":
            return "finite"
        if self.high == "inf":
            finite = " and finite" if math.isinf(number) else ""
            return (f"{self.low} or more" if self.includes_low else f"above {self.low}") + finite
        start = "from" if self.includes_low else "above"
        return f"{start} {self.low} to {'below ' * (not self.includes_high)}{self.high}"


DTYPES = ("float32", "bfloat16", "float16")
Count = Annotated[int, Interval("(0, inf)")]
Counts = Annotated[Sequence[int], Interval("(0, inf)")]
Side = Annotated[int, Interval("[1, 16384]")]
"""The length of an image's side in pixels."""
Width = Annotated[int, Interval("[1, 65536]")]
"""A number of channels."""
Multiples = Annotated[Sequence[int], Interval("[1, 1024]")]
"""The number of channels at each level of a network, as multiples of the network's width."""
WholeNumber = Annotated[int, Interval("[0, inf)")]
Positive = Annotated[float, Interval("(0, inf)")]
Share = Annotated[float, Interval("[0, 1]")]
Decay = Annotated[float, Interval("[0, 1)")]
Scale = Annotated[float, Interval("[0, 1000]")]
LowLevel = Annotated[float, Interval("[0, inf)")]
"""The lower end of an interval of noise levels."""
HighLevel = Annotated[float, Interval("(0, inf]")]
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
    allowed, *extra = getattr(hint, "__metadata__", (None,))
    if isinstance(allowed, Table):
        for function in allowed.all_bound(field, str(value)):
            parameters = inspect.signature(function.func).parameters
            for name, argument in function.keywords.items():
                check_value(f"{field}: {name}", argument, parameters[name].annotation)
    elif isinstance(allowed, Collection):
        named.one_of(field, value, allowed)
    elif any(value in values for values in extra):
        pass
    elif words := _misfit(value, kind_of(hint)):
        raise ValueError(f"{field} is {value!r}: it must be {words}")
    elif allowed and value == ():
        raise ValueError(f"{field} is empty: give one number or more")
    elif allowed:
        for number in value if isinstance(value, tuple) else (value,):
            if number not in allowed:
                words = allowed.words(number) + "".join(f", or {x}" for x, *_ in extra if x != ())
                raise ValueError(f"{field} is {value}: it must be {words}")


def kind_of(hint: Any) -> Any:
    """Return an annotation's type without its valid values: int for Annotated[int, (1, 2)]."""
    return getattr(hint, "__origin__", hint) if hasattr(hint, "__metadata__") else hint


def read_value(field: str, value: Any, hint: Any) -> Any:
    """Convert a value to the type of `hint`, and check that it is in the range of `hint`."""
    check_value(field, value := typed(value, hint), hint)
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
    if names := names_of(hint):
        listed = [name or '""' for name in names]
        return f"one of {', '.join(listed)}"
    kind, limits = kind_of(hint), getattr(hint, "__metadata__", ())
    parts = typing.get_args(kind)
    if typing.get_origin(kind) in (tuple, Sequence):
        text = _PLURALS.get(parts[0], "tuples")
    else:
        text = next(_WORDS[part] for part in parts or (kind,) if part in _WORDS)
    if limits and limits[0].low != "-inf":
        interval = limits[0]
        text += " " + re.sub(r"(\S+) or more", r"from \1", interval.words())
        text += ", or inf" if interval.high == "inf" and interval.includes_high else ""
    text += "".join(f", or {extra[0]}" for extra in limits[1:])
    return text + (", or one for each level" if len(parts) > 1 and Ellipsis not in parts else "")


def names_of(hint: Any) -> Collection[str]:
    """Return the table or tuple of names that an annotation allows, or () if it allows no names."""
    first = getattr(hint, "__metadata__", ((),))[0]
    return () if isinstance(first, Interval) else first


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
