"""Reading of configs for the planner: training tasks, with shapes in place of weights."""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax import systems
from diffusion_jax.config.settings import MeshShape, Optimizer, Run
from diffusion_jax.task import Task
from diffusion_jax.train import memory
from diffusion_jax.train.state import TrainState
from diffusion_jax.weights import lora
from launch.planner import encoders

_JPEG = 0.48  # Bytes per pixel at quality 95: docs/lab/benchmarks.md, input pipeline.


class PlannedTask(NamedTuple):
    """Model and training settings of a config, without weights and data."""

    task: Task
    run: Run
    optimizer: Optimizer
    mesh: MeshShape
    example: Mapping[str, np.ndarray]
    """Batch with one sample, which gives the shapes of larger batches."""
    stored: float
    """Bytes per picture in the data set, as a JPEG or as moments of an autoencoder."""
    itemsize: int
    """Bytes per number in the network's dtype, such as 2 for bfloat16."""
    state: TrainState
    """Shapes of the train state."""
    notes: tuple[str, ...]
    """Notes for the user about the plan's assumptions."""


def read(config: Mapping[str, Any]) -> PlannedTask:
    """Return the model of a config of imagen_jax.train or sd_jax.train, for planning.

    Raises ValueError if the config has mistakes or is for another command.
    """
    name = systems.complete(config)["system"]
    if "." in name:
        raise ValueError(
            f"the config is for the system {name}, which cannot be planned: choose a config of "
            "imagen_jax.train or sd_jax.train"
        )
    s = systems.read(config, name)
    encoder, notes = encoders.open_encoder(s.text, s.data.embedded)
    task, example = importlib.import_module(f"{name}.task").example(s, encoder)
    if s.lora.rank:
        base = jax.eval_shape(task.init, memory.abstract_key())
        task = lora.adapt(task, {"params": base["params"]}, s.lora)
    return PlannedTask(
        task=task,
        run=s.run,
        optimizer=s.optimizer,
        mesh=s.mesh,
        example={**example, **encoder.tokenize(["a cat"])},
        stored=_stored(example, s.data.resize),
        itemsize=jnp.dtype(s.unet.dtype).itemsize,
        state=memory.new_state(task, s.optimizer, s.run.steps),
        notes=notes,
    )


def _stored(example: Mapping[str, np.ndarray], resize: int) -> float:
    """Return the bytes per stored picture: the size of its moments, or of the uncropped JPEG."""
    if "moments" in example:
        return example["moments"].nbytes
    return (resize or example["image"].shape[1]) ** 2 * _JPEG


def parameters(model: PlannedTask) -> int:
    """Return the number of trained parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(model.state.params))
