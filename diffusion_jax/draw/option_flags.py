"""Define and read command-line flags for drawing options.

A flag takes a single value, one value per stage of a cascade, or the values of a sweep axis.
"""

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from absl import flags

from diffusion_jax.config import ranges
from diffusion_jax.draw import options
from diffusion_jax.draw.options import Option, Options

Holders = Mapping[str, flags.FlagHolder]
_DEFINE: Mapping[type, Callable[..., flags.FlagHolder]] = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
}
flags.disclaim_key_flags()  # --help lists these flags with those of the module that defines them.


def define(table: Options) -> Holders:
    """Define one flag for each option. Each flag takes a single value, for all stages."""
    kinds = {
        name: flags.DEFINE_multi_string if option.joins else _DEFINE[ranges.kind_of(option.hint)]
        for name, option in table.items()
    }
    return {name: kind(name, _default(table[name]), table[name].help) for name, kind in kinds.items()}


def define_by_stage(table: Options) -> Holders:
    """Define one flag for each option. Each flag takes one value, or one per stage of a cascade.

    Commas separate values. For free text, which may contain commas, the flag is repeated instead.
    """
    holders = {}
    for name, option in table.items():
        define_flag = flags.DEFINE_multi_string if option.is_text else flags.DEFINE_list
        more = "Repeat it for each stage." if option.is_text else "One value, or one per stage."
        holders[name] = define_flag(name, _defaults(option), f"{option.help} {more}")
    return holders


def define_axes(table: Options, without: Collection[str] = ()) -> Holders:
    """Define one flag for each option. A flag with several values becomes an axis of a sweep.

    Options whose names are in `without` get no flag.
    """
    return {
        name: flags.DEFINE_multi_string(
            name,
            _defaults(option),
            option.help if option.at_load else f"{option.help} Several values form a sweep axis.",
        )
        for name, option in table.items()
        if name not in without
    }


def values(table: Options, holders: Holders) -> dict[str, Any]:
    """Return the values of the flags that `define` defined, keyed by option name.

    Raises ValueError if an option does not allow a value.
    """
    of = {name: holder.value for name, holder in holders.items()}
    joined = {name: ",".join(v) if isinstance(v, list) else v for name, v in of.items()}
    options.read(table, joined, "--")
    return joined


def by_stage(table: Options, holders: Holders, num_stages: int) -> list[dict[str, Any]]:
    """Return the values of the flags that `define_by_stage` defined, as one dict per stage.

    The dicts are keyed by option name.

    Raises:
        ValueError: A flag has neither one value nor `num_stages` values, or a wrong value.
    """
    texts = {name: _one_or_more(table[name], holder.value) for name, holder in holders.items()}
    return _checked(table, options.by_stage(texts, num_stages))


def points(table: Options, holders: Holders, num_stages: int) -> list[list[dict[str, Any]]]:
    """Return the points of the sweep that the flags of `define_axes` describe.

    A point is a list with one dict per stage, which maps option names to values. The points are all
    combinations of the values of the axes. With one stage, commas separate the values of an axis.
    With several stages, commas separate the values of the stages, and each repetition of a flag
    adds a value to the axis.

    Raises:
        ValueError: An option that cannot vary has several values, or a flag has a wrong value, or
            neither one value nor one per stage.
    """
    axes = {name: _axis(name, table[name], h.value, num_stages) for name, h in holders.items()}
    return [
        _checked(table, options.by_stage(dict(zip(axes, point, strict=True)), num_stages))
        for point in itertools.product(*axes.values())
    ]


def each(name: str, texts: Sequence[str], hint: Any, num_stages: int) -> list[Any]:
    """Return one value per stage, parsed from the texts that were given for the flag `name`.

    There is one text for all stages, or one text per stage. Without texts, every value is None.
    Raises ValueError if the annotation `hint` does not allow a value, or if there is another number
    of texts.
    """
    typed = [ranges.read_value(f"--{name}", text, hint) for text in texts]
    value = typed if len(typed) > 1 else next(iter(typed), None)
    return [stage[f"--{name}"] for stage in options.by_stage({f"--{name}": value}, num_stages)]


def _axis(name: str, option: Option, texts: Sequence[str], num_stages: int) -> list[Any]:
    if option.joins:
        return [",".join(texts) or None]
    if num_stages == 1 and not option.at_load and not option.is_text:
        return _split(texts) or [None]
    if option.at_load and len(texts) > 1:
        raise ValueError(f"--{name} is given {len(texts)} times, but it cannot vary in a sweep: give it once")
    return [_one_or_more(option, [text]) for text in texts] or [None]


def _checked(table: Options, of_stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for of_stage in of_stages:
        options.read(table, of_stage, "--")
    return of_stages


def _one_or_more(option: Option, texts: Sequence[str]) -> Any:
    """Return the values in `texts` as a list.

    If there is only one value, return the value itself. If there is none, return None.
    """
    parts = list(texts) if option.is_text else _split(texts)
    return parts if len(parts) > 1 else next(iter(parts), None)


def _split(texts: Sequence[str]) -> list[str]:
    """Split texts at commas, except at commas inside brackets, as in apg(eta=0, norm=5)."""
    parts = re.split(r",(?![^(]*\))", ",".join(texts))
    return [part.strip() for part in parts if part.strip()]


def _default(option: Option) -> Any:
    """Return the default of an option's flag.

    It is None for an option that overrides a config field, so that the config's value applies.
    """
    return None if option.field else option.default


def _defaults(option: Option) -> list[str]:
    return [] if _default(option) is None else [str(option.default)]
