"""Config fields that hold a name, or a function call such as "ddim(eta=0.5)".

A table maps names to functions, or to strings "MODULE:FUNCTION" that are imported on use. A config
can set keyword-only parameters of the function in brackets after the name. A parameter that is not
set takes the value of the field of the same name in the config group. For example, "ddim" alone
uses sampler.eta. If the group has no such field, the parameter keeps the function's default.
"""

import ast
import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

Function = Callable[..., Any] | str


class Call(NamedTuple):
    """A parsed call: a function's name, and the values of its parameters.

    `positional` holds the values without a parameter name, and `by_name` all others.
    """

    name: str
    positional: tuple[Any, ...] = ()
    by_name: Mapping[str, Any] = {}


def one_of(field: str, value: Any, names: Iterable[str]) -> None:
    """Check that `value`, the value of the config field `field`, is one of `names`.

    Raises:
        ValueError: It is none of them. The message suggests the closest name, and lists all names.
    """
    names = list(names)
    if value not in names:
        close = closest(str(value), names)
        listed = choices(f"did you mean {close!r}?" if close else "", names)
        raise ValueError(f"{field} is {value!r}: {listed}")


def choices(question: str, names: Iterable[str]) -> str:
    """Return a text such as "did you mean 'heun'? Choose from euler, heun" for an error message.

    `question` is the first part, such as "did you mean 'heun'?". It can be "".
    """
    listed = ", ".join(names)
    return f"{question} Choose from {listed}" if question else f"choose from {listed}"


def closest(text: str, names: Iterable[str]) -> str:
    """Return the name that a misspelled text most likely means, or "" if no name is similar.

    Names that start with the text come first: euler_a means euler_ancestral rather than euler.
    Other programs write some samplers differently, so "DPM++ 2M" is compared as dpmpp_2m.
    """
    text, names = re.sub(r"[\s-]", "_", text.lower().replace("+", "p")), list(names)
    starting = [name for name in names if text and name.startswith(text)]
    return next(iter([*starting, *difflib.get_close_matches(text, names, n=1)]), "")


def calls(field: str, text: str, names: Collection[str] = ()) -> list[Call]:
    """Parse one or more calls joined by +, such as "NAME + NAME(VALUE, PARAMETER=VALUE)".

    Raises ValueError if the text has another form. The message contains `field`, the name of the
    config field, and may list `names`, the valid names.
    """
    try:
        node: ast.expr = ast.parse(text.strip(), mode="eval").body
        parts = []
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts.append(node.right)
            node = node.left
        return [_call(part) for part in (node, *reversed(parts))]
    except (SyntaxError, ValueError) as error:
        if names and "(" not in text:
            one_of(field, text, names)
        raise ValueError(
            f"{field} is {text!r}: write a name, optionally with parameters, such as "
            "NAME(PARAMETER=VALUE)"
        ) from error


def bound(
    field: str, text: str, table: Mapping[str, Function], group: Any = None
) -> functools.partial:
    """Return the function that `text` names in a table, with its parameters bound.

    Args:
        field: The name of the config field that holds `text`, for error messages.
        text: A name, optionally with parameters in brackets.
        table: Maps names to functions.
        group: A config group. A parameter that `text` omits takes the value of the group's field of
            the same name, if there is one. Otherwise, it keeps the function's default.

    Raises:
        ValueError: The name or a parameter is unknown, `text` gives too many values, or it joins
            several names by +.
    """
    (call, *more) = calls(field, text, table)
    if more:
        raise ValueError(f"{field} is {text!r}: it takes one name, not {len(more) + 1} joined by +")
    return bind(field, call, table, group)


def bind(
    field: str, call: Call, table: Mapping[str, Function], group: Any = None
) -> functools.partial:
    """Return the function that a parsed call names in a table, with its parameters bound.

    The arguments are those of `bound`, but with a parsed call instead of a text. A parameter that
    the call omits takes the value of the field of the same name in `group`, if there is one. Raises
    ValueError if the name or a parameter is unknown, or if the call gives too many values.
    """
    one_of(field, call.name, table)
    function = resolved(table[call.name])
    kinds = inspect.signature(function).parameters.values()
    parameters = [p.name for p in kinds if p.kind is p.KEYWORD_ONLY]
    written = {**dict(zip(parameters, call.positional, strict=False)), **call.by_name}
    unknown = [name for name in call.by_name if name not in parameters]
    if unknown or len(call.positional) > len(parameters):
        wrong = f"the parameter {unknown[0]}" if unknown else f"{len(call.positional)} values"
        takes = f"takes only {', '.join(parameters)}" if parameters else "takes no parameters"
        raise ValueError(f"{field} gives {call.name} {wrong}, but {call.name} {takes}")
    fields = {name: getattr(group, name) for name in parameters if hasattr(group, name)}
    return functools.partial(function, **{**fields, **written})


def checked(table: Mapping[str, Function]) -> Callable[[str, str], functools.partial]:
    """Return a function (field, text) that calls `bound` with this table.

    The annotation of a config field can hold the returned function, which then checks the value.
    """
    return lambda field, text: bound(field, text, table)


def resolved(function: Function) -> Callable[..., Any]:
    """Return the function of a table's entry. A string "MODULE:FUNCTION" is imported."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def _call(node: ast.expr) -> Call:
    if isinstance(node, ast.Name):
        return Call(node.id)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise ValueError("it is neither a name nor a call such as NAME(PARAMETER=VALUE)")
    by_name = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
    return Call(node.func.id, tuple(map(ast.literal_eval, node.args)), by_name)
