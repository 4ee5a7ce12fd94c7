"""Reading config groups: omitted fields get their defaults, and every mistake is named."""

import math
import pickle
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from diffusion_jax.config import field_docs, groups, named, ranges, settings
from imagen_jax import settings as imagen_settings
from launch import gke, job, slurm
from sd_jax import settings as sd_settings


class Group(NamedTuple):
    """Two fields to read."""

    width: int
    sizes: tuple[int, ...]


def test_read_returns_the_groups_named_tuple_and_converts_lists_to_tuples():
    assert settings.read(Group, {"width": 8, "sizes": [1, 2]}, "unet") == Group(8, (1, 2))


def test_split_separates_top_level_values_from_groups():
    own = {"width": 8, "sizes": (1,), "unet": {"stray": 1}}
    assert settings.split(own) == ({"width": 8, "sizes": (1,)}, {"unet": {"stray": 1}})


@pytest.mark.parametrize(
    ("values", "name", "message"),
    [
        ({"widht": 1, "sizes": ()}, "unet", "unknown config field unet.widht: did you mean unet.width? Choose"),
        ({"width": 1, "size": ()}, "", "unknown config field size: did you mean sizes? Choose from width, sizes"),
        ({"width": 1, "sizes": (), "qqq": 0}, "unet", "unknown config field unet.qqq: choose from width, sizes"),
        ({}, "unet", "the config lacks unet.sizes, unet.width: set every field that has no default"),
        ({"width": 1}, "", "the config lacks sizes: set every field that has no default"),
        ({"precond": "v"}, "diffusion", "unknown config field diffusion.precond: its name is now diffusion.predicts"),
    ],
)
def test_unknown_and_missing_fields_are_errors_that_name_them(values, name, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        settings.read(Group, values, name)


def test_a_field_that_a_config_omits_gets_its_default():
    class Sampler(NamedTuple):
        name: str
        eta: float = 0.5
        sizes: tuple[int, ...] = (1, 2)

    assert settings.read(Sampler, {"name": "ddim"}, "sampler") == Sampler("ddim")
    completed = settings.complete(ranges.defaults(Sampler), {"eta": 1, "name": "ddim"}, "sampler")
    assert completed == {"name": "ddim", "eta": 1.0, "sizes": (1, 2)}
    assert list(completed) == ["name", "eta", "sizes"]
    # It is a float, so that --config.sampler.eta=0.5 may change it.
    assert type(completed["eta"]) is float


def test_a_field_of_a_network_defaults_to_the_value_in_its_module():
    class Network(nn.Module):
        width: int
        depth: int = 2
        dtype: DTypeLike = jnp.bfloat16

    completed = settings.complete(ranges.defaults(Network), {"width": 8}, "unet")
    assert completed == {"width": 8, "depth": 2, "dtype": "bfloat16"}
    read = settings.read(Network, {"width": 8, "dtype": "float32"}, "unet")
    assert (read.width, read.depth, read.dtype) == (8, 2, jnp.float32)
    with pytest.raises(ValueError, match=r"^the config lacks unet\.width: set every"):
        settings.read(Network, {"depth": 3}, "unet")


def test_the_names_to_choose_from_may_be_an_iterator():
    with pytest.raises(ValueError, match=r"sampler\.name is 'zzz': choose from heun, ddim"):
        named.one_of("sampler.name", "zzz", iter(["heun", "ddim"]))


class Ranges(NamedTuple):
    """A field of each kind."""

    lr: ranges.Positive
    seed: Annotated[int, ranges.Interval("[0, 4294967295]")] = 0
    decay: ranges.Decay = 0.9
    mean: Annotated[float, ranges.Interval("(-inf, inf)")] = 0.0
    clip: Annotated[float, ranges.Interval("(0, inf]")] = 1.0
    aspect: Annotated[float, ranges.Interval("[1, inf)"), (0,)] = 0.0
    sizes: ranges.Counts = (1, 2)
    blocks: Annotated[int | Sequence[int], ranges.Interval("(0, inf)")] = 1
    decays: Annotated[tuple[float, ...], ranges.Interval("[0, 1)"), [()]] = (0.9,)
    crop: Annotated[str, settings.CROPS] = "center"
    grid: Annotated[str, {"even": 1}] = ""
    prompts: tuple[str, ...] = ()
    flip: bool = False
    path: str = ""


@pytest.mark.parametrize(
    "values",
    [
        {"lr": 1, "clip": math.inf, "aspect": 0, "blocks": [2, 1], "grid": "even"},
        {"decays": [], "prompts": ["a"], "grid": "", "seed": 2**32 - 1, "mean": -3},
    ],
)
def test_values_within_their_ranges_are_accepted(values):
    read = settings.read(Ranges, {"lr": 1.0, **values}, "optimizer")
    assert read == Ranges(**{"lr": 1.0, **{k: settings.plain(v) for k, v in values.items()}})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lr", 0.0, "is 0.0: it must be above 0"),
        ("lr", math.nan, "is nan: it must be above 0"),
        ("lr", math.inf, "is inf: it must be above 0 and finite"),
        ("lr", True, "is True: it must be a number"),
        ("seed", 2**32, "is 4294967296: it must be from 0 to 4294967295"),
        ("seed", 1.5, "is 1.5: it must be a whole number"),
        ("decay", 1.0, "is 1.0: it must be from 0 to below 1"),
        ("mean", math.nan, "is nan: it must be finite"),
        ("clip", -1, "is -1.0: it must be above 0"),
        ("aspect", 0.5, "is 0.5: it must be 1 or more, or 0"),
        ("sizes", (), "is empty: give one number or more"),
        ("sizes", (1, 0), "is (1, 0): it must be above 0"),
        ("sizes", 3, "is 3: it must be a tuple, with each entry a whole number"),
        ("blocks", "two", "is 'two': it must be a whole number or a tuple, with each entry a whole number"),
        ("decays", (0.9, 9999), "is (0.9, 9999): it must be from 0 to below 1"),
        ("crop", "centre", "is 'centre': did you mean 'center'? Choose from center, random"),
        ("grid", "evn", "is 'evn': did you mean 'even'? Choose from even"),
        ("prompts", (3,), "is (3,): it must be a tuple, with each entry a string"),
        ("flip", "no", "is 'no': it must be True or False"),
        ("path", 7, "is 7: it must be a string"),
    ],
)
def test_a_value_outside_its_range_is_an_error_that_names_the_field(field, value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(f'optimizer.{field} {message}')}$"):
        settings.read(Ranges, {"lr": 1.0, field: value}, "optimizer")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("heun(churn=-1)", "sampler.name: churn is -1: it must be from 0 to 1000"),
        ("heun(churn='much')", "sampler.name: churn is 'much': it must be a whole number or a"),
        ("heun(chrun=1)", "sampler.name gives heun the parameter chrun, but heun takes only churn"),
        ("huen", "sampler.name is 'huen': did you mean 'heun'?"),
        ("heun(", "sampler.name is 'heun(': write a name"),
    ],
)
def test_parameters_of_a_named_sampler_are_checked_against_their_ranges(name, message):
    for kind in (imagen_settings.Sampler, sd_settings.Sampler):
        assert settings.read(kind, {"name": "heun(churn=40)"}, "sampler").steps
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            settings.read(kind, {"name": name}, "sampler")


