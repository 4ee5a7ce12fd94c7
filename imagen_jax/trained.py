"""A trained model, read from the workdir of its run."""

import os
import pathlib
from typing import Any, NamedTuple

import jax

from diffusion_jax import checkpoint, drawing, loop, settings, sharding
from diffusion_jax.text import TextEncoder
from imagen_jax import task
from imagen_jax.task import Settings


class Model(NamedTuple):
    """A trained model, ready to draw."""

    settings: Settings
    encoder: TextEncoder
    draw: drawing.Draw
    params: Any
    step: int


def load_model(
    workdir: str | os.PathLike[str],
    ema: str = "ema",
    step: int | None = None,
    sampling_steps: int | None = None,
) -> Model:
    """The model of a training run; ValueError or FileNotFoundError if there is no such one."""
    s = task.read_settings(settings.load(workdir).to_dict())
    if sampling_steps is not None:
        s = s._replace(sampler=s.sampler._replace(steps=sampling_steps))
    encoder = task.text_encoder(s.text)
    mesh = sharding.make_mesh()  # Of the devices here, which need not be those of the training.
    imagen = task.make_task(s, encoder)
    abstract = jax.eval_shape(imagen.init, jax.random.key(0))
    places = sharding.shardings(abstract, mesh, imagen.rules)
    placed = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        abstract,
        places,
    )
    folder = pathlib.Path(workdir) / loop.CHECKPOINTS
    params = checkpoint.load_params(folder, placed, ema, step)
    step = max(checkpoint.steps(folder)) if step is None else step
    frozen = sharding.place_all(imagen.frozen, mesh, imagen.rules)
    return Model(s, encoder, drawing.make_draw(imagen, frozen, mesh), params, step)
