"""Models that draw: the workdir of a training run, opened with the weights and settings chosen."""

import dataclasses
import functools
import hashlib
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from diffusion_jax import finetune, runs, systems
from diffusion_jax.config import ranges, settings
from diffusion_jax.config.settings import Text
from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.draw.program import BeginOf, Draw, Programs, make_programs
from diffusion_jax.machine import files, sharding
from diffusion_jax.precache import lookup
from diffusion_jax.task import Params, Task
from diffusion_jax.text import TextEncoder, registry
from diffusion_jax.weights import restore

# Text encoders and their weights on the devices, by the settings that they were read with.
Encoders = dict[Text, tuple[TextEncoder, Any]]


def replaces(field: str, text: str, kind: Any = None, loads: bool = False) -> Any:
    """A field of a Choice that, where it is not None, stands in place of the config's `field`.

    `text` is the help of its flag (see draw.choice_flags), `kind` its annotation in the config,
    if that has a range; `loads` is of what says which weights are read.
    """
    metadata = {"field": field, "help": text, "kind": kind, "loads": loads}
    return dataclasses.field(default=None, metadata=metadata)


def chosen(default: Any, text: str) -> Any:
    """A field of a Choice of which a config says nothing; `text` as in `replaces`."""
    return dataclasses.field(default=default, metadata={"help": text, "loads": True})


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which weights draw, and how; None stands for what the run's config says.

    A system's own has a field for each of its sampler's settings: see `with_fields_of`.
    """

    ema: str = chosen(
        "ema", 'Of a run a decay such as 0.9999, a width (0.05), "ema" (the largest) or "raw".'
    )
    checkpoint: int | None = chosen(None, "Of a run a step that was saved; else the last.")
    guide: str | None = chosen(
        None, "A run, WORKDIR or WORKDIR@STEP, whose model guides in place of the negative text."
    )
    lora_scale: float | None = replaces(
        "lora.scale",
        "Of a run of LoRA, times what it learned: 0 draws as what it adapts does.",
        loads=True,
    )
    unet_weights: str | None = replaces(
        "unet.weights",
        "Of a run of LoRA, where what it adapts lies now, if not in its config.",
        loads=True,
    )
    text_weights: str | None = replaces(
        "text.weights", "Folder or Hugging Face name of the text encoder's weights.", loads=True
    )

    def fields_of(self, group: str) -> dict[str, Any]:
        """The values chosen in place of a config group's, by their names there."""
        return self.changes(loads=True).get(group, {})

    def changes(self, loads: bool = False) -> dict[str, dict[str, Any]]:
        """The values chosen by group and name; those that say what is loaded only if `loads`."""
        groups: dict[str, dict[str, Any]] = {}
        for field in dataclasses.fields(self):
            group, _, name = field.metadata.get("field", "").partition(".")
            value = getattr(self, field.name)
            if group and value is not None and (loads or not field.metadata["loads"]):
                groups.setdefault(group, {})[name] = value
        return groups


C = TypeVar("C", bound=Choice)


def with_fields_of(group: str, kind: type) -> Callable[[type[C]], type[C]]:
    """Gives a class of choices a field for each of a config group's, with its range as its help.

    It is called as in the config, but for `name`, which is called as the group.
    """

    def add(cls: type[C]) -> type[C]:
        fields = []
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            text = f"In place of the config's {group}.{name}: {ranges.words(hint)}."
            plain = getattr(hint, "__origin__", hint) if hasattr(hint, "__metadata__") else hint
            field = replaces(f"{group}.{name}", text, hint)
            fields.append((group if name == "name" else name, plain | None, field))
        made = dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), frozen=True)
        made.__doc__, made.__module__ = cls.__doc__, cls.__module__
        return made

    return add


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
    programs: Programs | None = None
    """What draws with other settings of the same networks."""
    settle: Callable[[Choice], Any] | None = None
    """The settings of another choice of how to draw."""
    lora: Mapping[str, Any] = {}
    """Of a run of factors their strength and what they adapt, for cards."""


def read_run(workdir: str | os.PathLike[str], choice: Choice, system: str) -> Any:
    """The settings of a run of this system, with what was chosen in place of the config's.

    ValueError or FileNotFoundError if there is no such run or no such choice.
    """
    config = runs.load(workdir, system)
    for name, group in config.items():
        if isinstance(group, dict):
            group |= choice.fields_of(name)
    s = systems.read(config, system)
    finetune.check_wanted(choice.unet_weights, s.lora)
    if choice.text_weights and not registry.ENCODERS[s.text.encoder].pretrained:
        raise ValueError(
            f"--text_weights={choice.text_weights} is for an encoder with weights, and {workdir} "
            f"has {s.text.encoder!r}, which has none: leave it out"
        )
    return s


def load_model(
    workdir: str | os.PathLike[str],
    choice: Choice,
    s: Any,
    encoder: TextEncoder,
    task: Task,
    mesh: Mesh,
    begin_of: BeginOf,
) -> Model:
    """The model of a run, with the weights chosen; `task.frozen` lies on the devices already.

    `begin_of` makes the task's `begin` of settings.
    """
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    placed = sharding.placed(shapes, sharding.shardings(shapes, mesh, task.rules))
    programs = make_programs(begin_of, task.frozen, mesh)
    guide = choice.guide or ""
    settle = functools.partial(_changed, s)
    lora = finetune.describe(workdir, choice.lora_scale)
    model = Model(
        str(workdir), s, encoder, programs.draw(s), placed, "", 0, guide, programs, settle, lora
    )
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
    folder = files.path(workdir) / runs.CHECKPOINTS
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


def with_choice(model: Model, choice: Choice, preview: Preview | None = None) -> Model:
    """The same model and weights, which draws as chosen: nothing is loaded, programs are kept.

    ValueError for what cannot be.
    """
    assert model.programs and model.settle
    s = model.settle(choice)
    return model._replace(settings=s, draw=model.programs.draw(s, preview))


def _changed(s: Any, choice: Choice) -> Any:
    """The settings with what was chosen in place of their own."""
    for group, values in choice.changes().items():
        before = getattr(s, group)
        values = settings.complete(before._asdict(), values, group)
        ranges.check(type(before), values, group)
        s = s._replace(**{group: before._replace(**values)})
    return s


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
