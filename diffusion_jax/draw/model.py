"""Models that draw: the workdir of a training run, opened with the weights and settings chosen."""

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from diffusion_jax import finetune, runs, systems
from diffusion_jax.diffusion.grids import ENDS, GRIDS
from diffusion_jax.diffusion.guidance import GUIDANCE
from diffusion_jax.diffusion.samplers import SAMPLERS
from diffusion_jax.draw.program import Draw, make_draw
from diffusion_jax.machine import sharding
from diffusion_jax.precache import lookup
from diffusion_jax.settings import Text
from diffusion_jax.task import Params, Task
from diffusion_jax.text import TextEncoder
from diffusion_jax.weights import restore

# Text encoders and their weights on the devices, by the settings that they were read with.
Encoders = dict[Text, tuple[TextEncoder, Any]]


def replaces(field: str, text: str) -> Any:
    """A field of a Choice that, where it is not None, stands in place of the config's `field`.

    `text` is the help of its flag (see draw.choice_flags).
    """
    return dataclasses.field(default=None, metadata={"field": field, "help": text})


def chosen(default: Any, text: str) -> Any:
    """A field of a Choice of which a config says nothing; `text` as in `replaces`."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which weights draw, and how; None stands for what the run's config says."""

    ema: str = chosen(
        "ema", 'Of a run a decay such as 0.9999, a width (0.05), "ema" (the largest) or "raw".'
    )
    checkpoint: int | None = chosen(None, "Of a run a step that was saved; else the last.")
    guidance: float | None = replaces("sampler.guidance", "Guidance scale; 1 draws without.")
    sampler: str | None = replaces("sampler.name", f"One of {', '.join(SAMPLERS)}.")
    steps: int | None = replaces("sampler.steps", "Sampling steps.")
    grid: str | None = replaces("sampler.grid", f"Their noise levels: one of {', '.join(GRIDS)}.")
    end: str | None = replaces("sampler.end", f"Where these end: {' or '.join(ENDS)}.")
    guiding: str | None = replaces(
        "sampler.guiding", f"How guidance acts, joined by +: {', '.join(GUIDANCE)}."
    )
    guide: str | None = chosen(
        None, "A run, WORKDIR or WORKDIR@STEP, whose model guides in place of the negative text."
    )
    lora_scale: float | None = replaces(
        "lora.scale", "Of a run of LoRA, times what it learned: 0 draws as what it adapts does."
    )
    unet_weights: str | None = replaces(
        "unet.weights", "Of a run of LoRA, where what it adapts lies now, if not in its config."
    )
    text_weights: str | None = replaces(
        "text.weights", "Folder or Hugging Face name of the text encoder's weights."
    )

    def fields_of(self, group: str) -> dict[str, Any]:
        """The values chosen in place of a config group's, by their names there."""
        values = {}
        for field in dataclasses.fields(self):
            in_group, _, name = field.metadata.get("field", "").partition(".")
            if in_group == group and (value := getattr(self, field.name)) is not None:
                values[name] = value
        return values


class Model(NamedTuple):
    """A model with the weights that it draws with, ready to draw as its settings say."""

    workdir: str
    settings: Any
    """The settings of its system: imagen_jax.settings.Settings or sd_jax.settings.Pipeline."""
    encoder: TextEncoder
    draw: Draw
    params: Any
    ema: str
    step: int
    guide: str = ""
    """The run whose model guides this one, if any."""


def read_run(workdir: str | os.PathLike[str], choice: Choice, system: str) -> Any:
    """The settings of a run of this system, with what was chosen in place of the config's.

    ValueError or FileNotFoundError if there is no such run or no such choice.
    """
    config = runs.load(workdir, system)
    for name, group in config.items():
        if isinstance(group, dict):
            group |= choice.fields_of(name)
    return systems.read(config, system)


def load_model(
    workdir: str | os.PathLike[str],
    choice: Choice,
    s: Any,
    encoder: TextEncoder,
    task: Task,
    mesh: Mesh,
) -> Model:
    """The model of a run, with the weights chosen; `task.frozen` lies on the devices already."""
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    placed = sharding.placed(shapes, sharding.shardings(shapes, mesh, task.rules))
    draw = make_draw(task.sample, task.frozen, mesh)
    model = Model(str(workdir), s, encoder, draw, placed, "", 0, choice.guide or "")
    return with_weights(model, choice.ema, choice.checkpoint)


def load_guide(choice: Choice, system: str, s: Any, init_of: Any, mesh: Mesh, rules: Any) -> Any:
    """(settings, parameters) of choice.guide, the average of its checkpoint; None without one.

    `init_of` makes a Task's `init` of settings. ValueError if it is of other images or texts than
    the model of `s`, FileNotFoundError if there is no such run.
    """
    if not choice.guide:
        return None
    workdir, number = finetune.at_step(choice.guide)
    guide = read_run(workdir, Choice(text_weights=choice.text_weights), system)
    seen = lambda run: (run.text.encoder, run.text.width, run.text.max_tokens, run.output_size)
    if seen(guide) != seen(s):
        raise ValueError(
            f"--guide={choice.guide} has the encoder, its width and tokens, and the size of images "
            f"{seen(guide)}, and the model that it is to guide {seen(s)}: they must be the same"
        )
    if guide.lora.rank:
        raise ValueError(f"--guide={choice.guide} is a LoRA, and a guide is a whole model")
    shapes = jax.eval_shape(init_of(guide), jax.random.key(0))
    placed = sharding.placed(shapes, sharding.shardings(shapes, mesh, rules))
    folder = pathlib.Path(workdir) / runs.CHECKPOINTS
    return guide, restore.load_params(folder, placed, "ema", number)


def with_weights(model: Model, ema: str, step: int | None) -> Model:
    """The same model, already compiled, with the weights of an average and a checkpoint.

    `ema` is a decay such as "0.9999", a width such as "0.05", "ema" for the largest, or "raw";
    `step` None is the newest that is sound.
    """
    folder = restore.absolute(model.workdir) / runs.CHECKPOINTS
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        model.params,
    )
    params, step = restore.load_params_and_step(folder, shapes, ema, step)
    return model._replace(params=params, ema=restore.name_of(folder / str(step), ema), step=step)


def open_encoder(
    text: Text, mesh: Mesh, rules: sharding.Rules, encoders: Encoders | None = None
) -> tuple[TextEncoder, Any]:
    """The encoder for new texts and its weights on the devices, kept in `encoders`, a dict."""
    encoders = {} if encoders is None else encoders
    key = text._replace(drop_prob=0.0, store="")  # All else says what is read.
    encoder = lookup.open_online(text)  # Also compared with a store.
    if key not in encoders:
        encoders[key] = encoder, sharding.place_all(encoder.frozen, mesh, rules)
    return encoders[key]


def fingerprint(models: Sequence[Params]) -> str:
    """A hash of the weights, whatever their folder is called."""
    everywhere = sharding.replicated(sharding.make_mesh())
    sums = [np.asarray(x).item() for params in models for x in _sums(params, everywhere)]
    return hashlib.sha256(str(sums).encode()).hexdigest()[:16]


@functools.partial(jax.jit, static_argnums=1)
def _sums(params: Params, everywhere: Any) -> list[jax.Array]:
    """Sums of each array's bits, modulo 2^32: the same however they are sharded."""
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    bits = [
        jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]) for x in jax.tree.leaves(params)
    ]
    return [jax.lax.with_sharding_constraint(b.sum(dtype=jnp.uint32), everywhere) for b in bits]
