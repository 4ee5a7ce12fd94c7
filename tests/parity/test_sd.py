"""Stable Diffusion agrees with saved outputs of the references, and with a derivation in numpy."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.weights import torch_weights
from sd_jax.unet import ResBlock, Transformer
from sd_jax.weights import formats, names
from tests.parity import compare, sd
from tests.sd_jax.cases import TINY, TINY_VAE, unet_case, vae_case

ROOT = pathlib.Path(__file__).parents[2]
ORACLES = ROOT.parent / "shared" / "oracles" / "sd"
SHARED = sorted([*ORACLES.glob("unet_*.npz"), *ORACLES.glob("vae.npz")])

OPTIONS = {
    # As in 1.x, with two layers per transformer, different numbers of blocks per level, and latents
    # that are not square.
    "heads by number": (TINY | dict(transformer_depth=2, num_res_blocks=[1, 2]), 32, (4, 8)),
    # As in MLPerf, with transformers only on the lower level and in the middle.
    "heads by width": (
        TINY | dict(attention_resolutions=[2], num_heads=-1, num_head_channels=16, use_linear_in_transformer=True),
        16,
        (4, 4),
    ),
}


@pytest.mark.gate
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_combined_unet_options_match_numpy(name):
    config, norm_groups, size = OPTIONS[name]
    case = unet_case(config, norm_groups, size)
    errors = sd.verify(case)
    # numpy computes in float64, so the error is the rounding of this project's float32.
    assert errors["y"] < 5e-6 and errors["y_frac"] < 5e-6, errors


def test_a_vae_matches_numpy():
    """The picture's sides are odd, so that the reference's encoder leaves out the last pixels."""
    errors = sd.verify(vae_case(TINY_VAE, size=(9, 13)))
    assert errors["max_relative_error"] < 5e-6, errors
    assert {"encoder_out", "moments", "mean", "std", "sample", "decode"} < errors.keys()


def test_a_block_matches_mlperfs_reference():
    """Group normalization has 16 groups in the residual block and 32 in the transformer."""
    case = torch_weights.read(ROOT / "tests" / "fixtures" / "sd_unet_block.npz")
    unet = formats.unet_from_ldm(TINY | dict(num_heads=-1, num_head_channels=16, use_linear_in_transformer=True), 16)
    params = {}
    for entry in names.unet_table(names.abstract_unet(unet, 24), unet, "ldm"):
        if f"w/{entry.torch}" in case:
            *groups, leaf = entry.path.split("/")[1:]
            node = params
            for group in groups:
                node = node.setdefault(group, {})
            node[leaf] = jnp.asarray(entry.layout.to_jax(case[f"w/{entry.torch}"]), jnp.float32)
    act = lambda name: jnp.asarray(case[f"act/{name}"])
    images = lambda name: jnp.moveaxis(act(name), 1, -1)
    emb = jax.nn.silu(act("time_embed"))
    h = jax.jit(ResBlock(16, 32).apply)({"params": params["down_0_0_res"]}, images("input_blocks.0"), emb)
    transformer = Transformer(depth=1, num_heads=0, head_dim=16)
    y = jax.jit(transformer.apply)({"params": params["down_0_0_attn"]}, h, jnp.asarray(case["ctx"]))
    np.testing.assert_allclose(y, images("input_blocks.1"), atol=1e-5)


@pytest.mark.oracles
@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.stem)
def test_each_case_in_the_shared_folder_matches_the_reference(path):
    errors = sd.verify(torch_weights.read(path))
    assert compare.within(errors, sd.TOLERANCE), errors
    assert len(errors) > 8


def test_a_single_changed_weight_exceeds_the_tolerance():
    case = unet_case(TINY | dict(channel_mult=[1]))
    name = "w/middle_block.1.transformer_blocks.0.attn2.to_v.weight"
    changed = case[name].copy()
    changed[-1, -1] += 1e-2
    assert sd.verify(case)["max_relative_error"] < 5e-6
    errors = sd.verify(case | {name: changed})
    assert errors["max_relative_error"] > 3e-5 and not compare.within(errors, sd.TOLERANCE)


def test_nan_is_never_within_the_tolerance():
    errors = {"max_relative_error": 1e-6, "grad_max_relative_error": None}
    assert compare.within(errors, sd.TOLERANCE)
    assert not compare.within(errors | {"max_relative_error": float("nan")}, sd.TOLERANCE)
    assert not compare.within(errors | {"grad_max_relative_error": 1.1e-4}, sd.TOLERANCE)