def test_a_negative_micro_batch_is_an_error():
    with pytest.raises(ValueError, match=r"^optimizer\.micro_batch is -8: it must be from 0 to"):
        settings.read(settings.Optimizer, {"lr": 1e-4, "micro_batch": -8}, "optimizer")


def test_dtype_accepts_only_the_floating_point_types_used_in_training():
    class Network(nn.Module):
        dtype: Annotated[DTypeLike, ranges.DTYPES] = jnp.float32

    for dtype in ranges.DTYPES:
        assert settings.read(Network, {"dtype": dtype}, "unet").dtype == jnp.dtype(dtype)
    for dtype, message in (("int8", "choose from float32, "), ("bf16", "did you mean 'bfloat16'")):
        with pytest.raises(ValueError, match=rf"unet\.dtype is '{dtype}': {message}"):
            settings.read(Network, {"dtype": dtype}, "unet")


def kinds():
    """Return the named tuple or Module of every config group, including the launchers' jobs."""
    group_types = [settings.Run, job.Job, gke.Gke, slurm.Slurm]
    for module in (imagen_settings, sd_settings):
        for system in module.SYSTEMS.values():
            for kind in system.groups.values():
                group_types += map(named.resolved, kind.values()) if isinstance(kind, Mapping) else [kind]
    return dict.fromkeys(kind for kind in group_types if not isinstance(kind, types.UnionType))


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_numeric_config_field_declares_a_range(kind):
    """If this fails, add a range where the field is declared."""
    for field, hint in typing.get_type_hints(kind, include_extras=True).items():
        if field not in ranges.defaults(kind):
            continue
        elsewhere = field in ("mixture", "aspect_buckets")  # Checked by functions.
        numeric = re.search(r"\b(int|float)\b", str(hint)) and not elsewhere
        field_ranges = getattr(hint, "__metadata__", ())
        assert field_ranges or not numeric, f"{kind.__name__}.{field} has no range"


@pytest.mark.parametrize("module", [imagen_settings, sd_settings])
def test_a_group_binds_its_sampler_once_and_a_changed_copy_binds_it_again(module):
    sampler = module.Sampler(name="ddim", eta=0.25)
    assert sampler.method is sampler.method
    assert sampler.method.sampler.keywords == {"eta": 0.25}
    assert sampler._replace(eta=0.5).method.sampler.keywords == {"eta": 0.5}


def test_a_group_extends_another_by_defaults_and_fields_and_inherits_their_meanings():
    @groups.group
    class Base(groups.Group):
        name: str = "a"
        """The name."""
        size: ranges.Count = 1
        """The size."""

    @groups.group
    class Extended(Base):
        name: str = "b"
        depth: ranges.Count = 3
        """The depth."""

    assert Extended(size=2) == ("b", 2, 3) and Base() == ("a", 1)
    assert ranges.defaults(Extended) == {"name": "b", "size": 1, "depth": 3}
    assert Extended()._replace(depth=4)._asdict() == {"name": "b", "size": 1, "depth": 4}
    meanings = {field.name: field.meaning for field in field_docs.fields(Extended)}
    assert meanings == {"name": "The name.", "size": "The size.", "depth": "The depth."}
    with pytest.raises(ValueError, match=r"x\.size is 0: it must be above 0"):
        settings.read(Extended, {"size": 0}, "x")


@pytest.mark.parametrize("module", [imagen_settings, sd_settings])
def test_settings_survive_a_pickle(module):
    sampler = module.Sampler(name="ddim", eta=0.25)
    copy = pickle.loads(pickle.dumps(sampler))
    assert type(copy) is module.Sampler and copy == sampler


def test_an_objective_that_is_first_built_inside_a_traced_function_works_outside():
    diffusion = imagen_settings.Diffusion("v", noise="zero_terminal_snr")
    inside = jax.jit(lambda: diffusion.objective.noise.level(jnp.ones(1)))()
    np.testing.assert_allclose(diffusion.objective.noise.level(jnp.ones(1)), inside, rtol=1e-6)
