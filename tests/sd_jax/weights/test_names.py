"""Names and shapes of all arrays are converted between this project, LDM and diffusers."""

import functools
import gzip
import json
import pathlib
import re

import jax
import numpy as np
import pytest

from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import formats, names
from tests.parity.sd import ldm_vae
from tests.sd_jax.cases import TEXT_WIDTH, TINY, TINY_VAE, unet_weights, vae_weights

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures"
TABLES = json.loads(gzip.decompress((FIXTURES / "param_tables" / "sd.json.gz").read_bytes()))
V1 = UNet(num_heads=8, linear_projections=False)
MLPERF = UNet(norm_groups=16)
LINEAR = dict(num_heads=-1, num_head_channels=16, use_linear_in_transformer=True)
# Shapes of whole models, traced once and used for all dialects.
abstract_unet, abstract_vae = map(functools.cache, (names.abstract_unet, names.abstract_vae))


def shapes_in_torch(table, abstract):
    """Return names with shapes, and the number of parameters, without creating weights."""
    zeros = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), abstract)
    leaves = jax.tree.leaves_with_path(zeros)
    arrays = {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}
    shapes = {entry.torch: list(entry.layout.to_torch(arrays[entry.path]).shape) for entry in table}
    assert sorted(entry.path for entry in table) == sorted(arrays)
    return shapes, sum(leaf.size for leaf in arrays.values())


@pytest.mark.parametrize("dialect", ["ldm", "diffusers"])
@pytest.mark.parametrize(
    ("name", "unet", "text_width", "parameters"),
    [("unet_v1", V1, 768, 859_520_964), ("unet_v2", MLPERF, 1024, 865_910_724)],
)
def test_whole_unets_have_the_reference_names_shapes_and_counts(name, unet, text_width, parameters, dialect):
    abstract = abstract_unet(unet, text_width)
    shapes, count = shapes_in_torch(names.unet_table(abstract, unet, dialect), abstract)
    assert count == parameters and len(shapes) == 686
    assert shapes == TABLES[f"{name}_{dialect}"]


@pytest.mark.parametrize("dialect", ["ldm", "diffusers"])
def test_the_whole_vae_has_the_reference_names_shapes_and_count(dialect):
    abstract = abstract_vae(VAE())
    shapes, count = shapes_in_torch(names.vae_table(abstract, VAE(), dialect), abstract)
    assert count == 83_653_863 and len(shapes) == 248
    assert shapes == TABLES[f"vae_{dialect}"]


def test_nemos_names_match_the_reference():
    theirs = json.loads(np.load(FIXTURES / "sd_unet_block.npz")["nemo"].item())
    config = TINY | LINEAR | dict(channel_mult=[1, 2, 2], attention_resolutions=[1, 2])
    unet = formats.unet_from_ldm(config)
    params = names.abstract_unet(unet, TEXT_WIDTH)
    by_path = {entry.path: entry.torch for entry in names.unet_table(params, unet, "ldm")}
    ours = {by_path[entry.path]: entry.torch for entry in names.unet_table(params, unet, "nemo")}
    assert ours == theirs


@pytest.mark.parametrize("dialect", ["ldm", "nemo", "diffusers"])
@pytest.mark.parametrize("change", [{"transformer_depth": 2, "num_res_blocks": [2, 1]}, LINEAR])
def test_unet_params_convert_to_each_dialect_and_back_bit_for_bit(change, dialect):
    unet = formats.unet_from_ldm(TINY | change)
    state = unet_weights(unet, dialect)
    params = names.unet_from_torch(state, unet, TEXT_WIDTH)
    back = names.unet_to_torch(params, unet, dialect)
    assert back.keys() == state.keys() and names.unet_dialect(state) == dialect
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array, strict=True)


@pytest.mark.parametrize("dialect", ["ldm", "diffusers"])
def test_vae_params_convert_to_each_dialect_and_back_bit_for_bit(dialect):
    vae = ldm_vae(TINY_VAE)
    state = vae_weights(vae, dialect)
    back = names.vae_to_torch(names.vae_from_torch(state, vae), vae, dialect)
    assert back.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array, strict=True)


def test_older_names_of_vae_attention_can_be_read():
    vae = ldm_vae(TINY_VAE)
    state, older = vae_weights(vae, "diffusers"), {}
    words = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    for name, array in state.items():
        for new, old in words.items():
            name = name.replace(f".{new}.", f".{old}.")
        older[name] = array
    assert len(older.keys() - state.keys()) == 16
    expected = names.vae_from_torch(state, vae)
    jax.tree.map(np.testing.assert_array_equal, names.vae_from_torch(older, vae), expected)


def test_weights_of_another_config_are_errors_that_name_keys():
    unet = formats.unet_from_ldm(TINY)
    state = unet_weights(unet)
    linear = formats.unet_from_ldm(TINY | LINEAR)
    message = "arrays have shapes that differ from the model's: input_blocks.1.1.proj_in.weight"
    with pytest.raises(ValueError, match=re.escape(message)):
        names.unet_from_torch(state, linear, TEXT_WIDTH)
    del state["out.0.bias"]
    with pytest.raises(ValueError, match=r"missing keys \(1\): out\.0\.bias; keys left over \(1\)"):
        names.unet_from_torch(state | {"out.4.bias": state["out.2.bias"]}, unet, TEXT_WIDTH)
    with pytest.raises(ValueError, match="these weights are not those of an autoencoder"):
        names.vae_from_torch(state, ldm_vae(TINY_VAE))
