"""Which fields of a config nothing reads: those of another sampler, objective or data source.

Settings that are watched note what is read of them, so that no table says who reads what.
"""

from collections.abc import Callable, Collection
from typing import Any

from diffusion_jax.config import ranges


def watched(s: Any, names: Collection[str]) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """The same settings, and what says which fields of these groups were not read so far.

    It gives {"sampler.eta": 0.5} of the fields that are not at their default. A group that is
    taken apart as a whole counts as read.
    """
    groups = {name: getattr(s, name) for name in names if hasattr(s, name)}
    read: dict[str, set[str]] = {name: set() for name in groups}

    def unread() -> dict[str, Any]:
        return {
            f"{name}.{field}": getattr(group, field)
            for name, group in groups.items()
            if not read[name] & {"_replace", "_asdict", "__iter__"}
            for field, default in ranges.defaults(type(group)).items()
            if field not in read[name] and getattr(group, field) != default
        }

    return s._replace(**{name: _watch(g, read[name]) for name, g in groups.items()}), unread


def _watch(group: Any, read: set[str]) -> Any:
    """The same NamedTuple, which adds to `read` the names that it is asked for."""
    kind: Any = type(group)

    class Watched(kind):
        """Notes what is read."""

        def __getattribute__(self, name: str) -> Any:
            """The field."""
            read.add(name)
            return super().__getattribute__(name)

        def __iter__(self) -> Any:
            """The values of all fields."""
            read.add("__iter__")
            return super().__iter__()

        def __reduce__(self) -> Any:
            """A copy is not watched."""
            return kind, tuple(group)

    return Watched(*group)
