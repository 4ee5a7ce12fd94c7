"""Functions by name, with parameters of their own, as configs write them: "ddim(eta=0.5)".

A table maps names to functions, or to "MODULE:FUNCTION" of one that is imported when it is used.
What stands after `*` in a function's signature are its own parameters. One that a config does not
write in brackets is the field of this name in the config's group, where it has such a field, else
the function's default: so "ddim" alone takes sampler.eta.
"""

import ast
import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Function = Callable[..., Any] | str


class Call(NamedTuple):
    """A name, and the parameters written in brackets after it."""

    name: str
    positional: tuple[Any, ...] = ()
    by_name: Mapping[str, Any] = {}


def one_of(field: str, value: str, known: Iterable[str]) -> None:
    """ValueError unless `value` is known, with what was probably meant."""
    known = list(known)
    if value not in known:
        close = difflib.get_close_matches(value, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}"
        raise ValueError(f"{field} is {value!r}: {hint}")


def calls(field: str, text: str) -> list[Call]:
    """The calls of "NAME + NAME(VALUE, PARAMETER=VALUE)"; ValueError for anything else."""
    try:
        node: ast.expr = ast.parse(text.strip(), mode="eval").body
        parts = []
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts.append(node.right)
            node = node.left
        return [_call(part) for part in (node, *reversed(parts))]
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"{field} is {text!r}: write a name, with its own parameters if need be, such as "
            "NAME(PARAMETER=VALUE)"
        ) from error


def bound(
    field: str, text: str, table: Mapping[str, Function], group: Any = None
) -> functools.partial:
    """The function of a table that `text` names, its own parameters bound.

    `group` holds the config's fields, `field` is the name of the one that holds `text`. ValueError
    for a name or parameter that there is not.
    """
    (call, *more) = calls(field, text)
    if more:
        raise ValueError(f"{field} is {text!r}: name one, not {len(more) + 1} with + between them")
    return bind(field, call, table, group)


def bind(
    field: str, call: Call, table: Mapping[str, Function], group: Any = None
) -> functools.partial:
    """The function of a call, as `bound` has it."""
    one_of(field, call.name, table)
    function = resolved(table[call.name])
    kinds = inspect.signature(function).parameters.values()
    own = [p.name for p in kinds if p.kind is p.KEYWORD_ONLY]
    written = {**dict(zip(own, call.positional, strict=False)), **call.by_name}
    unknown = [name for name in call.by_name if name not in own]
    if unknown or len(call.positional) > len(own):
        wrong = unknown[0] if unknown else f"{len(call.positional)} values"
        takes = f"takes {', '.join(own)}" if own else "takes none"
        raise ValueError(f"{field} gives {call.name} the parameter {wrong}: it {takes}")
    fields = {name: getattr(group, name) for name in own if hasattr(group, name)}
    return functools.partial(function, **{**fields, **written})


def checked(table: Mapping[str, Function]) -> Callable[[str, str], functools.partial]:
    """`bound` for a table, as the annotation of a config's field has it (see settings.check)."""
    return lambda field, text: bound(field, text, table)


def _call(node: ast.expr) -> Call:
    if isinstance(node, ast.Name):
        return Call(node.id)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise ValueError("no call")
    by_name = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
    return Call(node.func.id, tuple(map(ast.literal_eval, node.args)), by_name)


def resolved(function: Function) -> Callable[..., Any]:
    """The function itself, imported where it is "MODULE:FUNCTION"."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)
