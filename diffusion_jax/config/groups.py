"""Config groups that extend others: NamedTuples with inherited fields."""

import collections
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast, dataclass_transform

_Kind = TypeVar("_Kind", bound=type)


class Group:
    """A config group that another class can extend (see `group`)."""

    if TYPE_CHECKING:  # `group` makes each such class a NamedTuple, which has these methods.
        _field_defaults: ClassVar[dict[str, Any]]
        _asdict: ClassVar[Any]

        def _replace(self, **changes: Any) -> Self: ...


@dataclass_transform(frozen_default=True)
def group(kind: _Kind) -> _Kind:
    """Make a class a NamedTuple with the annotated fields of its base class, then its own.

    A field that the base class has keeps its place. All fields need defaults.
    """
    own = {field: vars(kind)[field] for field in inspect.get_annotations(kind)}
    defaults = {**getattr(kind, "_field_defaults", {}), **own}
    fields: Any = collections.namedtuple(kind.__name__, defaults, defaults=defaults.values())
    replaced = {"__dict__", "__weakref__", *own}
    body = {name: value for name, value in vars(kind).items() if name not in replaced}
    body["__qualname__"] = kind.__qualname__
    return cast(_Kind, type(kind.__name__, (fields, *kind.__bases__), body))
