"""The ranges of settings: whether the values of a config are what its fields' annotations say."""

import inspect
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_jax import settings


def check(kind: type, values: Mapping[str, Any], name: str) -> None:
    """ValueError for the first value of a NamedTuple or network that cannot be.

    The annotation of a field holds its type and its range: an interval, "[0, 1)", in which the
    number or each of a tuple's must lie, and other values that there are, such as a table's names.
    A function in their place makes of (field, value) a functools.partial whose arguments, too, must
    lie in the ranges of its parameters, or raises ValueError (see diffusion.named).
    The default is one of them, and a tuple with a range is not empty unless () is.
    """
    dot, known = f"{name}." if name else "", settings.defaults(kind)
    for field, hint in typing.get_type_hints(kind, include_extras=True).items():
        if field in values and values[field] != known.get(field):
            check_value(f"{dot}{field}", values[field], hint)


def check_value(field: str, value: Any, hint: Any) -> None:
    """`check` of one value, by the annotation of its field."""
    kind, ranges = getattr(hint, "__origin__", hint), getattr(hint, "__metadata__", ())
    kind = kind if ranges else hint
    if ranges and callable(ranges[0]):
        calls = ranges[0](field, value)
        for call in calls if isinstance(calls, list) else [calls]:
            parameters = inspect.signature(call.func).parameters
            for name, bound in call.keywords.items():
                check_value(f"{field}: {name}", bound, parameters[name].annotation)
        return
    others = [known for known in ranges if not isinstance(known, str)]
    if any(value in known for known in others):
        return
    if len(others) == len(ranges) > 0:
        settings.one_of(field, value, others[0])
    if words := _misfit(value, kind):
        raise ValueError(f"{field} is {value!r}: it must be {words}")
    for interval in (known for known in ranges if isinstance(known, str)):
        if value == ():
            raise ValueError(f"{field} is empty: give one number or more")
        for number in value if isinstance(value, tuple) else (value,):
            if not _inside(number, interval):
                either = "".join(f", or {x}" for known in others for x in known if x != ())
                words = _in_words(interval, number)
                raise ValueError(f"{field} is {value}: it must be {words}{either}")


WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}


def _misfit(value: Any, kind: Any) -> str:
    """What a value of a field of this type would be; "" if it is one, or the type is another."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (tuple, Sequence):
        inner = parts[0] if origin is Sequence or parts[1:] == (...,) else Any
        fits = isinstance(value, tuple) and not any(_misfit(part, inner) for part in value)
        return "" if fits else f"a tuple, each {_misfit(None, inner) or 'a tuple'}"
    if origin is not None:
        each = [_misfit(value, part) for part in parts if _misfit(None, part)]
        return " or ".join(each) if all(each) else ""
    if kind not in WORDS:
        return ""
    fits = isinstance(value, (int, float) if kind is float else kind)
    fits = fits and isinstance(value, bool) == (kind is bool)
    return "" if fits else WORDS[kind]


def _inside(number: int | float, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(", "))
    above = low <= number if interval[0] == "[" else low < number
    return above and (number <= high if interval[-1] == "]" else number < high)


def _in_words(interval: str, number: int | float) -> str:
    """The numbers of an interval, of which `number` is none."""
    (low, high), opened = interval[1:-1].split(", "), interval[0] == "("
    if low == "-inf":
        return "finite"
    if high == "inf":
        finite = " and finite" if math.isinf(number) else ""
        return (f"above {low}" if opened else f"{low} or more") + finite
    return f"{'above' if opened else 'from'} {low} to {'below ' * (interval[-1] == ')')}{high}"
