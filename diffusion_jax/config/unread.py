"""Find config fields that nothing reads, such as those of another sampler or objective.

Watched settings record which fields are read, so that no table has to list the readers.
"""

from collections.abc import Callable, Collection
from typing import Any

from diffusion_jax.config import ranges


def watched(s: Any, names: Collection[str]) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """Return settings that record reads, and a function that returns the unread fields so far.

    Args:
        s: The settings.
        names: The groups to watch.

    Returns:
        The settings, and a function that returns {"sampler.eta": 0.5} for unread fields that differ
        from their default. A group that is unpacked as a whole counts as read.
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
    """Return a copy of a NamedTuple that adds the name of each field that is read to `read`."""
    kind: Any = type(group)

    class Watched(kind):
        """A NamedTuple that records reads."""

        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

        def __iter__(self) -> Any:
            read.add("__iter__")
            return super().__iter__()

        def __reduce__(self) -> Any:
            return kind, tuple(group)  # A copy does not record reads.

    return Watched(*group)
