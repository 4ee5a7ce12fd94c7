"""Convert UNet and VAE configs from and to LDM, NeMo and diffusers, or infer them from weights.

LDM's fields are the arguments of openaimodel.UNetModel. NeMo has LDM's fields and a few more. Each
config format has a table that maps this project's field names to the format's names. The table also
lists the format's options that must have the value that Stable Diffusion uses.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diffusion_jax.nn.layers import blocks_per_level
from diffusion_jax.weights.torch_weights import StateDict
from sd_jax import unet as unet_module
from sd_jax import vae as vae_module
from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import names

Config = Mapping[str, Any]


class _Family(NamedTuple):
    """A config format for one kind of network, such as a diffusers UNet."""

    name: str
    """Name of the format in messages, such as "LDM UNet"."""
    needed: Sequence[str]
    """Fields that a config must contain, because they have no default."""
    fields: Mapping[str, tuple[str, Any]]
    """Maps a field of this project's network to (name, default) in the format."""
    only: Config
    """Maps further options of the format to their only supported value, Stable Diffusion's."""


_LDM_UNET = _Family(
    "LDM UNet",
    needed=("model_channels", "attention_resolutions"),
    fields={
        "width": ("model_channels", None),
        "channel_mult": ("channel_mult", (1, 2, 4, 8)),
        "num_res_blocks": ("num_res_blocks", 2),
        "transformer_depth": ("transformer_depth", 1),
        "linear_projections": ("use_linear_in_transformer", False),
        "in_channels": ("in_channels", 4),
        "out_channels": ("out_channels", 4),
    },
    only={
        "use_spatial_transformer": True,
        "use_scale_shift_norm": False,
        "resblock_updown": False,
        "conv_resample": True,
        "dims": 2,
        "num_classes": None,
        "n_embed": None,
    },
)
_DIFFUSERS_UNET = _Family(
    "diffusers UNet",
    needed=("block_out_channels", "down_block_types"),
    fields={
        "num_res_blocks": ("layers_per_block", 2),
        "transformer_depth": ("transformer_layers_per_block", 1),
        "linear_projections": ("use_linear_projection", False),
        "in_channels": ("in_channels", 4),
        "out_channels": ("out_channels", 4),
    },
    only={
        "_class_name": "UNet2DConditionModel",
        "act_fn": "silu",
        "center_input_sample": False,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "downsample_padding": 1,
        "norm_num_groups": 32,
        "norm_eps": 1e-5,
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "mid_block_scale_factor": 1,
        "class_embed_type": None,
        "addition_embed_type": None,
        "dual_cross_attention": False,
        "only_cross_attention": False,
        "resnet_time_scale_shift": "default",
        "resnet_skip_time_act": False,
        "resnet_out_scale_factor": 1.0,
        "time_embedding_type": "positional",
        "time_embedding_dim": None,
        "time_embedding_act_fn": None,
        "timestep_post_act": None,
        "time_cond_proj_dim": None,
        "conv_in_kernel": 3,
        "conv_out_kernel": 3,
        "attention_type": "default",
        "cross_attention_norm": None,
        "encoder_hid_dim": None,
        "encoder_hid_dim_type": None,
    },
)
_DIFFUSERS_VAE = _Family(
    "diffusers VAE",
    needed=("block_out_channels",),
    fields={
        "num_res_blocks": ("layers_per_block", 1),
        "latent_channels": ("latent_channels", 4),
        "mid_attention": ("mid_block_add_attention", True),
        "quant_conv": ("use_quant_conv", True),
    },
    only={
        "_class_name": "AutoencoderKL",
        "in_channels": 3,
        "out_channels": 3,
        "act_fn": "silu",
        "norm_num_groups": 32,
        "latents_mean": None,
        "latents_std": None,
    },
)


def unet_from_ldm(config: Config, norm_groups: int | None = None) -> UNet:
    """Build the UNet of an LDM or NeMo config. Raises ValueError for unsupported options.

    `norm_groups` is the number of groups in the norms of residual blocks. None means the value in
    the config (NeMo's resblock_gn_groups), or 32 if there is none.
    """
    fields = _read(config, _LDM_UNET)
    factors = _ints("attention_resolutions", config["attention_resolutions"])
    by_width = config.get("num_head_channels", -1) not in (-1, None)
    unet = UNet(
        **fields,
        attention_levels=tuple(i for i in range(len(fields["channel_mult"])) if 2**i in factors),
        num_heads=0 if by_width else config.get("num_heads", 8),
        head_dim=config["num_head_channels"] if by_width else 64,
        norm_groups=norm_groups or config.get("resblock_gn_groups") or config.get("norm_groups") or 32,
    )
    unet_module.check(unet)
    return unet


