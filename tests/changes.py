"""Change fields of a config by keywords."""

from collections.abc import Mapping
from typing import Any


def change(config: Any, changes: Mapping[str, Any]) -> Any:
    """Set config.a.b for each key "a__b" and config.a for each key "a", and return the config."""
    for name, value in changes.items():
        group, _, field = name.rpartition("__")
        (config[group] if group else config)[field] = value
    return config
