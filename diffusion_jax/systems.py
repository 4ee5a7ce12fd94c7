"""Find a system (a package with models to train) by name, and convert its configs to settings."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from diffusion_jax.config import named, own_modules, ranges, settings
from diffusion_jax.config.settings import Run

KNOWN = ("imagen_jax", "sd_jax", "sd_jax.vae")
"""The systems of this repository, listed in messages. `find` also finds systems of other packages.
"""


class SystemEntry(NamedTuple):
    """A system: the type of its settings, the check of settings, and the training command."""

    settings: type
    """A NamedTuple class with the field `run` and one field per config group. The type of each
    group is a NamedTuple or a network. The field `unet_weights`, if any, holds the value of the
    config field unet.weights."""
    check: Callable[[Any], None]
    """Raises ValueError if settings contradict each other. Value ranges are checked earlier."""
    command: str
    """The module that `python -m` runs for training."""
    networks: Mapping[str, Mapping[str, type | str]] = MappingProxyType({})
    """Config groups whose field `kind` names a network. Each kind maps to a class or
    "MODULE:CLASS" that is imported on use. The first kind is the default."""

    @property
    def groups(self) -> dict[str, Any]:
        """The type of each config group, keyed by group.

        A group with a field `kind` is mapped to its entry in `networks` instead.
        """
        types = {k: v for k, v in self.settings.__annotations__.items() if k != "run"}
        return {k: v for k, v in types.items() if not k.endswith("_weights")} | {**self.networks}


def find(name: str) -> SystemEntry:
    """Return a system by its name PACKAGE or PACKAGE.PART, from the table PACKAGE.settings.SYSTEMS.

    Raises:
        ValueError: If there is no such system, or configs may not name its package.
    """
    package = name.partition(".")[0]
    try:
        module = own_modules.find("system", name, f"{package}.settings")
    except ModuleNotFoundError as error:
        if error.name not in (package, f"{package}.settings"):
            raise
        module = None
    systems = getattr(module, "SYSTEMS", {})
    named.one_of("system", name, systems or KNOWN)
    return systems[name]


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the defaults of all fields that it omits.

    Raises:
        ValueError: For an unknown group or field, or an omitted field without a default.
    """
    if not config.get("system"):
        raise ValueError(f"the config has no field `system`: choose from {', '.join(KNOWN)}")
    system = find(config["system"])
    fields, groups = settings.split(config)
    values = {"system": "", **settings.complete(ranges.defaults(Run), fields, "")}
    for name, group in settings.complete({name: {} for name in system.groups}, groups, "").items():
        values[name] = settings.complete(_fields(system, name, group), group, name)
    return values


def read(config: Mapping[str, Any], name: str) -> Any:
    """Convert a config of the system `name` to its settings, and check them.

    Returns an instance of the system's class `settings`. This takes milliseconds.

    Raises:
        ValueError: If the config is for another system, or the system cannot use a value.
    """
    config = complete(config)
    if config["system"] != name:
        raise ValueError(
            f"the config is of the system {config['system']}, not {name}: "
            f"it is for python -m {find(config['system']).command}"
        )
    system = find(name)
    run, groups = settings.split(config)
    values = {"run": settings.read(Run, run, "")}
    for group, fields in groups.items():
        kind = _kind(system, group, fields)
        if isinstance(system.groups[group], Mapping):
            del fields["kind"]
        if f"{group}_weights" in system.settings._fields:
            values[f"{group}_weights"] = fields.pop("weights")
        values[group] = settings.read(kind, fields, group)
    s = system.settings(**values)
    system.check(s)
    return s


def _fields(system: SystemEntry, name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Map the fields of a config group to their defaults, including `kind` and `weights`."""
    kinds, fields = system.groups[name], ranges.defaults(_kind(system, name, group))
    if isinstance(kinds, Mapping):
        fields = {"kind": next(iter(kinds)), **fields}
    return {"weights": "", **fields} if f"{name}_weights" in system.settings._fields else fields


def _kind(system: SystemEntry, name: str, group: Mapping[str, Any]) -> Any:
    """Return the class of a config group: a NamedTuple, or the network that `kind` names."""
    kinds = system.groups[name]
    if not isinstance(kinds, Mapping):
        return kinds
    kind = group.get("kind", next(iter(kinds)))
    named.one_of(f"{name}.kind", kind, kinds)
    return named.resolved(kinds[kind])