def unet_to_ldm(unet: UNet, text_width: int) -> dict[str, Any]:
    """Convert a UNet to the fields of LDM's openaimodel.UNetModel, the inverse of `unet_from_ldm`.

    `text_width` is the width of the text embeddings that the UNet attends to.
    """
    return _written(unet, _LDM_UNET) | {
        "attention_resolutions": [2**level for level in unet.attention_levels],
        "num_heads": unet.num_heads or -1,
        "num_head_channels": -1 if unet.num_heads else unet.head_dim,
        "resblock_gn_groups": unet.norm_groups,
        "context_dim": text_width,
    }


def unet_from_diffusers(config: Config) -> UNet:
    """Build the UNet of a diffusers UNet2DConditionModel config.

    Raises ValueError for unsupported options.
    """
    fields = _read(config, _DIFFUSERS_UNET)
    widths = _ints("block_out_channels", config["block_out_channels"])
    kinds = list(config["down_block_types"])
    valid_kinds = ("CrossAttnDownBlock2D", "DownBlock2D")
    if any(kind not in valid_kinds for kind in kinds):
        raise ValueError(
            f"the config's down_block_types is {kinds}, but only {' and '.join(valid_kinds)} are supported"
        )
    mirrored = [kind.replace("Down", "Up") for kind in kinds[::-1]]
    check_only(config, {"up_block_types": mirrored})
    # diffusers' attention_head_dim is the number of heads: one for all levels, or one per level.
    heads = config.get("num_attention_heads") or config.get("attention_head_dim", 8)
    num_heads, head_dim = _heads(widths, heads)
    levels = tuple(level for level, kind in enumerate(kinds) if kind == valid_kinds[0])
    unet = UNet(**fields, **_widths(widths), attention_levels=levels, num_heads=num_heads, head_dim=head_dim)
    unet_module.check(unet)
    return unet


def latent_size(config: Config) -> int:
    """Return the side of the latents in a diffusers UNet config: `sample_size`, or 64 without it.

    Raises ValueError if the latents are not square.
    """
    size = config.get("sample_size") or 64
    sides = {size} if isinstance(size, int) else set(size)
    if len(sides) > 1:
        raise ValueError(f"the config's sample_size is {size}, but only square images are supported")
    return sides.pop()


def vae_from_diffusers(config: Config) -> VAE:
    """Build the VAE of a diffusers AutoencoderKL config.

    Raises ValueError for unsupported options.
    """
    fields = _read(config, _DIFFUSERS_VAE)
    check_only(config, {"use_post_quant_conv": fields["quant_conv"]})
    widths = _widths(_ints("block_out_channels", config["block_out_channels"]))
    kinds = config.get("down_block_types", ())
    levels = tuple(level for level, kind in enumerate(kinds) if kind.startswith("Attn"))
    check_only(config, _vae_blocks(levels, len(kinds)))
    vae = VAE(**fields, **widths, attention_levels=levels)
    vae_module.check(vae)
    return vae


