"""The folder of a run: its config, and the names of what else lies in it."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from diffusion_jax.machine import files

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
EVALUATION = "evaluation"
# What a run may change when it is continued: none of it changes what is learned.
_FREE = ("steps", "log_every", "sample_every", "save_every", "keep_last", "keep_every",
         "step_timeout", "prompts", "mesh.", "sampler.", "evaluation.", "data.threads", "data.path",
         "data.max_broken", "text.store")  # fmt: skip


def claim(workdir: str | os.PathLike[str], config: ConfigDict) -> None:
    """Writes the config into a new workdir; ValueError if another config made the workdir.

    Fields that change nothing of what is learned may differ: how long, how often, on which mesh.
    """
    scheme, found, rest = str(workdir).partition(":/")
    if found:
        raise ValueError(
            f"workdir {scheme}://{rest.lstrip('/')} is a URL: give a folder, such as the one where "
            "a bucket is mounted (launch.gke does that, at /gcs/BUCKET)"
        )
    path = pathlib.Path(workdir) / CONFIG
    now = json.loads(json.dumps(config.to_dict()))
    if path.exists():
        before = _flat(json.loads(path.read_text()))
        differing = [
            f"{key}: {before.get(key)!r} there, {_flat(now).get(key)!r} now"
            for key in sorted(before.keys() | _flat(now).keys())
            if before.get(key) != _flat(now).get(key) and not key.startswith(_FREE)
        ]
        if differing:
            raise ValueError(
                f"{workdir} was made with another config ({'; '.join(differing)}): "
                "choose another --workdir, or give the config that it was made with"
            )
    if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps(now, indent=1))


def load(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """The config of a workdir, as `claim` wrote it; FileNotFoundError if there is none."""
    path = pathlib.Path(workdir) / CONFIG
    if not path.exists():
        raise FileNotFoundError(
            f"{workdir} holds no {CONFIG}: it is no workdir of a training run. Train one with\n"
            f"  python -m imagen_jax.train --config=configs/quickstart.py --workdir={workdir}"
        )
    return json.loads(path.read_text())


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    flat = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping)
        flat |= _flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat
