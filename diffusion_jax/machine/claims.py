"""What a folder was begun with: a JSON file in it, compared by whoever goes on there."""

import json
import os
from collections.abc import Mapping
from typing import Any

from diffusion_jax.machine import files


def claim(
    path: str | os.PathLike[str],
    identity: Mapping[str, Any],
    *,
    free: tuple[str, ...] = (),
    write: bool = True,
) -> dict[str, Any]:
    """Writes the identity into the file `path` of a new folder; returns what the file says.

    ValueError if the folder was begun with another identity, but for fields that are `free`.
    Without `write`, as for all processes but one, the file is compared if it is there.
    """
    path, now = files.path(path), json.loads(json.dumps(identity))
    if path.exists():
        before = json.loads(path.read_text())
        if different := unlike(before, now, free):
            raise ValueError(
                f"{path.parent} was begun with something else ({different}): go on with that, or "
                "write into another folder"
            )
        return before
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps(now, indent=1))
    return now


def unlike(before: Mapping[str, Any], now: Mapping[str, Any], free: tuple[str, ...] = ()) -> str:
    """The fields that differ, with both values, for a message; "" if there are none.

    Fields of groups have dotted names; those that begin with one of `free` may differ.
    """
    one, other = flat(before), flat(now)
    return "; ".join(
        f"{name}: {one.get(name)!r} there, {other.get(name)!r} wanted"
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name) and not name.startswith(free)
    )


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    joined = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping)
        joined |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return joined
