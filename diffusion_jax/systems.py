"""Systems by the names that configs give: which groups a config has, and what checks them."""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from diffusion_jax.config import named, ranges, settings
from diffusion_jax.config.settings import Run
from diffusion_jax.text import registry

KNOWN = ("imagen_jax", "sd_jax", "sd_jax.vae")
"""The systems of this repository, for messages; those of other packages are found as well."""


class System(NamedTuple):
    """A system: the groups of its configs, and the settings that are made of them."""

    settings: type
    """The NamedTuple of a whole config: `run`, and a field for each group, of a NamedTuple or a
    network. A field `unet_weights` is the value `weights` of the group `unet`."""
    check: Callable[[Any], None]
    """ValueError for settings that cannot be or do not go together, beyond the groups that all
    systems have."""
    command: str
    """The module that trains it."""
    example: str = ""
    """MODULE:FUNCTION that makes of settings and a text encoder a task whose other weights are
    shapes, and a batch of one without texts: what is planned and timed; "" for neither."""
    networks: Mapping[str, Mapping[str, type | str]] = MappingProxyType({})
    """Groups that choose by their `kind`: a class or MODULE:CLASS, the default first."""

    @property
    def groups(self) -> dict[str, Any]:
        """The type that each group is read as, or the networks that its `kind` chooses among."""
        types = {k: v for k, v in self.settings.__annotations__.items() if k != "run"}
        return {k: v for k, v in types.items() if not k.endswith("_weights")} | {**self.networks}


def find(name: str) -> System:
    """The system of this name, PACKAGE or PACKAGE.PART, in PACKAGE.settings.SYSTEMS."""
    package = name.partition(".")[0]
    try:
        module = importlib.import_module(f"{package}.settings")
    except ModuleNotFoundError as error:
        if error.name not in (package, f"{package}.settings"):
            raise
        module = None
    systems = getattr(module, "SYSTEMS", {})
    named.one_of("system", name, systems or KNOWN)
    return systems[name]


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the defaults of all that it omits.

    ValueError for unknown groups and fields, and for omitted fields without a default.
    """
    if not config.get("system"):
        raise ValueError(f"the config lacks system: choose from {', '.join(KNOWN)}")
    system = find(config["system"])
    own, groups = settings.split(config)
    values = {"system": "", **settings.complete(ranges.defaults(Run), own, "")}
    for name, group in settings.complete({name: {} for name in system.groups}, groups, "").items():
        values[name] = settings.complete(_fields(system, name, group), group, name)
    return values


def read(config: Mapping[str, Any], name: str) -> Any:
    """The settings of a config of the system `name`, all checked, in milliseconds.

    ValueError that says what to change.
    """
    config = complete(config)
    if config["system"] != name:
        raise ValueError(
            f"the config is of the system {config['system']}, not {name}: "
            f"it is for python -m {find(config['system']).command}"
        )
    system = find(name)
    own, groups = settings.split(config)
    values = {"run": settings.read(Run, own, "")}
    for group, fields in groups.items():
        kind = _kind(system, group, fields)
        if isinstance(system.groups[group], Mapping):
            del fields["kind"]
        if f"{group}_weights" in system.settings._fields:
            values[f"{group}_weights"] = fields.pop("weights")
        values[group] = settings.read(kind, fields, group)
    s = system.settings(**values)
    importlib.import_module("diffusion_jax.train.optimizer").check(s.optimizer, s.run.steps)
    if "text" in values:
        registry.check(s.text)
        settings.check_prompts(s.run, s.data)
    system.check(s)
    return s


def _fields(system: System, name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a group, with their defaults."""
    kinds, fields = system.groups[name], ranges.defaults(_kind(system, name, group))
    if isinstance(kinds, Mapping):
        fields = {"kind": next(iter(kinds)), **fields}
    return {"weights": "", **fields} if f"{name}_weights" in system.settings._fields else fields


def _kind(system: System, name: str, group: Mapping[str, Any]) -> Any:
    """The class that a group is read as: its own, or the network of its `kind`."""
    kinds = system.groups[name]
    if not isinstance(kinds, Mapping):
        return kinds
    kind = group.get("kind", next(iter(kinds)))
    named.one_of(f"{name}.kind", kind, kinds)
    return named.resolved(kinds[kind])
