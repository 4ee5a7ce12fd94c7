"""Model configs of LDM, NeMo and diffusers, read and written; and what weights alone tell.

LDM's fields are those of openaimodel.UNetModel and of AutoencoderKL's ddconfig; NeMo's are the same
with a few more.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_jax.nn.layers import blocks_per_level
from diffusion_jax.weights.torch_weights import StateDict
from sd_jax import unet as unet_module
from sd_jax import vae as vae_module
from sd_jax.unet import UNet
from sd_jax.vae import VAE

Config = Mapping[str, Any]

# Options of other models of these families, with the values that Stable Diffusion has.
_ONLY_LDM_UNET = {
    "use_spatial_transformer": (True,),
    "use_scale_shift_norm": (False,),
    "resblock_updown": (False,),
    "conv_resample": (True,),
    "dims": (2,),
    "num_classes": (None,),
    "n_embed": (None,),
}
_ONLY_LDM_VAE = {
    "double_z": (True,),
    "attn_resolutions": ([], ()),
    "tanh_out": (False,),
    "attn_type": ("vanilla",),
    "resamp_with_conv": (True,),
}
_ONLY_DIFFUSERS_UNET = {
    "act_fn": ("silu",),
    "flip_sin_to_cos": (True,),
    "freq_shift": (0,),
    "norm_num_groups": (32,),
    "norm_eps": (1e-5,),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "mid_block_scale_factor": (1,),
    "class_embed_type": (None,),
    "addition_embed_type": (None,),
    "dual_cross_attention": (False,),
    "only_cross_attention": (False,),
    "resnet_time_scale_shift": ("default",),
    "time_cond_proj_dim": (None,),
    "encoder_hid_dim": (None,),
}
_ONLY_DIFFUSERS_VAE = {
    "act_fn": ("silu",),
    "norm_num_groups": (32,),
    "mid_block_add_attention": (True,),
}


def unet_from_ldm(config: Config, norm_groups: int | None = None) -> UNet:
    """The UNet of an LDM or NeMo config; ValueError if it asks for what is not here.

    `norm_groups` where the config does not say (NeMo's does, as resblock_gn_groups).
    """
    _need(config, ("model_channels", "attention_resolutions"), "LDM UNet")
    _only(config, _ONLY_LDM_UNET)
    mult = _ints(config.get("channel_mult", (1, 2, 4, 8)))
    blocks = config.get("num_res_blocks", 2)
    factors = _ints(config["attention_resolutions"])
    by_width = config.get("num_head_channels", -1) not in (-1, None)
    groups = norm_groups or config.get("resblock_gn_groups") or config.get("norm_groups") or 32
    unet = UNet(
        width=config["model_channels"],
        channel_mult=mult,
        num_res_blocks=blocks if isinstance(blocks, int) else _ints(blocks),
        attention_levels=tuple(level for level in range(len(mult)) if 2**level in factors),
        transformer_depth=_one_number(config.get("transformer_depth", 1), "transformer_depth"),
        num_heads=0 if by_width else config.get("num_heads", 8),
        head_dim=config["num_head_channels"] if by_width else 64,
        linear_projections=bool(config.get("use_linear_in_transformer", False)),
        norm_groups=groups,
        in_channels=config.get("in_channels", 4),
        out_channels=config.get("out_channels", 4),
    )
    unet_module.check(unet)
    return unet


def vae_from_ldm(config: Config) -> VAE:
    """The VAE of an LDM config, a ddconfig or what holds one; ValueError as for the UNet."""
    embed_dim = config.get("embed_dim")
    config = config.get("ddconfig", config)
    _need(config, ("ch", "ch_mult", "z_channels"), "LDM VAE")
    _only(config, _ONLY_LDM_VAE)
    if embed_dim not in (None, config["z_channels"]):
        raise ValueError(
            f"embed_dim is {embed_dim} and z_channels {config['z_channels']}: latents here have as "
            "many channels as the encoder gives"
        )
    if config.get("in_channels", 3) != config.get("out_ch", 3):
        raise ValueError(
            f"in_channels is {config['in_channels']} and out_ch {config['out_ch']}: an autoencoder "
            "here gives what it takes"
        )
    vae = VAE(
        width=config["ch"],
        channel_mult=_ints(config["ch_mult"]),
        num_res_blocks=config.get("num_res_blocks", 2),
        latent_channels=config["z_channels"],
        image_channels=config.get("in_channels", 3),
    )
    vae_module.check(vae)
    return vae


def unet_from_diffusers(config: Config) -> UNet:
    """The UNet of a diffusers UNet2DConditionModel's config; ValueError as for LDM's."""
    _need(config, ("block_out_channels", "down_block_types"), "diffusers UNet")
    _only(config, _ONLY_DIFFUSERS_UNET)
    widths, kinds = _ints(config["block_out_channels"]), list(config["down_block_types"])
    known = ("CrossAttnDownBlock2D", "DownBlock2D")
    if any(kind not in known for kind in kinds):
        raise ValueError(f"down_block_types holds {kinds}: known are {', '.join(known)}")
    # diffusers calls the number of heads their width, one number or one a level.
    heads = config.get("num_attention_heads") or config.get("attention_head_dim", 8)
    levels = tuple(level for level, kind in enumerate(kinds) if kind == known[0])
    num_heads, head_dim = _heads(widths, heads)
    blocks = config.get("layers_per_block", 2)
    depth = config.get("transformer_layers_per_block", 1)
    unet = UNet(
        width=widths[0],
        channel_mult=_multiples(widths),
        num_res_blocks=blocks if isinstance(blocks, int) else _ints(blocks),
        attention_levels=levels,
        transformer_depth=_one_number(depth, "transformer_layers_per_block"),
        num_heads=num_heads,
        head_dim=head_dim,
        linear_projections=bool(config.get("use_linear_projection", False)),
        in_channels=config.get("in_channels", 4),
        out_channels=config.get("out_channels", 4),
    )
    unet_module.check(unet)
    return unet


def vae_from_diffusers(config: Config) -> VAE:
    """The VAE of a diffusers AutoencoderKL's config; ValueError as for LDM's."""
    _need(config, ("block_out_channels",), "diffusers VAE")
    _only(config, _ONLY_DIFFUSERS_VAE)
    widths = _ints(config["block_out_channels"])
    vae = VAE(
        width=widths[0],
        channel_mult=_multiples(widths),
        num_res_blocks=config.get("layers_per_block", 1),
        latent_channels=config.get("latent_channels", 4),
        image_channels=config.get("in_channels", 3),
    )
    vae_module.check(vae)
    return vae


def unet_to_diffusers(unet: UNet, text_width: int) -> dict[str, Any]:
    """config.json of a UNet2DConditionModel; ValueError for a UNet that diffusers does not have."""
    _check_for_diffusers(unet.channel_mult, "unet")
    if unet.norm_groups != 32:
        raise ValueError(
            f"unet.norm_groups is {unet.norm_groups}: diffusers has one number of groups for "
            "residual blocks and transformers, which have 32. Write a .safetensors file instead"
        )
    widths = [unet.width * m for m in unet.channel_mult]
    heads = [unet.num_heads or width // unet.head_dim for width in widths]
    blocks = blocks_per_level(unet.num_res_blocks, len(unet.channel_mult))
    if len(set(blocks)) > 1:
        raise ValueError(f"unet.num_res_blocks is {blocks}: diffusers has one number for all")
    attends = [level in unet.attention_levels for level in range(len(widths))]
    return {
        "_class_name": "UNet2DConditionModel",
        "act_fn": "silu",
        "attention_head_dim": unet.num_heads or heads,
        "block_out_channels": widths,
        "center_input_sample": False,
        "cross_attention_dim": text_width,
        "down_block_types": ["CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attends],
        "downsample_padding": 1,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "in_channels": unet.in_channels,
        "layers_per_block": blocks[0],
        "mid_block_scale_factor": 1,
        "norm_eps": 1e-5,
        "norm_num_groups": 32,
        "out_channels": unet.out_channels,
        "transformer_layers_per_block": unet.transformer_depth,
        "up_block_types": ["CrossAttnUpBlock2D" if a else "UpBlock2D" for a in attends[::-1]],
        "use_linear_projection": unet.linear_projections,
    }


def vae_to_diffusers(vae: VAE) -> dict[str, Any]:
    """config.json of an AutoencoderKL; ValueError for a VAE that diffusers does not have."""
    _check_for_diffusers(vae.channel_mult, "vae")
    levels = len(vae.channel_mult)
    return {
        "_class_name": "AutoencoderKL",
        "act_fn": "silu",
        "block_out_channels": [vae.width * m for m in vae.channel_mult],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "in_channels": vae.image_channels,
        "latent_channels": vae.latent_channels,
        "layers_per_block": vae.num_res_blocks,
        "norm_num_groups": 32,
        "out_channels": vae.image_channels,
        "sample_size": 512,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
    }


def unet_from_weights(state: StateDict, norm_groups: int = 32) -> UNet:
    """The UNet of arrays under LDM's or NeMo's names, where no config says it.

    Arrays do not show heads and groups: linear projections mean heads 64 wide (2.x), 1x1
    convolutions 8 heads (1.x), and groups are as given.
    """
    width = state["input_blocks.0.0.weight"].shape[0]
    mult, blocks, levels, at, open_level = [], [], [], 1, True
    while any(name.startswith(f"input_blocks.{at}.") for name in state):
        emb = state.get(f"input_blocks.{at}.0.emb_layers.1.weight")
        if emb is None:
            open_level = True  # A convolution that halves.
        else:
            if open_level:
                mult.append(emb.shape[0] // width)
                blocks.append(0)
                open_level = False
            blocks[-1] += 1
            if f"input_blocks.{at}.1.norm.weight" in state and len(mult) - 1 not in levels:
                levels.append(len(mult) - 1)
        at += 1
    block = re.compile(r"middle_block\.1\.transformer_blocks\.(\d+)\.")
    depth = 1 + max(int(m[1]) for m in map(block.match, state) if m)
    linear = state["middle_block.1.proj_in.weight"].ndim == 2
    unet = UNet(
        width=width,
        channel_mult=tuple(mult),
        num_res_blocks=blocks[0] if len(set(blocks)) == 1 else tuple(blocks),
        attention_levels=tuple(levels),
        transformer_depth=depth,
        num_heads=0 if linear else 8,
        head_dim=64,
        linear_projections=linear,
        norm_groups=norm_groups,
        in_channels=state["input_blocks.0.0.weight"].shape[1],
        out_channels=_out_channels(state),
    )
    unet_module.check(unet)
    return unet


def vae_from_weights(state: StateDict) -> VAE:
    """The VAE of arrays under LDM's names, where no config says it."""
    width = state["encoder.conv_in.weight"].shape[0]
    levels = _count(r"encoder\.down\.(\d+)\.", state)
    outs = [state[f"encoder.down.{i}.block.0.conv1.weight"].shape[0] for i in range(levels)]
    vae = VAE(
        width=width,
        channel_mult=tuple(out // width for out in outs),
        num_res_blocks=_count(r"encoder\.down\.0\.block\.(\d+)\.", state),
        latent_channels=state["post_quant_conv.weight"].shape[0],
        image_channels=state["encoder.conv_in.weight"].shape[1],
    )
    vae_module.check(vae)
    return vae


def _out_channels(state: StateDict) -> int:
    return state["out.2.weight" if "out.2.weight" in state else "out.1.weight"].shape[0]


def _count(pattern: str, state: StateDict) -> int:
    """One more than the largest number that the names have in this place."""
    matches = (re.match(pattern, name) for name in state)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def _heads(widths: Sequence[int], heads: int | Sequence[int]) -> tuple[int, int]:
    """(num_heads, head_dim); head_dim is used where num_heads is 0."""
    if isinstance(heads, int):
        return heads, 64
    dims = {width / n for width, n in zip(widths, heads, strict=True)}
    if len(dims) == 1 and (dim := dims.pop()) == int(dim):
        return 0, int(dim)
    if len(set(heads)) == 1:
        return heads[0], 64
    raise ValueError(
        f"attention_head_dim is {list(heads)} where block_out_channels is {list(widths)}: heads "
        "here are equal in number, or in width, in all levels"
    )


def _multiples(widths: Sequence[int]) -> tuple[int, ...]:
    if any(width % widths[0] for width in widths):
        raise ValueError(
            f"block_out_channels is {list(widths)}: they must be multiples of the first"
        )
    return tuple(width // widths[0] for width in widths)


def _check_for_diffusers(mult: Sequence[int], group: str) -> None:
    if mult[0] != 1:
        raise ValueError(
            f"{group}.channel_mult is {tuple(mult)}: in diffusers the first level is as wide as "
            "the first convolution. Write a .safetensors file instead"
        )


def _need(config: Config, names: Sequence[str], what: str) -> None:
    missing = [name for name in names if name not in config]
    if missing:
        there = ", ".join(map(str, config)) or "nothing"
        raise ValueError(f"the {what}'s config lacks {', '.join(missing)}: it holds {there}")


def _only(config: Config, options: Mapping[str, Sequence[Any]]) -> None:
    for name, values in options.items():
        if name in config and config[name] not in values:
            raise ValueError(
                f"the config's {name} is {config[name]!r}, and only {values[0]!r} is built here"
            )


def _one_number(value: Any, name: str) -> int:
    values = {value} if isinstance(value, int) else set(value)
    if len(values) != 1:
        raise ValueError(f"{name} is {value}: all levels here have the same depth")
    return values.pop()


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    ints = tuple(int(value) for value in values)
    if any(float(value) != whole for value, whole in zip(values, ints, strict=True)):
        raise ValueError(f"the config holds {list(values)}, where whole numbers are expected")
    return ints
