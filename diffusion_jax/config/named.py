"""Config fields that hold a name, or a function call such as "ddim(eta=0.5)".

A Table maps names to functions, or to strings "MODULE:FUNCTION" that are imported on use. A config
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


class Call(NamedTuple):
    """A parsed call: a function's name, and the values of its parameters.

    `positional` holds the values without a parameter name, and `by_name` all others.
    """

    name: str
    positional: tuple[Any, ...] = ()
    by_name: Mapping[str, Any] = {}


class Table(dict[str, Any]):
    """Functions by name. A config field that can hold the names is annotated with the table."""

    joins = False
    """Whether a field can join several names by +."""

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function of this name."""
        return resolved(self[name])

    def about(self, name: str) -> str:
        """Return the first line of the function's docstring, or ""."""
        return next(iter((inspect.getdoc(self.function(name)) or "").splitlines()), "")

    def parameters(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the parameters of the function that a config can set, keyed by their names."""
        parameters = inspect.signature(self.function(name)).parameters.values()
        return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}

    def question(self, text: str) -> str:
        """Return a question such as "did you mean 'heun'?", or "" if no name is close to `text`."""
        close = closest(text, self)
        return f"did you mean {close!r}?" if close else ""

    def bound(self, field: str, text: str, group: Any = None) -> functools.partial:
        """Return the function that `text` names, with its parameters bound, as `all_bound` does."""
        return self.all_bound(field, text, group)[0]

    def all_bound(self, field: str, text: str, group: Any = None) -> list[functools.partial]:
        """Return the functions that `text` joins by +, with their parameters bound.

        Args:
            field: The name of the config field that holds `text`, for error messages.
            text: Names, optionally with parameters in brackets.
            group: A config group. A parameter that `text` omits takes the value of the group's
                field of the same name, if there is one. Otherwise, it keeps the function's default.

        Raises:
            ValueError: A name or a parameter is unknown, a call gives too many values, `text`
                joins names although the table does not allow this, or a parameter has neither a
                value nor a default. The last is checked only with a `group`.
        """
        parts = calls(field, text, self)
        if len(parts) > 1 and not self.joins:
            raise ValueError(f"{field} is {text!r}: it takes one name, not {len(parts)} joined by +")
        return [self._bind(field, call, group) for call in parts]

    def _bind(self, field: str, call: Call, group: Any) -> functools.partial:
        one_of(field, call.name, self)
        parameters = self.parameters(call.name)
        written = {**dict(zip(parameters, call.positional, strict=False)), **call.by_name}
        unknown = [name for name in call.by_name if name not in parameters]
        if unknown or len(call.positional) > len(parameters):
            wrong = f"the parameter {unknown[0]}" if unknown else f"{len(call.positional)} values"
            takes = f"takes only {', '.join(parameters)}" if parameters else "takes no parameters"
            raise ValueError(f"{field} gives {call.name} {wrong}, but {call.name} {takes}")
        fields = {name: getattr(group, name) for name in parameters if hasattr(group, name)}
        values = {**fields, **written}
        required = [name for name, p in parameters.items() if p.default is p.empty]
        if group is not None and (missing := [name for name in required if name not in values]):
            raise ValueError(
                f"{field} is {call.name!r}, but {call.name} needs a value of {missing[0]}: write "
                f"{call.name}({missing[0]}=VALUE)" + ", or none" * ("none" in self)
            )
        return functools.partial(self.function(call.name), **values)


def one_of(field: str, value: Any, names: Iterable[str]) -> None:
    """Check that `value`, the value of the config field `field`, is one of `names`.

    Raises:
        ValueError: It is none of them. The message suggests the closest name, and lists all names.
    """
    if value not in (listed := list(names)):
        table = names if isinstance(names, Table) else Table(dict.fromkeys(listed))
        raise ValueError(f"{field} is {value!r}: {choices(table.question(str(value)), listed)}")


def choices(question: str, names: Iterable[str]) -> str:
    """Return a text such as "did you mean 'heun'? Choose from euler, heun" for an error message.

    `question` is the first part, such as "did you mean 'heun'?". It can be "".
    """
    listed = ", ".join(name or "''" for name in names)
    return f"{question} Choose from {listed}" if question else f"choose from {listed}"


def closest(text: str, names: Iterable[str]) -> str:
    """Return the name that a misspelled text most likely means, or "" if no name is similar.

    Names that start with the text come first: euler_a means euler_ancestral rather than euler.
    Other programs write some samplers differently, so "DPM++ 2M" is compared as dpmpp_2m.
    """
    text, names = re.sub(r"[\s-]", "_", text.lower().replace("+", "p")), list(names)
    starting = [name for name in names if text and name.startswith(text)]
    return next(iter([*starting, *difflib.get_close_matches(text, names, n=1)]), "")


def calls(field: str, text: str, names: Collection[str] = ()) -> tuple[Call, ...]:
    """Parse one or more calls joined by +, such as "NAME + NAME(VALUE, PARAMETER=VALUE)".

    Raises ValueError if the text has another form. The message contains `field`, the name of the
    config field, and may list `names`, the valid names.
    """
    if text in names:
        return (Call(text),)
    try:
        return _parsed(text)
    except (SyntaxError, ValueError) as error:
        if names and "(" not in text:
            one_of(field, text, names)
        raise ValueError(
            f"{field} is {text!r}: write a name, optionally with parameters, such as "
            "NAME(PARAMETER=VALUE), whose values are numbers or texts in quotes"
        ) from error


def resolved(function: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return the function of a table's entry. A string "MODULE:FUNCTION" is imported."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.lru_cache  # A config's text is parsed once, when the config is checked.
def _parsed(text: str) -> tuple[Call, ...]:
    node: ast.expr = ast.parse(text.strip(), mode="eval").body
    parts = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts.append(node.right)
        node = node.left
    return tuple(_call(part) for part in (node, *reversed(parts)))


def _call(node: ast.expr) -> Call:
    if isinstance(node, ast.Name):
        return Call(node.id)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise ValueError("it is neither a name nor a call such as NAME(PARAMETER=VALUE)")
    by_name = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
    return Call(node.func.id, tuple(map(ast.literal_eval, node.args)), by_name)
