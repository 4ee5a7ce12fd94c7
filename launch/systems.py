"""The train step of any config as shapes: what the planner needs to know of a system."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax import loop, train_state
from diffusion_jax.settings import MeshShape, Optimizer, Run
from diffusion_jax.task import Task
from diffusion_jax.text import TextEncoder
from imagen_jax import task as imagen
from launch import encoders


class Model(NamedTuple):
    """A config, read; no weights and no data are needed for it."""

    task: Task
    run: Run
    optimizer: Optimizer
    mesh: MeshShape
    example: Mapping[str, np.ndarray]
    """A batch of one."""
    pixels: int
    """Of a picture as it is stored."""
    itemsize: int
    """Bytes of a number in the network's arithmetic."""
    state: train_state.TrainState
    """Shapes."""
    notes: tuple[str, ...]
    """What the figures leave out."""


def read(config: Mapping[str, Any]) -> Model:
    """The model of a config; ValueError that says what to change."""
    settings = imagen.read_settings(config)
    encoder, notes = encoders.open_encoder(settings.text)
    side = settings.unet.image_size
    example = {"image": np.zeros((1, side, side, 3), np.uint8), **_texts(encoder)}
    task = imagen.make_task(settings, encoder)
    pixels = settings.output_size**2
    return _model(task, settings, example, pixels, notes)


def abstract_key() -> jax.ShapeDtypeStruct:
    """The shape of a random key."""
    return jax.eval_shape(lambda: jax.random.key(0))


def batch_shapes(model: Model, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of this size."""
    return {
        name: jax.ShapeDtypeStruct((size, *array.shape[1:]), array.dtype)
        for name, array in model.example.items()
    }


def frozen_shapes(task: Task) -> Any:
    """The weights that are not trained."""
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), task.frozen)


def _model(task: Task, settings: Any, example, pixels: int, notes: tuple[str, ...]) -> Model:
    run, optimizer = settings.run, settings.optimizer
    tx = loop.make_optimizer(optimizer, run.steps)
    create = lambda key: train_state.init_state(task.init(key), tx, optimizer.ema_decays)
    state = jax.eval_shape(create, abstract_key())
    itemsize = jnp.dtype(settings.unet.dtype).itemsize
    return Model(task, run, optimizer, settings.mesh, example, pixels, itemsize, state, notes)


def _texts(encoder: TextEncoder) -> dict[str, np.ndarray]:
    if encoder.name == "precomputed":
        return encoder.tokenize([np.zeros((1, encoder.width), np.float32)])
    return encoder.tokenize(["a cat"])
