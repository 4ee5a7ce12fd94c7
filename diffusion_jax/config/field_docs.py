"""Describe config fields: the valid values, the default and the meaning of each field.

The meaning is the string that follows the field in the source code of its class.
"""

import ast
import functools
import inspect
import textwrap
import typing
from typing import Any, NamedTuple

from diffusion_jax.config import ranges
from diffusion_jax.config.named import Table


class FieldDoc(NamedTuple):
    """A config field as users see it."""

    name: str
    values: str
    """The valid values in words, such as "a number above 0"."""
    default: Any
    """The field's value in configs that omit it; dataclasses.MISSING if a config must set it."""
    meaning: str


def fields(kind: type) -> list[FieldDoc]:
    """Return a FieldDoc for each field that configs can set in a config group, in order.

    `kind` is the class of the group, a NamedTuple or a network.
    """
    hints, meanings = typing.get_type_hints(kind, include_extras=True), sentences(kind)
    return [
        FieldDoc(name, ranges.description(hints[name]), default, meanings.get(name, ""))
        for name, default in ranges.defaults(kind).items()
    ]


@functools.cache
def sentences(kind: type) -> dict[str, str]:
    """Map each field of a class, including inherited ones, to the string that follows the field."""
    found = {}
    for base in reversed(kind.__mro__):
        if inspect.get_annotations(base):
            found |= _strings(ast.parse(textwrap.dedent(inspect.getsource(base))).body[0])
    return found


def _strings(tree: Any) -> dict[str, str]:
    """Map each annotated name in the body of a class to the string that directly follows it.

    `tree` is the parsed class. Names without such a string are left out.
    """
    return {
        node.target.id: " ".join(after.value.value.split())
        for node, after in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(after.value.value, str)
    }


def abouts(hint: Any) -> dict[str, str]:
    """Map the function names that an annotation allows to the first lines of their docstrings.

    Return {} if the annotation allows no names of functions.
    """
    table = ranges.names_of(hint)
    return {name: table.about(name) for name in table} if isinstance(table, Table) else {}
