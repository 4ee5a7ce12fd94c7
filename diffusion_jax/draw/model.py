"""A trained model of any system, read from the workdir of its run."""

import pathlib
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from diffusion_jax import runs
from diffusion_jax.draw import program as drawing
from diffusion_jax.machine import sharding
from diffusion_jax.settings import Text
from diffusion_jax.task import Task
from diffusion_jax.text import TextEncoder, registry
from diffusion_jax.train import checkpoint

# Text encoders and their weights on the devices, by the settings that they were read with.
Encoders = dict[Text, tuple[TextEncoder, Any]]


class Model(NamedTuple):
    """A trained model, ready to draw as its settings say."""

    workdir: str
    settings: Any
    """Those of its system."""
    encoder: TextEncoder
    draw: drawing.Draw
    params: Any
    ema: str
    step: int


def open_model(
    workdir: str, s: Any, encoder: TextEncoder, task: Task, frozen: Any, mesh: Mesh
) -> Model:
    """A model whose `params` are shapes in their places yet: see with_weights."""
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    placed = sharding.placed(shapes, sharding.shardings(shapes, mesh, task.rules))
    draw = drawing.make_draw(task.sample, frozen, mesh)
    return Model(workdir, s, encoder, draw, placed, "", 0)


def with_weights(model: Model, ema: str, step: int | None) -> Model:
    """The same model, already compiled, with the weights of an average and a checkpoint.

    `ema` is a decay such as "0.9999", "ema" for the largest, or "raw"; `step` None is the last.
    """
    folder = pathlib.Path(model.workdir) / runs.CHECKPOINTS
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        model.params,
    )
    params = checkpoint.load_params(folder, shapes, ema, step)
    return model._replace(
        params=params, ema=ema, step=max(checkpoint.steps(folder)) if step is None else step
    )


def open_encoder(
    text: Text, mesh: Mesh, rules: sharding.Rules, encoders: Encoders | None = None
) -> tuple[TextEncoder, Any]:
    """The encoder for new texts and its weights on the devices, kept in `encoders`, a dict."""
    encoders = {} if encoders is None else encoders
    key = text._replace(drop_prob=0.0)  # All else says what is read.
    if key not in encoders:
        encoder = registry.open_online(text)
        encoders[key] = encoder, sharding.place_all(encoder.frozen, mesh, rules)
    return encoders[key]
