"""Read the manifest of a run: an entry for each start, and what the run continues."""

import datetime
import math
import os
from typing import Any

from absl import logging

from diffusion_jax import files
from diffusion_jax.files import untrusted

MANIFEST = "manifest.json"


def read_manifest(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the entries of a run's manifest, or [] if there is no manifest.

    If the file is damaged, log a warning and return [].
    """
    return _read_manifest(workdir)["runs"]


def read_lineage(workdir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return what a workdir continues, as {"run", "step", "fingerprint"}, or None for nothing.

    If the other run continued a run as well, the key "continued_from" holds that lineage.
    """
    return _read_manifest(workdir).get("continued_from")


def read_averages_from(workdir: str | os.PathLike[str]) -> int:
    """Return the step at which the averages of a run began: 0, unless it added a LoRA later."""
    return (read_lineage(workdir) or {}).get("averages_from", 0)


def read_widths_from(workdir: str | os.PathLike[str]) -> dict[float, int]:
    """Return the step at which each power-function average of a run began, keyed by its width.

    It is the first of the latest consecutive starts whose configs have this width.
    """
    begun: dict[float, int] = {}
    for entry in read_manifest(workdir):
        widths = entry["config"].get("optimizer", {}).get("ema_widths", ())
        first: int = entry["first_step"]
        begun = {width: begun.get(width, first) for width in widths}
    return begun


def _entry(entry: Any) -> dict[str, Any]:
    """Return an entry of a manifest. Raises an error if a value that others read is damaged."""
    datetime.datetime.fromisoformat(entry["start"])
    config = dict(entry["config"])
    counts = [entry["first_step"], config.get("batch_size", 0)]
    widths = config.get("optimizer", {}).get("ema_widths", ())
    shares = [config.get("data", {}).get("heldout", 0.0)]
    _check_numbers(*counts, *widths, *shares, *entry.get("seconds", {}).values())
    return {**entry, "config": config}


def _check_numbers(*values: Any) -> None:
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        raise ValueError("a value is not a number")


def _read_manifest(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    path = files.path(workdir) / MANIFEST
    if not path.exists():
        return {"runs": []}
    try:
        content = untrusted.parse_json(path.read_bytes())
        if lineage := content.get("continued_from"):
            _check_numbers(lineage["step"], lineage.get("averages_from", 0))
            if not isinstance(lineage["run"], str):
                raise ValueError("continued_from does not name a run")
        return {**content, "runs": list(map(_entry, content["runs"]))}
    except (AttributeError, ValueError, TypeError, KeyError) as error:
        logging.warning("%s is damaged (%r): ignoring its entries", path, error)
        return {"runs": []}
