"""Record the settings with which a folder was first used, and refuse other settings later."""

import json
import os
from collections.abc import Mapping
from typing import Any

from diffusion_jax import files


def record(
    path: str | os.PathLike[str], identity: Mapping[str, Any], *, free: tuple[str, ...] = (), write: bool = True
) -> dict[str, Any]:
    """Write the settings `identity` into the JSON file `path`, or compare them with that file.

    Args:
        path: The file. Its folder is created if missing.
        identity: The settings that determine the results, such as a config.
        free: Prefixes of dotted field names. Fields whose names start with one of them may differ.
        write: Whether to write the file if it is missing. Only one process should write it.

    Returns:
        The identity in the file, or `identity` as JSON values if there was no file.

    Raises:
        ValueError: A field that may not differ has another value in the file.
    """
    path, now = files.path(path), json.loads(json.dumps(identity))
    if path.exists():
        before = json.loads(path.read_text())
        if different := differences(before, now, free):
            raise ValueError(
                f"{path.parent} was started with other settings ({different}): use the same "
                "settings, or write into another folder"
            )
        return before
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps(now, indent=1))
    return now


def differences(before: Mapping[str, Any], now: Mapping[str, Any], free: tuple[str, ...] = ()) -> str:
    """Return a text that lists the fields that differ, with both values, or "" if none differs.

    Takes the arguments of `changed_fields`.
    """
    return "; ".join(
        f"{name}: {stored!r} stored, {requested!r} requested"
        for name, (stored, requested) in changed_fields(before, now, free).items()
    )


def changed_fields(
    before: Mapping[str, Any], now: Mapping[str, Any], free: tuple[str, ...] = ()
) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ: name -> (value before, value now).

    A field in a group has a dotted name, such as "optimizer.lr". Fields whose names begin with a
    prefix in `free` are ignored. A field that one side lacks has the value None there.
    """
    one, other = flat(before), flat(now)
    return {
        name: (one.get(name), other.get(name))
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name) and not name.startswith(free)
    }


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as a flat one, with keys joined by dots and preceded by `prefix`."""
    joined = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping)
        joined |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return joined
