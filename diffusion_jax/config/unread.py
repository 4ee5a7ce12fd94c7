"""Find config fields without effect, such as a parameter of a sampler that the run does not use.

The settings record which of their fields are read. A field that was never read has no effect.
"""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from diffusion_jax.config import ranges

_Settings = TypeVar("_Settings")


def watched(settings: _Settings, names: Collection[str]) -> tuple[_Settings, Callable[[], dict[str, Any]]]:
    """Return a copy of the settings that records reads, and a function that lists unread fields.

    Args:
        settings: A NamedTuple of config groups.
        names: The groups whose reads are recorded.

    Returns:
        The copy, and a function without arguments. The function returns the fields that have not
        been read so far and whose values differ from their defaults, such as {"sampler.eta": 0.5}.
        If a group is unpacked as a whole, all of its fields count as read.
    """
    s: Any = settings
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
    """Copy a NamedTuple. Reading a field of the copy adds the field's name to the set `read`."""
    kind: Any = type(group)

    class Watched(kind):
        """A NamedTuple that records which of its fields are read."""

        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

        def __iter__(self) -> Any:
            read.add("__iter__")
            return super().__iter__()

        def __reduce__(self) -> Any:
            return kind, tuple(group)  # Pickled as a plain NamedTuple, which records nothing.

    return Watched(*group)