def unet_to_diffusers(unet: UNet, text_width: int) -> dict[str, Any]:
    """Convert a UNet to the config.json of diffusers' UNet2DConditionModel.

    `text_width` is the width of the text embeddings that the UNet attends to. Raises ValueError if
    diffusers cannot express the UNet.
    """
    widths = _diffusers_widths(unet.width, unet.channel_mult, "unet")
    if unet.norm_groups != 32:
        raise ValueError(
            f"unet.norm_groups is {unet.norm_groups}, but diffusers needs 32, the number of groups "
            "in transformers: convert to a .safetensors file instead"
        )
    blocks = blocks_per_level(unet.num_res_blocks, len(unet.channel_mult))
    if len(set(blocks)) > 1:
        raise ValueError(
            f"unet.num_res_blocks is {blocks}, but diffusers needs the same number at all levels: "
            "convert to a .safetensors file instead"
        )
    attends = [level in unet.attention_levels for level in range(len(widths))]
    return _written(unet.clone(num_res_blocks=blocks[0]), _DIFFUSERS_UNET) | {
        "attention_head_dim": unet.num_heads or [width // unet.head_dim for width in widths],
        "block_out_channels": widths,
        "cross_attention_dim": text_width,
        "down_block_types": ["CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attends],
        "up_block_types": ["CrossAttnUpBlock2D" if a else "UpBlock2D" for a in attends[::-1]],
    }


def vae_to_diffusers(vae: VAE) -> dict[str, Any]:
    """Convert a VAE to the config.json of diffusers' AutoencoderKL.

    Raises ValueError if diffusers cannot express the VAE.
    """
    widths = _diffusers_widths(vae.width, vae.channel_mult, "vae")
    return _written(vae, _DIFFUSERS_VAE) | {
        "block_out_channels": widths,
        "sample_size": 512,
        "use_post_quant_conv": vae.quant_conv,
        **_vae_blocks(vae.attention_levels, len(widths)),
    }


def unet_from_weights(state: StateDict, norm_groups: int = 32, heads: tuple[int, int] | None = None) -> UNet:
    """Infer the UNet from the shapes of arrays with LDM's or NeMo's names.

    Shapes do not show the numbers of norm groups and attention heads, so these are arguments.
    `heads` is (num_heads, head_dim). If it is None, a UNet with linear projections (as in Stable
    Diffusion 2.x) gets heads of width 64, and a UNet with 1x1 convolutions (1.x) gets 8 heads.
    """
    first = _need(state, "input_blocks.0.0.weight", 4)
    _need(state, "input_blocks.1.0.emb_layers.1.bias", 1)
    indices = range(1, _count(r"input_blocks\.(\d+)\.", state))
    biases = {i: state.get(f"input_blocks.{i}.0.emb_layers.1.bias", ()) for i in indices}
    # The residual blocks of a level are consecutive; downsampling convolutions separate the levels.
    groups = itertools.groupby(indices, lambda i: len(biases[i]) > 0)
    levels = [list(group) for is_res, group in groups if is_res]
    attends = lambda level: f"input_blocks.{level[0]}.1.norm.weight" in state
    blocks = [len(level) for level in levels]
    linear = _need(state, "middle_block.1.proj_in.weight", 2, 4).ndim == 2
    num_heads, head_dim = heads or (0 if linear else 8, 64)
    return UNet(
        width=first.shape[0],
        channel_mult=tuple(len(biases[level[0]]) // first.shape[0] for level in levels),
        num_res_blocks=blocks[0] if len(set(blocks)) == 1 else tuple(blocks),
        attention_levels=tuple(i for i, level in enumerate(levels) if attends(level)),
        transformer_depth=_count(r"middle_block\.1\.transformer_blocks\.(\d+)\.", state),
        num_heads=num_heads,
        head_dim=head_dim,
        linear_projections=linear,
        norm_groups=norm_groups,
        in_channels=first.shape[1],
        out_channels=state["out.2.weight" if "out.2.weight" in state else "out.1.weight"].shape[0],
    )


def is_published(unet: UNet) -> bool:
    """Return whether a UNet has the widths and levels of Stable Diffusion 1.x and 2.x."""
    sizes = ("width", "channel_mult", "num_res_blocks", "attention_levels", "transformer_depth")
    return all(getattr(unet, field) == getattr(UNet, field) for field in sizes)


def vae_from_weights(state: StateDict) -> VAE:
    """Infer the VAE from the shapes of arrays with LDM's or diffusers' names.

    Raises ValueError if they are not those of an autoencoder.
    """
    if names.vae_dialect(state) == "diffusers":
        down, block, attends, mid = "down_blocks", "resnets", "attentions", "mid_block.attentions"
    else:
        down, block, attends, mid = "down", "block", "attn", "mid.attn_1"
    has = lambda place: any(name.startswith(f"encoder.{place}") for name in state)
    width = len(_need(state, "encoder.conv_in.weight", 4))
    level = lambda i: f"encoder.{down}.{i}.{block}.0.conv1.weight"
    levels = max(1, _count(rf"encoder\.{down}\.(\d+)\.", state))
    vae = VAE(
        width=width,
        channel_mult=tuple(len(_need(state, level(i), 4)) // width for i in range(levels)),
        num_res_blocks=_count(rf"encoder\.{down}\.0\.{block}\.(\d+)\.", state),
        latent_channels=_need(state, "decoder.conv_in.weight", 4).shape[1],
        attention_levels=tuple(i for i in range(levels) if has(f"{down}.{i}.{attends}.")),
        mid_attention=has(f"{mid}."),
        quant_conv="quant_conv.weight" in state,
    )
    vae_module.check(vae)
    return vae


def check_only(config: Config, options: Config) -> None:
    """Raise ValueError if an option in `options` has a different value in `config`.

    Options that `config` lacks are accepted.
    """
    for name, supported in options.items():
        value = config.get(name, supported)
        if (list(value) if isinstance(value, tuple) else value) != supported:
            raise ValueError(f"the config's {name} is {value!r}, but only {supported!r} is supported")


def _read(config: Config, family: _Family) -> dict[str, Any]:
    """Translate a config in the format `family` (such as a diffusers UNet) to our field names.

    Raises ValueError if a needed field is missing, or if an option has an unsupported value.
    """
    missing = [name for name in family.needed if name not in config]
    if missing:
        has = f"only {', '.join(map(str, config))}" if config else "no fields"
        raise ValueError(f"the {family.name}'s config lacks {', '.join(missing)}: it has {has}")
    check_only(config, family.only)
    values = {ours: config.get(*theirs) for ours, theirs in family.fields.items()}
    depth = values.get("transformer_depth", 1)
    if not isinstance(depth, int):
        if len(set(depth)) != 1:
            name, _ = family.fields["transformer_depth"]
            raise ValueError(f"the config's {name} is {depth}, but only one number for all levels is supported")
        values["transformer_depth"] = depth[0]
    names = {ours: theirs for ours, (theirs, _) in family.fields.items()}
    return {k: _ints(names[k], v) if isinstance(v, Sequence) else v for k, v in values.items()}


def _written(network: UNet | VAE, family: _Family) -> dict[str, Any]:
    """Translate the fields of a network to a config in the format `family`; inverse of `_read`."""
    fields = {theirs: getattr(network, ours) for ours, (theirs, _) in family.fields.items()}
    return {**family.only, **fields}


def _vae_blocks(attention_levels: Sequence[int], levels: int) -> dict[str, Any]:
    """Return the kinds of blocks in diffusers' config of a VAE; `up_block_types` is reversed."""
    attn = ["Attn" * (level in attention_levels) for level in range(levels)]
    return {
        "down_block_types": [f"{prefix}DownEncoderBlock2D" for prefix in attn],
        "up_block_types": [f"{prefix}UpDecoderBlock2D" for prefix in attn[::-1]],
    }


def _need(state: StateDict, name: str, *ndims: int) -> np.ndarray:
    """Return an array. Raises ValueError if it is missing or empty, or has another ndim."""
    array = state.get(name)
    if array is None or array.ndim not in ndims or not array.size:
        found = "it is missing" if array is None else f"it has the shape {array.shape}"
        raise ValueError(f"these weights are not Stable Diffusion's, because of {name}: {found}")
    return array


def _count(pattern: str, state: StateDict) -> int:
    """Return 1 + the largest number that `pattern` captures in array names; 0 without a match."""
    matches = (re.match(pattern, name) for name in state)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def _heads(widths: Sequence[int], heads: int | Sequence[int]) -> tuple[int, int]:
    """Return (num_heads, head_dim) of a UNet whose levels have the widths `widths`.

    `heads` is the number of heads, one for all levels or one per level. If the returned num_heads
    is not 0, head_dim has no effect.
    """
    if isinstance(heads, int):
        return heads, 64
    dims = {width / n for width, n in zip(widths, heads, strict=True)}
    if len(dims) == 1 and (dim := dims.pop()) == int(dim):
        return 0, int(dim)
    if len(set(heads)) == 1:
        return heads[0], 64
    raise ValueError(
        f"the config has attention_head_dim {list(heads)} and block_out_channels {list(widths)}, "
        "but all levels must have the same number of heads, or heads of the same width"
    )


def _widths(widths: Sequence[int]) -> dict[str, Any]:
    """Convert the widths of the levels to the fields `width` and `channel_mult` of a network."""
    if any(width % widths[0] for width in widths):
        raise ValueError(
            f"the config's block_out_channels is {list(widths)}, but only multiples of the first number are supported"
        )
    return {"width": widths[0], "channel_mult": tuple(width // widths[0] for width in widths)}


def _diffusers_widths(width: int, mult: Sequence[int], group: str) -> list[int]:
    if mult[0] != 1:
        raise ValueError(
            f"{group}.channel_mult is {tuple(mult)}, but in diffusers the first level is as wide "
            "as the first convolution: convert to a .safetensors file instead"
        )
    return [width * m for m in mult]


def _ints(name: str, values: Sequence[Any]) -> tuple[int, ...]:
    ints = tuple(int(value) for value in values)
    if any(float(value) != integer for value, integer in zip(values, ints, strict=True)):
        raise ValueError(f"the config's {name} is {list(values)}: it must hold integers")
    return ints
