"""Groups of configs: omitted fields have their defaults, every mistake is named."""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import pytest
from jax.typing import DTypeLike

from diffusion_jax import settings


class Group(NamedTuple):
    """Two fields to read."""

    width: int
    sizes: tuple[int, ...]


def test_a_group_is_read_into_its_tuple_and_lists_become_tuples():
    assert settings.read(Group, {"width": 8, "sizes": [1, 2]}, "unet") == Group(8, (1, 2))


def test_the_configs_own_values_are_read_without_its_groups():
    own = {"width": 8, "sizes": (1,), "unet": {"stray": 1}}
    assert settings.split(own) == ({"width": 8, "sizes": (1,)}, {"unet": {"stray": 1}})


@pytest.mark.parametrize(
    ("values", "name", "message"),
    [
        (
            {"widht": 1, "sizes": ()},
            "unet",
            "unknown config field unet.widht: did you mean unet.width?",
        ),
        ({"width": 1, "size": ()}, "", "unknown config field size: did you mean sizes?"),
        (
            {"width": 1, "sizes": (), "qqq": 0},
            "unet",
            "unknown config field unet.qqq: known are width, sizes",
        ),
        ({}, "unet", "the config lacks unet.sizes, unet.width"),
        ({"width": 1}, "", "the config lacks sizes"),
    ],
)
def test_stray_and_missing_fields_are_named(values, name, message):
    with pytest.raises(ValueError) as error:
        settings.read(Group, values, name)
    assert str(error.value) == message


def test_a_field_that_a_config_omits_has_its_default():
    class Sampler(NamedTuple):
        name: str
        eta: float = 0.5
        sizes: tuple[int, ...] = (1, 2)

    assert settings.read(Sampler, {"name": "ddim"}, "sampler") == Sampler("ddim")
    completed = settings.complete(settings.defaults(Sampler), {"eta": 1, "name": "ddim"}, "sampler")
    assert completed == {"name": "ddim", "eta": 1.0, "sizes": (1, 2)}
    assert list(completed) == ["name", "eta", "sizes"]
    assert type(completed["eta"]) is float  # So that --config.sampler.eta=0.5 may change it.


def test_a_network_has_the_defaults_of_its_module():
    class Network(nn.Module):
        width: int
        depth: int = 2
        dtype: DTypeLike = jnp.bfloat16

    assert settings.complete(settings.defaults(Network), {"width": 8}, "unet") == {
        "width": 8, "depth": 2, "dtype": "bfloat16",
    }  # fmt: skip
    read = settings.read(Network, {"width": 8, "dtype": "float32"}, "unet")
    assert (read.width, read.depth, read.dtype) == (8, 2, jnp.float32)
    with pytest.raises(ValueError, match=r"^the config lacks unet\.width$"):
        settings.read(Network, {"depth": 3}, "unet")


def test_a_name_out_of_a_list_is_checked():
    settings.one_of("sampler.name", "heun", ["heun", "ddim"])
    with pytest.raises(ValueError, match=r"sampler\.name is 'huen': did you mean 'heun'\?"):
        settings.one_of("sampler.name", "huen", ["heun", "ddim"])
    with pytest.raises(ValueError, match=r"sampler\.name is 'zzz': choose from heun, ddim"):
        settings.one_of("sampler.name", "zzz", iter(["heun", "ddim"]))


def test_the_first_field_that_is_not_positive_is_named():
    settings.positive(steps=1, optimizer__lr=1e-9)
    with pytest.raises(ValueError, match=r"^optimizer\.lr is 0\.0: it must be above 0$"):
        settings.positive(steps=1, optimizer__lr=0.0, text__width=-1)
    with pytest.raises(ValueError, match=r"^optimizer\.lr is nan: it must be above 0$"):
        settings.positive(optimizer__lr=float("nan"))


def test_the_first_field_out_of_its_range_is_named():
    settings.within(0, 1, text__drop_prob=0.0, optimizer__b1=1.0)
    with pytest.raises(ValueError, match=r"^optimizer\.b1 is 1\.5: it must be from 0 to 1$"):
        settings.within(0, 1, text__drop_prob=0.1, optimizer__b1=1.5)
    with pytest.raises(ValueError, match=r"^text\.drop_prob is nan: it must be from 0 to 1$"):
        settings.within(0, 1, text__drop_prob=float("nan"))
