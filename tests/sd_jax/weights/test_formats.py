"""Configs of LDM, NeMo and diffusers are read, written and inferred from weights."""

import re

import pytest

from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import formats
from tests.parity.sd import ldm_vae
from tests.sd_jax.cases import TINY, TINY_VAE, unet_weights, vae_weights

# From CompVis' v1-inference.yaml and Stability's v2-inference.yaml.
SD1 = dict(
    image_size=32,
    in_channels=4,
    out_channels=4,
    model_channels=320,
    attention_resolutions=[4, 2, 1],
    num_res_blocks=2,
    channel_mult=[1, 2, 4, 4],
    num_heads=8,
    use_spatial_transformer=True,
    transformer_depth=1,
    context_dim=768,
    use_checkpoint=True,
    legacy=False,
)
SD2 = SD1 | dict(num_heads=-1, num_head_channels=64, use_linear_in_transformer=True, context_dim=1024)
V1 = UNet(num_heads=8, linear_projections=False)
DIFFUSERS, DIFFUSERS_VAE = formats.unet_to_diffusers(V1, 768), formats.vae_to_diffusers(VAE())
FOUR_UP_BLOCKS = ["UpBlock2D"] * 4


def test_ldms_configs_give_the_networks_of_1_x_and_2_x():
    assert formats.unet_from_ldm(SD1) == V1
    assert formats.unet_from_ldm(SD2) == UNet()
    assert formats.unet_from_ldm(SD2, 16) == UNet(norm_groups=16)
    assert formats.unet_from_ldm(SD2 | {"resblock_gn_groups": 16}) == UNet(norm_groups=16)


@pytest.mark.parametrize("unet", [V1, UNet(), UNet(transformer_depth=2, attention_levels=(1, 2))])
def test_a_unet_config_converts_to_diffusers_and_back(unet):
    config = formats.unet_to_diffusers(unet, 768)
    assert formats.unet_from_diffusers(config) == unet


@pytest.mark.parametrize(
    "unet", [V1, UNet(norm_groups=16), UNet(head_dim=40, num_res_blocks=(1, 2, 2, 2), in_channels=9)]
)
def test_a_unet_config_converts_to_ldm_and_back(unet):
    assert formats.unet_from_ldm(formats.unet_to_ldm(unet, 768)) == unet


def test_the_latent_size_is_read_and_must_be_square():
    assert [formats.latent_size(c) for c in ({}, {"sample_size": 96}, {"sample_size": [8, 8]})] == [64, 96, 8]
    with pytest.raises(ValueError, match=r"sample_size is \[64, 96\], but only square im"):
        formats.latent_size({"sample_size": [64, 96]})


def test_attention_heads_in_diffusers_configs_match_published_files():
    assert formats.unet_to_diffusers(V1, 768)["attention_head_dim"] == 8
    assert formats.unet_to_diffusers(UNet(), 1024)["attention_head_dim"] == [5, 10, 20, 20]
    assert formats.vae_from_diffusers(formats.vae_to_diffusers(VAE())) == VAE()


@pytest.mark.parametrize(
    "change",
    [
        # Like in the released models: 8 heads, or heads of width 64.
        dict(num_heads=8, transformer_depth=2, num_res_blocks=[2, 1], attention_resolutions=[2]),
        dict(num_heads=-1, num_head_channels=64, use_linear_in_transformer=True, model_channels=64),
    ],
)
def test_networks_are_inferred_from_their_weights(change):
    unet = formats.unet_from_ldm(TINY | {"in_channels": 9} | change)
    for dialect in ("ldm", "nemo"):
        assert formats.unet_from_weights(unet_weights(unet, dialect)) == unet
    vae = ldm_vae(TINY_VAE | {"num_res_blocks": 2, "ch_mult": [1, 1, 2]})
    assert formats.vae_from_weights(vae_weights(vae)) == vae


@pytest.mark.parametrize(
    ("read", "config", "message"),
    [
        (formats.unet_from_ldm, SD1 | {"num_classes": 10}, "num_classes is 10, but only None is"),
        (formats.unet_from_ldm, SD1 | {"num_heads": 7}, "unet.num_heads 7 does not divide the"),
        (formats.unet_from_ldm, SD1 | {"model_channels": 40}, "norm_groups 32 does not divide"),
        (formats.unet_from_ldm, SD1 | {"channel_mult": [1, 2.5]}, "is [1, 2.5]: it must hold int"),
        (formats.unet_from_ldm, {}, "config lacks model_channels, attention_resolutions: it has"),
        (formats.unet_from_ldm, SD1 | {"num_res_blocks": [1]}, "has 1 entries, but unet.channel_mult"),
        (formats.unet_from_diffusers, DIFFUSERS | {"norm_num_groups": 16}, "norm_num_groups is 16, but only 32 is sup"),
        (
            formats.unet_from_diffusers,
            DIFFUSERS | {"attention_head_dim": [5, 7, 20, 20]},
            "same number of heads, or heads",
        ),
        (
            formats.unet_from_diffusers,
            DIFFUSERS | {"up_block_types": FOUR_UP_BLOCKS},
            f"is {FOUR_UP_BLOCKS}, but only [",
        ),
        (
            formats.unet_from_diffusers,
            DIFFUSERS | {"_class_name": "UNet3D"},
            "_class_name is 'UNet3D', but only 'UNet2D",
        ),
        (
            formats.vae_from_diffusers,
            DIFFUSERS_VAE | {"act_fn": "relu"},
            "act_fn is 'relu', but only 'silu' is supported",
        ),
        (
            formats.vae_from_diffusers,
            DIFFUSERS_VAE | {"block_out_channels": [128, 192]},
            "is [128, 192], but only multiples",
        ),
    ],
)
def test_unsupported_config_fields_are_errors_that_name_them(read, config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(config)


def test_networks_that_diffusers_cannot_express_are_errors():
    with pytest.raises(ValueError, match=r"unet\.norm_groups is 16, but diffusers needs 32"):
        formats.unet_to_diffusers(UNet(norm_groups=16), 1024)
    with pytest.raises(ValueError, match=r"channel_mult is \(2, 4\), but in diffusers the first"):
        formats.unet_to_diffusers(UNet(channel_mult=(2, 4), attention_levels=(0,)), 1024)
