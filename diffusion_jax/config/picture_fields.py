"""Fields: named numbers of each picture, such as an aesthetic score, that a network also sees.

data.fields names them, and sampler.fields gives the numbers to draw with. docs/data.md explains
both.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

PREFIX = "field_"
_FORM = re.compile(r"(?:(?P<place>[^:=]+):)?(?P<name>[^:=,]+)(?:=(?P<low>[^=]+?)\.\.(?P<high>.+))?")


class Field(NamedTuple):
    """A named number of each picture."""

    place: str
    """The kind of file that holds the number, such as "json" or "csv"; "" for the source's own."""
    name: str
    """The name of the column, of the feature or of the field of a JSON file."""
    low: float
    """The smallest number, which the network sees as 0."""
    high: float
    """The largest number, which the network sees as 1."""

    @property
    def key(self) -> str:
        """The name of the numbers in a batch, of the network's argument and of its layers."""
        return PREFIX + re.sub(r"\W", "_", self.name)

    def __str__(self) -> str:
        return f"{self.place}:" * bool(self.place) + f"{self.name}={self.low!r}..{self.high!r}"

    def number(self, value: Any) -> float:
        """Convert a value to a number. Raises ValueError if it is not a number in the range."""
        number = _number(value)
        if not self.low <= number <= self.high:
            shown = "missing" if value is None else f"{value!r:.60}"
            raise ValueError(
                f"the field {self.name} is {shown}: it must be a number from {self.low:g} to "
                f"{self.high:g}, the range in data.fields"
            )
        return number


def read(texts: Sequence[str]) -> tuple[Field, ...]:
    """Parse data.fields, such as ("aesthetic=0..10", "json:year=1900..2030").

    Raises:
        ValueError: A text has another form, a range is empty, or two fields have one name.
    """
    fields = tuple(map(_parsed, texts))
    keys = [field.key for field in fields]
    if twice := [field.name for field in fields if keys.count(field.key) > 1]:
        raise ValueError(f"data.fields has several fields {twice[0]!r}: give each its own name")
    return fields


def ranges(texts: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return {name: (low, high)} of data.fields, which is all that a network knows of them."""
    return {field.name: (field.low, field.high) for field in read(texts)}


def values(fields: Sequence[Field], text: str) -> dict[str, float]:
    """Parse sampler.fields, such as "aesthetic=7, year=1950", to numbers, keyed by Field.key.

    Fields that the text omits are left out: the picture is drawn as if they were unknown.

    Raises:
        ValueError: The text has another form, names another field, or a number is out of range.
    """
    found, by_name = {}, {field.name: field for field in fields}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in by_name:
            raise ValueError(
                f"sampler.fields is {text!r}, but the fields of this model are "
                f"{', '.join(by_name)} (data.fields): write NAME=NUMBER for each, with commas "
                "between them"
                if fields
                else f"sampler.fields is {text!r}, but this model was trained without data.fields: "
                "leave sampler.fields empty, or train with data.fields"
            )
        if by_name[name].key in found:
            raise ValueError(f"sampler.fields is {text!r}: it gives {name} twice")
        found[by_name[name].key] = by_name[name].number(value)
    return found


def arrays(fields: Sequence[Field], values: Mapping[str, float], rows: int) -> dict[str, Float[np.ndarray, "B"]]:
    """Return a batch's numbers for `rows` pictures that share them. NaN is an unknown number.

    `values` holds the known numbers, keyed by Field.key.
    """
    of = lambda field: np.full(rows, values.get(field.key, np.nan), np.float32)
    return {field.key: of(field) for field in fields}


def refuse(texts: Sequence[str], workdir: Any) -> None:
    """Raise ValueError if the model of a run has fields, which no other project can read."""
    if texts:
        raise ValueError(
            f"{workdir} was trained with data.fields {', '.join(texts)}, which no other project's "
            "networks have: only models without fields can be exported"
        )


def _parsed(text: str) -> Field:
    match, low, high = _FORM.fullmatch(text.strip()), 0.0, 1.0
    if match and match["low"]:
        low, high = _number(match["low"]), _number(match["high"])
    if not match or not -math.inf < low < high < math.inf:
        raise ValueError(
            f"data.fields holds {text!r}: write NAME=LOW..HIGH with the smallest and the largest "
            "number, such as aesthetic=0..10, or KIND:NAME=LOW..HIGH with a kind of file, such as "
            "csv:aesthetic=0..10"
        )
    return Field(match["place"] or "", match["name"].strip(), low, high)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
