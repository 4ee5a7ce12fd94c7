"""NeMo's names, shapes and configs: complete models in both directions, and errors."""

import gzip
import json
import pathlib
import re

import jax
import numpy as np
import pytest

from imagen_jax.efficient_unet import EfficientUNet
from imagen_jax.unet import UNet
from imagen_jax.weights import nemo
from tests.imagen_jax.cases import SMALL, SMALL_EFFICIENT, TINY, random_weights

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures"

NEMO = dict(
    per_head_channels=64,
    learned_sinu_pos_emb_dim=0,
    cond_dim=512,
    attention_type="fused",
    attention_resolutions=[8, 16, 32],
    num_attn_heads=4,
)
BASE64_500M = {"unet": NEMO | dict(embed_dim=256, image_size=64)}
BASE64_2B = {"unet": NEMO | dict(embed_dim=512, image_size=64, cond_dim=2048)}
SR256_400M = dict(
    unet_type="sr-unet",
    noise_cond_aug=True,
    unet=NEMO
    | dict(
        embed_dim=128,
        image_size=256,
        channel_mult=[1, 2, 4, 6, 6],
        num_res_blocks=[2, 2, 3, 4, 3],
        attention_resolutions=[32, 16],
        low_res_cond=True,
    ),
)


SR256_600M = dict(
    unet_type="sr",
    noise_cond_aug=True,
    unet=dict(
        embed_dim=128,
        image_size=256,
        channel_mult=[1, 2, 4, 8, 8],
        num_resblocks=[2, 4, 8, 8, 8],
        atnn_enabled_at=[0, 0, 0, 1, 1],
        learned_sinu_pos_emb_dim=0,
        skip_connection_scaling=True,
    ),
)


def attending(config, kind):
    return config | {"unet": config["unet"] | {"attention_type": kind}}


def shapes_in_torch(config):
    """Return NeMo's names and shapes and the number of parameters, without creating weights."""
    unet = nemo.unet_from_config(config)
    params = nemo.abstract_params(unet, text_width=1024)
    zeros = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), params)
    leaves = jax.tree.leaves_with_path(zeros)
    arrays = {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}
    table = nemo.table(params, unet)
    assert sorted(entry.path for entry in table) == sorted(arrays)
    shapes = {entry.torch: list(entry.layout.to_torch(arrays[entry.path]).shape) for entry in table}
    return shapes, sum(leaf.size for leaf in arrays.values())


FULL = {
    "base64_500m": (BASE64_500M, 524_897_540),
    "base64_2b": (BASE64_2B, 2_171_162_116),
    "sr256_400m": (SR256_400M, 408_350_468),
    "sr256_600m": (SR256_600M, 646_023_428),
    "sr256_600m_stacked": (attending(SR256_600M, "stacked"), 700_610_308),
    "sr1024_600m": (attending(SR256_600M, "cross"), 639_193_348),
}


@pytest.mark.parametrize("name", FULL)
def test_full_models_have_the_reference_names_shapes_and_counts(name):
    config, parameters = FULL[name]
    shapes, count = shapes_in_torch(config)
    assert count == parameters
    text = gzip.decompress((FIXTURES / "param_tables" / f"{name}.txt.gz").read_bytes()).decode()
    rows = (line.split("\t") for line in text.splitlines())
    assert shapes == {name: json.loads(shape) for name, shape in rows}


def test_converting_params_to_nemo_and_back_is_exact():
    unet = nemo.unet_from_config(attending({"unet": SMALL | {"use_null_token": True}}, "stacked"))
    state = random_weights(unet, 40)
    params = nemo.from_nemo(state, unet, 40)
    back = nemo.to_nemo(params, unet)
    np.testing.assert_array_equal(back["input_blocks.0.0.weight"], state["init_conv.0.weight"])
    assert back.keys() - state.keys() == {"input_blocks.0.0.weight", "input_blocks.0.0.bias"}
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array, strict=True)
    again = nemo.from_nemo(back, unet, 40)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_converting_an_efficient_unet_to_nemo_and_back_is_exact():
    unet = nemo.unet_from_config(attending({"unet_type": "sr", "unet": SMALL_EFFICIENT}, "cross"))
    state = random_weights(unet, 64)
    back = nemo.to_nemo(nemo.from_nemo(state, unet, 64), unet)
    assert back.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array, strict=True)


@pytest.fixture(scope="module")
def tiny():
    """Return (UNet, state dict, params), for text of width 40."""
    unet = nemo.unet_from_config(TINY)
    state = random_weights(unet, 40)
    return unet, state, nemo.from_nemo(state, unet, 40)


