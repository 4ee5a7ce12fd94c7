"""Define flags for drawing options: with one value, one value per stage, or as sweep axes."""

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
    str: flags.DEFINE_string, int: flags.DEFINE_integer, float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
}  # fmt: skip
flags.disclaim_key_flags()  # --help lists them with the command that defines them.


def define(table: Options) -> Holders:
    """Define one flag, with one value, for each option."""
    return {
        name: _DEFINE[ranges.kind_of(option.hint)](name, _default(option), option.help)
        for name, option in table.items()
    }


def define_by_stage(table: Options) -> Holders:
    """Define one flag for each option, with one value for all stages of a cascade or one per stage.

    Commas separate values. For free text, which may contain commas, the flag is repeated instead.
    """
    holders = {}
    for name, option in table.items():
        define_flag = flags.DEFINE_multi_string if option.is_text else flags.DEFINE_list
        more = "Repeat it for each stage." if option.is_text else "One value, or one per stage."
        holders[name] = define_flag(name, _defaults(option), f"{option.help} {more}")
    return holders


def define_axes(table: Options, without: Collection[str] = ()) -> Holders:
    """Define one flag for each option. A flag with several values becomes an axis of a sweep."""
    return {
        name: flags.DEFINE_multi_string(
            name,
            _defaults(option),
            option.help if option.at_load else f"{option.help} Several values form an axis.",
        )
        for name, option in table.items()
        if name not in without
    }


def values(holders: Holders) -> dict[str, Any]:
    """Return the values of the flags that `define` defined, by name."""
    return {name: holder.value for name, holder in holders.items()}


def by_stage(table: Options, holders: Holders, num_stages: int) -> list[dict[str, Any]]:
    """Return the values of each stage from the flags that `define_by_stage` defined.

    Raises:
        ValueError: A flag has neither one value nor `num_stages` values.
    """
    texts = {name: _one_or_more(table[name], holder.value) for name, holder in holders.items()}
    return options.by_stage(texts, num_stages)


def points(table: Options, holders: Holders, num_stages: int) -> list[list[dict[str, Any]]]:
    """Return the points of a sweep. Each point holds the values of every stage.

    Points are all combinations of the values of the axes. With one stage, commas separate the
    values of an axis. With several stages, commas separate stages, and each repetition of a flag
    adds a value to its axis.

    Raises:
        ValueError: An option that cannot vary has several values, or a value is given neither once
            nor for every stage.
    """
    axes = {name: _axis(name, table[name], h.value, num_stages) for name, h in holders.items()}
    return [
        options.by_stage(dict(zip(axes, point, strict=True)), num_stages)
        for point in itertools.product(*axes.values())
    ]


def each(name: str, texts: Sequence[str], hint: Any, num_stages: int) -> list[Any]:
    """Return one value per stage, parsed from the texts of a flag.

    There is one text for all stages, or one text per stage. Without texts, every value is None.
    Raises ValueError for a value that the type `hint` does not allow.
    """
    typed = [ranges.read_value(f"--{name}", text, hint) for text in texts]
    value = typed if len(typed) > 1 else next(iter(typed), None)
    return [stage[f"--{name}"] for stage in options.by_stage({f"--{name}": value}, num_stages)]


def _axis(name: str, option: Option, texts: Sequence[str], num_stages: int) -> list[Any]:
    if num_stages == 1 and not option.at_load and not option.is_text:
        return _split(texts) or [None]
    if option.at_load and len(texts) > 1:
        raise ValueError(f"--{name} is given {len(texts)} times, but it cannot vary: give it once")
    return [_one_or_more(option, [text]) for text in texts] or [None]


def _one_or_more(option: Option, texts: Sequence[str]) -> Any:
    """Return None if there is no value, the value if there is one, or else a list of the values."""
    parts = list(texts) if option.is_text else _split(texts)
    return parts if len(parts) > 1 else next(iter(parts), None)


def _split(texts: Sequence[str]) -> list[str]:
    """Split at commas, but not inside brackets, as in apg(eta=0, norm=5)."""
    parts = re.split(r",(?![^(]*\))", ",".join(texts))
    return [part.strip() for part in parts if part.strip()]


def _default(option: Option) -> Any:
    """Return the flag's default: None for a config field, so that the config's value applies."""
    return None if option.field else option.default


def _defaults(option: Option) -> list[str]:
    return [] if _default(option) is None else [str(option.default)]
