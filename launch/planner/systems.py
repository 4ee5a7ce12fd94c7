"""The train step of any config as shapes: what the planner needs to know of a system."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax import systems
from diffusion_jax.settings import MeshShape, Optimizer, Run
from diffusion_jax.task import Task
from diffusion_jax.text import TextEncoder
from diffusion_jax.train.optimizer import make_optimizer
from diffusion_jax.train.state import TrainState, init_state
from imagen_jax import settings as imagen_settings
from imagen_jax import task as imagen_task
from launch.planner import encoders
from sd_jax import settings as sd_settings
from sd_jax import task as sd_task
from sd_jax import vae as vae_module

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
    """The model of a config of either system; ValueError that says what to change."""
    models = {"imagen_jax": _imagen, "sd_jax": _stable_diffusion}
    name = systems.complete(config)["system"]
    if name not in models:
        raise ValueError(
            f"the config is of the system {name}, which is not planned: plan one that "
            "imagen_jax.train or sd_jax.train takes"
        )
    return models[name](config)


def _imagen(config: Mapping[str, Any]) -> Model:
    settings = imagen_settings.read_settings(config)
    encoder, notes = encoders.open_encoder(settings.text)
    side = settings.unet.image_size
    example = {"image": np.zeros((1, side, side, 3), np.uint8), **_texts(encoder)}
    task = imagen_task.make_task(settings, encoder)
    return _model(task, settings, example, settings.output_size**2 * _JPEG, notes)


def _stable_diffusion(config: Mapping[str, Any]) -> Model:
    settings = sd_settings.read_settings(config)
    encoder, notes = encoders.open_encoder(settings.text)
    side, vae = settings.latents.image_size, settings.vae
    small = side // vae_module.factor(vae)
    if sd_settings.uses_moments(settings.data):
        shape = (1, small, small, 2 * vae.latent_channels)
        example = {"moments": np.zeros(shape, np.float32)}
        weights, stored = None, float(example["moments"].nbytes)
    else:
        example = {"image": np.zeros((1, side, side, vae.image_channels), np.uint8)}
        images = jnp.zeros((1, side, side, vae.image_channels))
        latents = jnp.zeros((1, small, small, vae.latent_channels))
        weights, stored = jax.eval_shape(vae.init, abstract_key(), images, latents), side**2 * _JPEG
    task = sd_task.make_task(settings, encoder, weights)
    return _model(task, settings, {**example, **_texts(encoder)}, stored, notes)


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


def _model(task: Task, settings: Any, example, stored: float, notes: tuple[str, ...]) -> Model:
    run, optimizer = settings.run, settings.optimizer
    tx = make_optimizer(optimizer, run.steps)
    create = lambda key: init_state(task.init(key), tx, optimizer.ema_decays)
    state = jax.eval_shape(create, abstract_key())
    itemsize = jnp.dtype(settings.unet.dtype).itemsize
    return Model(task, run, optimizer, settings.mesh, example, stored, itemsize, state, notes)


def _texts(encoder: TextEncoder) -> dict[str, np.ndarray]:
    if encoder.name == "precomputed":
        return encoder.tokenize([np.zeros((1, encoder.width), np.float32)])
    return encoder.tokenize(["a cat"])