@pytest.mark.parametrize("prefix", ["model.model.unet._orig_mod.", "unet."])
def test_names_with_nemos_prefixes_are_read(tiny, prefix):
    unet, state, params = tiny
    prefixed = {prefix + name: array for name, array in state.items()}
    loaded = nemo.from_nemo(prefixed, unet, 40)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_the_first_layer_of_a_nemo_unet_may_be_stored_under_either_of_its_two_names(tiny):
    unet, _, params = tiny
    both = nemo.to_nemo(params, unet)
    alias = {name: array for name, array in both.items() if not name.startswith("init_conv")}
    jax.tree.map(np.testing.assert_array_equal, nemo.from_nemo(alias, unet, 40), params)
    both["input_blocks.0.0.bias"] = both["input_blocks.0.0.bias"] + 1
    with pytest.raises(ValueError, match=r"input_blocks\.0\.0\.bias and init_conv\.0\.bias differ"):
        nemo.from_nemo(both, unet, 40)


def test_two_models_in_one_state_dict_are_an_error(tiny):
    unet, state, _ = tiny
    with pytest.raises(ValueError, match=f"has {len(state) + 1} arrays, but .* only {len(state)} of their names"):
        nemo.from_nemo(state | {"ema.unet.out.2.bias": state["out.2.bias"]}, unet, 40)


def test_weights_of_another_config_are_an_error_that_names_keys(tiny):
    unet, state, _ = tiny
    null = nemo.unet_from_config({"unet": TINY["unet"] | {"use_null_token": True}})
    with pytest.raises(ValueError, match=r"missing keys \(1\): null_text_embedding; keys left over \(0\)"):
        nemo.from_nemo(state, null, 40)
    with pytest.raises(ValueError, match=re.escape("text_to_cond.weight (64, 40) where the model")):
        nemo.from_nemo(state, unet, 48)


def test_unet_from_config_uses_nemos_defaults():
    unet = nemo.unet_from_config({"unet": {"embed_dim": 64, "image_size": 32}})
    assert unet == UNet(
        image_size=32,
        embed_dim=64,
        channel_mult=(1, 2, 3, 4),
        num_res_blocks=3,
        attention_resolutions=(8, 16, 32),
        attention="fused",
        head_dim=64,
        cond_dim=512,
        text_pooling="attention",
        learned_time_dim=16,
    )


def test_unet_from_config_uses_nemos_defaults_for_the_efficient_unet():
    unet = nemo.unet_from_config(
        {"unet_type": "sr", "unet": {"embed_dim": 64, "image_size": 32, "num_resblocks": [0] * 5}}
    )
    assert unet == EfficientUNet(
        image_size=32,
        embed_dim=64,
        channel_mult=(1, 1, 2, 4, 8),
        num_res_blocks=(1, 1, 1, 1, 1),  # In NeMo, every level has at least one block.
        attention_levels=(4,),
        attention="fused",
        head_dim=64,
        text_pooling="attention",
        learned_time_dim=16,
        scale_skips=False,
    )
    unet = nemo.unet_from_config({"unet_type": "sr", "unet": {"embed_dim": 64, "image_size": 32}})
    assert isinstance(unet, EfficientUNet) and unet.num_res_blocks == (1, 2, 4, 8, 8)


def efficient(**changes):
    return {"unet_type": "sr", "unet": SMALL_EFFICIENT | changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unet_type": "ddim"}, "config is 'ddim': it must be 'base', 'sr-unet' or"),
        (efficient(stride=4), "unet.stride in NeMo's config is 4, but only 2"),
        (efficient(channel_mult=[1, 2, 4]), "has 3 levels, but unet.num_resblocks has 2 entries"),
        (efficient(channel_mult=[1, 1.5]), "has [1, 1.5] where integers are expected"),
        (efficient(per_head_channels=-1, num_attn_heads=5), "unet.num_heads 5 does not divide"),
        (efficient(embed_dim="wide"), "config has the wrong type: "),
        (efficient(channels=1), "unet.channels in NeMo's config is 1, but only 3"),
        ({"unet": {"cond_dim": 64}}, "lacks image_size and embed_dim: add the"),
        ({"unet": SMALL | {"per_head_channels": -1}}, "unet.head_dim -1 does not divide"),
        ({"unet": SMALL | {"attention_type": "flash"}}, "unet.attention is 'flash'"),
    ],
)
def test_nemo_configs_that_are_not_supported_are_errors(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        nemo.unet_from_config(TINY | change)
