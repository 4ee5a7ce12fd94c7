"""Every shipped config of Imagen is valid and has the stated number of parameters."""

import functools
import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base64_2b
from diffusion_jax.devices import sharding
from diffusion_jax.precache import lookup
from diffusion_jax.train import optimizer
from diffusion_jax.train.state import init_state
from imagen_jax import task
from imagen_jax.conditioning import example_inputs
from imagen_jax.settings import read_settings
from imagen_jax.weights import nemo
from tests.imagen_jax.weights import test_nemo

ROOT = pathlib.Path(__file__).parents[2]
EXACT = {
    "base64_500m": 524_897_540,
    "base64_2b": 2_171_162_116,
    "sr256_400m": 408_350_468,
    "sr256_400m_t5xxl": 429_350_660,
    "sr256_450m": 568_675_844,
    "sr256_600m": 646_023_428,
    "sr256_600m_stacked": 700_610_308,
    "sr1024_600m": 639_193_348,
}
SMALL = {
    "base32_8m": 8_346_893,
    "base32_19m": 18_700_813,
    "base64_47m": 47_125_005,
    "sr64_3m": 3_203_889,
    "sr256_18m": 17_747_313,
    "emoji32": 8_346_893,
    "emoji32_meanflow": 8_346_893,
    "emoji64": 11_840_141,
    "emoji64_sr": 3_203_889,
    "emoji64_transformer": 9_132_224,
}
SAME = dict.fromkeys(("base64_500m_ddpm", "base64_500m_muon", "base64_500m_online"), "base64_500m")
OTHERS = ("__init__", "sd", "mine")  # These are not configs of Imagen, or were written by start.
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if not path.stem.startswith(OTHERS))


def shipped(name):
    """Return the module and the settings of a file in configs/."""
    module = importlib.import_module(f"configs.{name}")
    return module, read_settings(module.get_config().to_dict())


@functools.cache
def number_of_parameters(network, width):
    """Count the parameters of a network from their shapes, without computing them."""
    init = lambda key: network.init(key, **example_inputs(network, width))
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(init, jax.random.key(0))))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_valid_and_has_the_stated_number_of_parameters(name):
    module, s = shipped(name)
    if name.startswith("quickstart"):
        return
    model = SAME.get(name, name)
    exact = (EXACT | SMALL)[model]
    if model in test_nemo.FULL:  # test_nemo.py counts the parameters of NeMo's networks.
        config, parameters = test_nemo.FULL[model]
        assert s.unet.copy(dtype=jnp.float32) == nemo.unet_from_config(config)
        assert (s.text.width, parameters) == (1024, exact)
    else:
        assert number_of_parameters(s.unet, s.text.width) == exact
    assert f"{exact:,}" in module.__doc__


def test_configs_have_the_expected_sizes_sampling_steps_and_guidance():
    sizes = {}
    for name in EXACT:
        s = shipped(name)[1]
        drawn = (s.output_size, s.input_size, s.unet.image_size)
        sizes[name] = (*drawn, s.sampler.steps, s.sampler.guidance)
    assert sizes.pop("base64_500m") == sizes.pop("base64_2b") == (64, 64, 64, 30, 7.5)
    assert sizes.pop("sr1024_600m") == (1024, 256, 256, 20, 7.5)
    assert set(sizes.values()) == {(256, 64, 256, 20, 8.0)}


def test_the_train_state_of_the_2b_model_is_fully_sharded_by_fsdp():
    s = read_settings(base64_2b.get_config().to_dict())
    imagen = task.make_task(s, lookup.open_encoder(s.text, embedded=True))
    tx = optimizer.make_optimizer(s.optimizer, s.run.steps)
    create = lambda key: init_state(imagen.init(key), tx, s.optimizer.ema_decays)
    state = jax.eval_shape(create, jax.random.key(0))
    places = sharding.shardings(state, sharding.make_mesh(2, 4, 1), imagen.rules)
    here = lambda leaf, place: int(np.prod(place.shard_shape(leaf.shape)))
    total = sum(leaf.size for leaf in jax.tree.leaves(state))
    on_one = sum(jax.tree.leaves(jax.tree.map(here, state, places)))
    assert total > 4 * 2_171_162_116  # Parameters, an average, and two moments.
    assert total / 4 < on_one < 1.002 * total / 4  # Only biases and scales are replicated.
