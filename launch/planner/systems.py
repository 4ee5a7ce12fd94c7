"""The train step of any config as shapes: what the planner needs to know of a system."""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax import lora, systems
from diffusion_jax.config.settings import MeshShape, Optimizer, Run
from diffusion_jax.task import Task
from diffusion_jax.train import memory
from diffusion_jax.train.optimizer import make_optimizer
from diffusion_jax.train.state import TrainState, init_state
from launch.planner import encoders

_JPEG = 0.48  # Bytes a pixel at quality 95: docs/benchmarks.md, input pipeline.


class Model(NamedTuple):
    """A config, read; no weights and no data are needed for it."""

    task: Task
    run: Run
    optimizer: Optimizer
    mesh: MeshShape
    example: Mapping[str, np.ndarray]
    """A batch of one."""
    stored: float
    """Bytes of a picture of the data set: a JPEG, or moments."""
    itemsize: int
    """Bytes of a number in the network's arithmetic."""
    state: TrainState
    """Shapes."""
    notes: tuple[str, ...]
    """Notes on costs that the figures leave out."""


def read(config: Mapping[str, Any]) -> Model:
    """The model of a config of any system with an example; ValueError that says what to change."""
    name = systems.complete(config)["system"]
    if "." in name:
        raise ValueError(
            f"the config is of the system {name}, which is not planned: plan one that "
            "imagen_jax.train or sd_jax.train takes"
        )
    s = systems.read(config, name)
    encoder, notes = encoders.open_encoder(s.text, s.data.embedded)
    task, example = importlib.import_module(f"{name}.task").example(s, encoder)
    if s.lora.rank:
        base = jax.eval_shape(task.init, memory.abstract_key())
        task = lora.adapt(task, {"params": base["params"]}, s.lora)
    tx = make_optimizer(s.optimizer, s.run.steps)
    create = lambda key: init_state(
        task.init(key), tx, s.optimizer.ema_decays, s.optimizer.ema_widths
    )
    return Model(
        task=task,
        run=s.run,
        optimizer=s.optimizer,
        mesh=s.mesh,
        example={**example, **encoder.tokenize(["a cat"])},
        stored=_stored(example, s.data.resize),
        itemsize=jnp.dtype(s.unet.dtype).itemsize,
        state=jax.eval_shape(create, memory.abstract_key()),
        notes=notes,
    )


def _stored(example: Mapping[str, np.ndarray], resize: int) -> float:
    """Bytes of a row of the data set: a JPEG, of the size before a random cut, or moments."""
    if "moments" in example:
        return example["moments"].nbytes
    return (resize or example["image"].shape[1]) ** 2 * _JPEG


def parameters(model: Model) -> int:
    """The numbers that are trained."""
    return sum(leaf.size for leaf in jax.tree.leaves(model.state.params))
