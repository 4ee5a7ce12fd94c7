"""Imagen's UNets agree with saved outputs of NeMo, and with a second derivation in numpy."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.weights import torch_weights
from imagen_jax import attention, conditioning, layers
from imagen_jax.weights import nemo
from tests.imagen_jax.cases import SMALL, SMALL_EFFICIENT, TINY_EFFICIENT, random_case
from tests.parity import compare, imagen

ROOT = pathlib.Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
SHARED = sorted((ROOT.parent / "shared" / "oracles" / "imagen").glob("*.npz"))
SHARED = [
    path for path in SHARED if path.name.startswith(("base_", "srunet_", "eff_")) and path.stem != "srunet_fused_aug"
]

OPTIONS = {
    # Learned time embeddings for both times, one more block on the lower level, attention
    # resolutions that no level has (5, and 32, which is above all), images that are not square, and
    # a low-resolution image that already has the full size.
    "fused": dict(
        unet_type="sr-unet",
        noise_cond_aug=True,
        unet=SMALL
        | dict(
            low_res_cond=True,
            learned_sinu_pos_emb_dim=6,
            feature_pooling_type="mean",
            num_res_blocks=[1, 2],
            attention_resolutions=[32, 8, 5],
            flash_attention=True,
        ),
    ),
    # Residual blocks that resample, at a resolution with attention (8) and one without (4), and the
    # null token with attention pooling.
    "stacked": dict(
        unet=SMALL
        | dict(
            attention_type="stacked",
            resblock_updown=True,
            scale_shift_norm=False,
            use_null_token=True,
            init_conv_kernel_size=7,
            attention_resolutions=[8],
        )
    ),
    # A level without blocks, widths that fall and rise, average pooling, and a text width that is
    # not divisible by the number of groups of group normalization.
    "self": dict(
        unet=SMALL
        | dict(
            attention_type="self",
            embed_dim=16,
            channel_mult=[4, 2, 6],
            num_res_blocks=[1, 0, 1],
            cond_dim=40,
            resample_with_conv=False,
        )
    ),
    # A base model that takes a low-resolution image. The deepest level has no blocks.
    "cross": dict(
        unet_type="base",
        unet=SMALL
        | dict(
            attention_type="cross",
            low_res_cond=True,
            noise_cond_aug=True,
            channel_mult=[2, 1, 2],
            num_res_blocks=[2, 1, 0],
            attention_resolutions=[8, 2],
        ),
    ),
    # Attention at two of three levels, learned time embeddings, the null token, a first kernel of
    # size 7, and residual blocks without scale and shift.
    "efficient_stacked": dict(
        unet_type="sr",
        unet=SMALL_EFFICIENT
        | dict(
            attention_type="stacked",
            channel_mult=[1, 2, 2],
            num_resblocks=[1, 2, 1],
            atnn_enabled_at=[0, 1, 1],
            learned_sinu_pos_emb_dim=6,
            use_null_token=True,
            feature_pooling_type="mean",
            scale_shift_norm=False,
            init_conv_kernel_size=7,
        ),
    ),
    # A number of heads in place of their width, a level with 0 blocks (it still gets one), and
    # images that are not square.
    "efficient_cross": dict(
        unet_type="sr",
        noise_cond_aug=True,
        unet=SMALL_EFFICIENT
        | dict(
            attention_type="cross",
            per_head_channels=-1,
            num_attn_heads=2,
            channel_mult=[3, 1],
            num_resblocks=[0, 2, 5],
            atnn_enabled_at=[True, True, True],
            skip_connection_scaling=False,
        ),
    ),
    # Attention on the first level only, and a text width that is not divisible by the number of
    # groups of group normalization.
    "efficient_self": dict(unet_type="sr", unet=SMALL_EFFICIENT | dict(attention_type="self", atnn_enabled_at=[1, 0])),
}
SIZES = {"fused": (8, 12), "cross": (16, 8), "efficient_cross": (8, 12)}


@pytest.mark.parametrize(
    ("name", "parameters"),
    # The outputs of unet_efficient come from this project's own torch implementation.
    [("unet_srunet_fused_aug", 872_116), ("unet_efficient", 218_124)],
)
def test_unets_match_the_saved_outputs_of_the_reference(name, parameters):
    errors = imagen.verify(torch_weights.read(FIXTURES / f"{name}.npz"))
    assert errors["parameters"] == parameters
    assert None not in errors.values() and compare.within(errors, imagen.TOLERANCE), errors


@pytest.mark.oracles
@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.stem)
def test_unets_match_all_shared_cases_of_the_reference(path):
    errors = imagen.verify(torch_weights.read(path))
    assert None not in errors.values() and compare.within(errors, imagen.TOLERANCE), errors


@pytest.mark.gate
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_combined_unet_options_match_numpy(name):
    text_width = 64 if name in ("efficient_stacked", "efficient_cross") else 40
    case = random_case(OPTIONS[name], size=SIZES.get(name), text_width=text_width)
    errors = imagen.verify(case)
    # numpy computes in float64, so the error is the rounding of this project's float32: about 1e-6
    # for sums of some 1,000 terms of size 1, and five times as much with guidance 3.
    assert errors["max_abs_error"] < 1e-5 and errors["cfg_max_abs_error"] < 2e-5, errors
    assert np.abs(case["out/y_cfg3"] - case["out/y"]).max() > 0.1  # The text matters.


def test_single_blocks_match_the_saved_activations_of_the_reference():
    """The case has learned time embeddings, mean pooling, the null token, stacked attention and
    residual blocks without scale and shift."""
    case = torch_weights.read(FIXTURES / "unet_base_options_half.npz")
    unet = nemo.unet_from_config(json.loads(case["config"].item()))
    params = {}
    for entry in nemo.table(nemo.abstract_params(unet, 64), unet):
        if f"sd/{entry.torch}" in case:
            *groups, leaf = entry.path.split("/")[1:]
            node = params
            for group in groups:
                node = node.setdefault(group, {})
            node[leaf] = jnp.asarray(entry.layout.to_jax(case[f"sd/{entry.torch}"]))

    def act(name):
        return jnp.asarray(case[f"act/{name}"])

    def images(name):
        return jnp.moveaxis(act(name), 1, -1)

    def apply(block, name, *args):
        return jax.jit(block.apply)({"params": params[name]}, *args)

    close = lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5)
    time = conditioning.TimeEmbed(32, unet.learned_time_dim)
    close(apply(time, "time_embed", jnp.asarray(case["in/time"])), act("time_embed"))
    pooled = act("text_to_cond").mean(1)
    text = conditioning.TextEmbed(128)
    close(apply(text, "text_embed", pooled), act("to_text_non_attn_cond"))

    emb = act("time_embed") + act("to_text_non_attn_cond")
    res = lambda width, how="": layers.ResBlock(width, how, scale_shift=False)
    first = apply(res(32), "down_0_0_res", images("init_conv"), emb)
    close(first, images("input_blocks.1"))
    halved = apply(res(32, "down"), "down_0_resample", images("input_blocks.1"), emb)
    close(halved, images("input_blocks.2"))
    null = jnp.broadcast_to(params["null_token"], (3, 1, 64))
    context = jnp.concatenate([act("text_to_cond"), null], axis=1)
    mask = jnp.pad(jnp.asarray(case["in/text_mask"]) != 0, ((0, 0), (0, 1)), constant_values=True)
    h = apply(res(64), "down_1_0_res", images("input_blocks.2"), emb)
    h = apply(attention.StackedAttention(16), "down_1_0_attn", h, context, mask)
    close(h, images("input_blocks.3"))


def test_a_single_changed_weight_exceeds_the_tolerance():
    case = random_case(TINY_EFFICIENT, text_width=64)
    name = "sd/time_embed.1.bias"
    changed = case[name].copy()
    changed[-1] += 1e-2
    assert imagen.verify(case)["max_abs_error"] < 1e-5
    errors = imagen.verify(case | {name: changed})
    assert errors["max_abs_error"] > 3e-5 and not compare.within(errors, imagen.TOLERANCE)


def test_nan_is_never_within_the_tolerance():
    errors = {"max_abs_error": 1e-6, "cfg_max_abs_error": None, "grad_max_abs_error": 9e-5}
    assert compare.within(errors, imagen.TOLERANCE)
    assert not compare.within(errors | {"max_abs_error": float("nan")}, imagen.TOLERANCE)
    assert not compare.within(errors | {"grad_max_abs_error": 1.1e-4}, imagen.TOLERANCE)
