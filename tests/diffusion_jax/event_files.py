"""Read event files with TensorBoard."""

import pathlib
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.util import tensor_util


def tags(folder: pathlib.Path) -> set[str]:
    """Return the tags of all data in a folder of event files."""
    return set(_read(folder).Tags()["tensors"])


def points(folder: pathlib.Path, tag: str) -> list[tuple[int, Any]]:
    """Return (step, value) for each point by step. Images have the value [width, height, PNG, ...].

    TensorBoard reads files by name. Two that one process opens within a second may have any order.
    """
    values = sorted(_read(folder).Tensors(tag), key=lambda value: value.step)
    return [(value.step, tensor_util.make_ndarray(value.tensor_proto).tolist()) for value in values]


def hparams(folder: pathlib.Path) -> dict[str, Any]:
    """Return the config of a run."""
    raw = _read(folder).PluginTagToContent("hparams")["_hparams_/session_start_info"]
    content = plugin_data_pb2.HParamsPluginData.FromString(raw).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in content.items()}


def _read(folder: pathlib.Path) -> EventAccumulator:
    return EventAccumulator(str(folder), {"tensors": 0}).Reload()
