"""Drawing options: values that users may choose to replace a run's own settings.

A system lists its options in one table. The function `read` converts and checks all values, whether
they come from flags, keywords in notebooks, requests of the web page or points of a sweep.
"""

import os
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from diffusion_jax.config import field_docs, named, ranges
from diffusion_jax.config.settings import Lora


class Option(NamedTuple):
    """A setting that users may choose for drawing."""

    help: str
    hint: Any
    """The type and range, annotated in the same way as a config field."""
    default: Any = None
    """The default value. It is valid even if it is outside the range."""
    field: str = ""
    """The config field that the option overrides, such as "sampler.eta"; "" if there is none."""
    at_load: bool = False
    """Whether the value cannot change after loading, because it determines the files to read."""
    is_text: bool = False
    """Whether the value is free text, which may contain commas."""
    joins: bool = False
    """Whether the values of a repeated flag, or of a list, are joined with commas."""


_Settings = TypeVar("_Settings")
Options = Mapping[str, Option]
Values = Mapping[str, Any]
"""Values keyed by option name, such as {"steps": 20}."""


def of_group(group: str, kind: type) -> dict[str, Option]:
    """Return an option for each field of the config group `group`, keyed by the field's name.

    `kind` is the NamedTuple of the group. The option of the field `name` is keyed by the name of
    the group instead, so that --sampler sets sampler.name.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        group if field.name == "name" else field.name: Option(
            f"{field.meaning} It is {field.values}. Default: {group}.{field.name} of the config.",
            hints[field.name],
            field.default,
            f"{group}.{field.name}",
            is_text=hints[field.name] is str,
        )
        for field in field_docs.fields(kind)
    }


SHARED: Options = {
    "ema": Option(
        "The average of a run's weights to draw with: a decay such as 0.9999, a width such as "
        '0.05, "ema" (the largest decay) or "raw" (no average).',
        str,
        "ema",
    ),
    "checkpoint": Option(
        "The step of the checkpoint to draw with; by default the newest undamaged checkpoint.",
        Annotated[int, ranges.Interval("[0, inf)")],
    ),
    "guide": Option(
        "A run, WORKDIR or WORKDIR@STEP, whose model guides instead of the negative prompt.", str, at_load=True
    ),
    "lora_scale": of_group("lora", Lora)["scale"]._replace(
        help="Strength of a LoRA run: 0 draws like the model that it adapts.", at_load=True
    ),
    "unet_weights": Option(
        "New path of the weights that a LoRA run adapts, if they have moved since training.",
        str,
        field="unet.weights",
        at_load=True,
    ),
    "text_weights": Option(
        "Folder or Hugging Face name of the text encoder's weights.", str, field="text.weights", at_load=True
    ),
}
"""The options that all systems have. A system adds the options of its sampler."""


def read(options: Options, values: Values, prefix: str = "") -> dict[str, Any]:
    """Return the values, converted to the types of their options and checked.

    Text is parsed, and a path becomes text. Options whose value is None are left out. Error
    messages name an option with `prefix`, which is "--" for flags.

    Raises:
        ValueError: A name is unknown, or a value has another type or is out of range.
    """
    typed = {}
    for name, value in values.items():
        if name not in options:
            close = named.closest(name, options)
            listed = named.choices(f"did you mean {close}?" if close else "", options)
            raise ValueError(f"there is no option {name!r}: {listed}")
        if value is not None:
            option = options[name]
            if option.joins and isinstance(value, list | tuple):
                value = ",".join(map(str, value))
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            typed[name] = ranges.typed(value, option.hint)
            if typed[name] != option.default:
                ranges.check_value(prefix + name, typed[name], option.hint)
    return typed


def changeable(options: Options) -> Options:
    """Return the options that override a config field and can change after a model is loaded."""
    return {name: o for name, o in options.items() if o.field and not o.at_load}


def fields(options: Options, values: Values) -> dict[str, Any]:
    """Return the values of those options that override a config field, keyed by this field."""
    return {options[name].field: value for name, value in values.items() if name in options and options[name].field}


def override(settings: _Settings, values: Mapping[str, Any]) -> _Settings:
    """Return `settings`, a NamedTuple of config groups, with some fields replaced.

    `values` holds the new values, keyed by config field, such as "sampler.steps".
    """
    s: Any = settings
    for field, value in values.items():
        group, _, name = field.partition(".")
        s = s._replace(**{group: getattr(s, group)._replace(**{name: value})})
    return s


def by_stage(values: Values, num_stages: int) -> list[dict[str, Any]]:
    """Return one dict of option values for each stage of a cascade.

    A list or tuple in `values` holds one value per stage. Any other value applies to all stages.

    Raises:
        ValueError: The length of a list or tuple is not `num_stages`.
    """
    for name, value in values.items():
        if isinstance(value, list | tuple) and len(value) != num_stages:
            raise ValueError(
                f"{name} has {len(value)} values for {num_stages} stages: give one value for all "
                "stages, or one for each"
            )
    of_stage = lambda value, n: value[n] if isinstance(value, list | tuple) else value
    return [{name: of_stage(v, n) for name, v in values.items()} for n in range(num_stages)]


def varied(points: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, str]]:
    """Return, for each point of a sweep, the values that differ between points, as strings.

    A point holds the values of each stage, keyed by config field. If the stages of a point have
    different values, the string joins these values by commas.
    """
    names = dict.fromkeys(field for point in points for stage in point for field in stage)
    values = lambda point, field: [stage.get(field) for stage in point]
    differing = [f for f in names if any(values(p, f) != values(points[0], f) for p in points)]
    text = lambda row: ",".join(map(str, row if len(set(row)) > 1 else row[:1]))
    return [{field: text(values(point, field)) for field in differing} for point in points]
