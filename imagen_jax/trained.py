"""A trained model, read from the workdir of its run."""

import os
import pathlib
from typing import Any, NamedTuple

import jax

from diffusion_jax import checkpoint, drawing, loop, settings, sharding
from diffusion_jax.text import TextEncoder, registry
from imagen_jax import task
from imagen_jax.task import Settings

# Text encoders and their weights on the devices, by the settings that they were read with.
Encoders = dict[task.Text, tuple[TextEncoder, Any]]


class Choice(NamedTuple):
    """Which weights draw, and how; None stands for what the run's config says."""

    ema: str = "ema"
    """A decay such as "0.9999", "ema" for the largest, or "raw"."""
    checkpoint: int | None = None
    """A step that was saved; None for the last."""
    guidance: float | None = None
    sampler: str | None = None
    steps: int | None = None
    threshold: str | None = None
    aug_sigma: float | None = None
    text_weights: str | None = None
    """Where the text encoder's weights are: a folder or a Hugging Face name."""


class Model(NamedTuple):
    """A trained model, ready to draw as its settings say."""

    workdir: str
    settings: Settings
    encoder: TextEncoder
    draw: drawing.Draw
    params: Any
    ema: str
    step: int


def load_model(
    workdir: str | os.PathLike[str],
    choice: Choice | None = None,
    encoders: Encoders | None = None,
) -> Model:
    """The model of a training run; ValueError or FileNotFoundError if there is no such one.

    Models that are loaded with the same `encoders` (a dict, empty at first) share the weights of
    their text encoders.
    """
    choice = choice or Choice()
    s = read_run(workdir, choice)
    mesh = sharding.make_mesh()  # Of the devices here, which need not be those of the training.
    encoder, frozen = _encoder(s.text, mesh, {} if encoders is None else encoders)
    imagen = task.make_task(s, encoder)
    abstract = jax.eval_shape(imagen.init, jax.random.key(0))
    places = sharding.shardings(abstract, mesh, imagen.rules)
    placed = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        abstract,
        places,
    )
    draw = drawing.make_draw(imagen, frozen, mesh)
    model = Model(str(workdir), s, encoder, draw, placed, choice.ema, 0)
    return with_weights(model, choice.ema, choice.checkpoint)


def with_weights(model: Model, ema: str, step: int | None) -> Model:
    """The same model, already compiled, with the weights of another average or checkpoint."""
    folder = pathlib.Path(model.workdir) / loop.CHECKPOINTS
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        model.params,
    )
    params = checkpoint.load_params(folder, shapes, ema, step)
    return model._replace(
        params=params, ema=ema, step=max(checkpoint.steps(folder)) if step is None else step
    )


def read_run(workdir: str | os.PathLike[str], choice: Choice) -> Settings:
    """The settings of a run, with what was chosen in place of the config's.

    ValueError or FileNotFoundError if there is no such run or no such choice.
    """
    s = task.read_settings(settings.load(workdir).to_dict())
    asked = {
        "guidance": choice.guidance,
        "name": choice.sampler,
        "steps": choice.steps,
        "threshold": choice.threshold,
    }
    sampler = s.sampler._replace(**{k: v for k, v in asked.items() if v is not None})
    sr = s.super_resolution
    if choice.aug_sigma is not None:
        sr = sr._replace(aug_sigma=choice.aug_sigma)
    text = s.text if choice.text_weights is None else s.text._replace(weights=choice.text_weights)
    s = s._replace(sampler=sampler, super_resolution=sr, text=text)
    task.check(s)
    return s


def _encoder(text: task.Text, mesh: sharding.Mesh, encoders: Encoders) -> tuple[TextEncoder, Any]:
    key = text._replace(drop_prob=0.0)  # All else says what is read.
    if key not in encoders:
        encoder = registry.open_online(text)
        encoders[key] = encoder, sharding.place_all(encoder.frozen, mesh, task.RULES)
    return encoders[key]
