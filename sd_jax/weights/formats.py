"""Model configs of LDM, NeMo and diffusers, read and written; and what weights alone tell.

LDM's fields are those of openaimodel.UNetModel; NeMo's are the same with a few more. Each family
has a table of its names for our fields, and of the options that it has for other models.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diffusion_jax.nn.layers import blocks_per_level
from diffusion_jax.weights.torch_weights import StateDict
from sd_jax import unet as unet_module
from sd_jax import vae as vae_module
from sd_jax.unet import UNet
from sd_jax.vae import VAE

Config = Mapping[str, Any]


class _Family(NamedTuple):
    """How a family's configs describe a network."""

    what: str
    needed: Sequence[str]
    """Fields without a default."""
    fields: Mapping[str, tuple[str, Any]]
    """Ours: theirs of the same value, and its default there."""
    only: Config
    """Options of other models of the family, with the one value that Stable Diffusion has."""


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
        "image_channels": ("in_channels", 3),
    },
    only={
        "_class_name": "AutoencoderKL",
        "act_fn": "silu",
        "norm_num_groups": 32,
        "mid_block_add_attention": True,
        "use_quant_conv": True,
        "use_post_quant_conv": True,
        "shift_factor": None,
        "latents_mean": None,
        "latents_std": None,
    },
)


def unet_from_ldm(config: Config, norm_groups: int | None = None) -> UNet:
    """The UNet of an LDM or NeMo config; ValueError if it asks for what is not here.

    `norm_groups` where the config does not say (NeMo's does, as resblock_gn_groups).
    """
    fields = _read(config, _LDM_UNET)
    factors = _ints(config["attention_resolutions"])
    by_width = config.get("num_head_channels", -1) not in (-1, None)
    unet = UNet(
        **fields,
        attention_levels=tuple(i for i in range(len(fields["channel_mult"])) if 2**i in factors),
        num_heads=0 if by_width else config.get("num_heads", 8),
        head_dim=config["num_head_channels"] if by_width else 64,
        norm_groups=norm_groups
        or config.get("resblock_gn_groups")
        or config.get("norm_groups")
        or 32,
    )
    unet_module.check(unet)
    return unet


def unet_to_ldm(unet: UNet, text_width: int) -> dict[str, Any]:
    """The fields of LDM's openaimodel.UNetModel, of which `unet_from_ldm` gives the same UNet."""
    return _written(unet, _LDM_UNET) | {
        "attention_resolutions": [2**level for level in unet.attention_levels],
        "num_heads": unet.num_heads or -1,
        "num_head_channels": -1 if unet.num_heads else unet.head_dim,
        "resblock_gn_groups": unet.norm_groups,
        "context_dim": text_width,
    }


def unet_from_diffusers(config: Config) -> UNet:
    """The UNet of a diffusers UNet2DConditionModel's config; ValueError as for LDM's."""
    fields = _read(config, _DIFFUSERS_UNET)
    widths, kinds = _ints(config["block_out_channels"]), list(config["down_block_types"])
    known = ("CrossAttnDownBlock2D", "DownBlock2D")
    if any(kind not in known for kind in kinds):
        raise ValueError(f"down_block_types holds {kinds}: known are {', '.join(known)}")
    mirrored = [kind.replace("Down", "Up") for kind in kinds[::-1]]
    check_only(config, {"up_block_types": mirrored})
    # diffusers calls the number of heads their width, one number or one a level.
    heads = config.get("num_attention_heads") or config.get("attention_head_dim", 8)
    num_heads, head_dim = _heads(widths, heads)
    levels = tuple(level for level, kind in enumerate(kinds) if kind == known[0])
    unet = UNet(
        **fields, **_widths(widths), attention_levels=levels, num_heads=num_heads, head_dim=head_dim
    )
    unet_module.check(unet)
    return unet


def latent_size(config: Config) -> int:
    """The side of the latents that a diffusers UNet's config states, 64 if it states none."""
    size = config.get("sample_size") or 64
    sides = {size} if isinstance(size, int) else set(size)
    if len(sides) > 1:
        raise ValueError(f"sample_size is {size}: models here are of square images")
    return sides.pop()


def vae_from_diffusers(config: Config) -> VAE:
    """The VAE of a diffusers AutoencoderKL's config; ValueError as for the UNet."""
    fields = _read(config, _DIFFUSERS_VAE)
    vae = VAE(**fields, **_widths(_ints(config["block_out_channels"])))
    vae_module.check(vae)
    return vae


def unet_to_diffusers(unet: UNet, text_width: int) -> dict[str, Any]:
    """config.json of a UNet2DConditionModel; ValueError for a UNet that diffusers does not have."""
    widths = _diffusers_widths(unet.width, unet.channel_mult, "unet")
    if unet.norm_groups != 32:
        raise ValueError(
            f"unet.norm_groups is {unet.norm_groups}: diffusers has one number of groups for "
            "residual blocks and transformers, which have 32. Write a .safetensors file instead"
        )
    blocks = blocks_per_level(unet.num_res_blocks, len(unet.channel_mult))
    if len(set(blocks)) > 1:
        raise ValueError(f"unet.num_res_blocks is {blocks}: diffusers has one number for all")
    attends = [level in unet.attention_levels for level in range(len(widths))]
    return _written(unet.clone(num_res_blocks=blocks[0]), _DIFFUSERS_UNET) | {
        "attention_head_dim": unet.num_heads or [width // unet.head_dim for width in widths],
        "block_out_channels": widths,
        "cross_attention_dim": text_width,
        "down_block_types": ["CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attends],
        "up_block_types": ["CrossAttnUpBlock2D" if a else "UpBlock2D" for a in attends[::-1]],
    }


def vae_to_diffusers(vae: VAE) -> dict[str, Any]:
    """config.json of an AutoencoderKL; ValueError for a VAE that diffusers does not have."""
    widths = _diffusers_widths(vae.width, vae.channel_mult, "vae")
    return _written(vae, _DIFFUSERS_VAE) | {
        "block_out_channels": widths,
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "out_channels": vae.image_channels,
        "sample_size": 512,
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
    }


def unet_from_weights(
    state: StateDict, norm_groups: int = 32, heads: tuple[int, int] | None = None
) -> UNet:
    """The UNet of arrays under LDM's or NeMo's names, where no config says it.

    Arrays do not show groups and heads: they are as given. Without `heads`, (num_heads, head_dim),
    linear projections mean heads 64 wide (2.x), 1x1 convolutions 8 heads (1.x).
    """
    first = state["input_blocks.0.0.weight"]
    at = range(1, _count(r"input_blocks\.(\d+)\.", state))
    outs = {i: state.get(f"input_blocks.{i}.0.emb_layers.1.bias", ()) for i in at}
    # A level's residual blocks follow each other; convolutions that halve part the levels.
    runs = itertools.groupby(at, lambda i: len(outs[i]) > 0)
    levels = [list(run) for is_res, run in runs if is_res]
    attends = lambda level: f"input_blocks.{level[0]}.1.norm.weight" in state
    blocks = [len(level) for level in levels]
    linear = state["middle_block.1.proj_in.weight"].ndim == 2
    num_heads, head_dim = heads or (0 if linear else 8, 64)
    return UNet(
        width=first.shape[0],
        channel_mult=tuple(len(outs[level[0]]) // first.shape[0] for level in levels),
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
    """Whether a UNet has the size of Stable Diffusion 1.x and 2.x, whose heads are known."""
    shown = ("width", "channel_mult", "num_res_blocks", "attention_levels", "transformer_depth")
    return all(getattr(unet, field) == getattr(UNet, field) for field in shown)


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


def check_only(config: Config, options: Config) -> None:
    """ValueError where a config has another value of an option than the one that is built here."""
    for name, value in options.items():
        there = config.get(name, value)
        if (list(there) if isinstance(there, tuple) else there) != value:
            raise ValueError(f"the config's {name} is {there!r}, and only {value!r} is built here")


def _read(config: Config, family: _Family) -> dict[str, Any]:
    """The fields that a config states in a family's names; ValueError for another model's."""
    missing = [name for name in family.needed if name not in config]
    if missing:
        there = ", ".join(map(str, config)) or "nothing"
        raise ValueError(f"the {family.what}'s config lacks {', '.join(missing)}: it holds {there}")
    check_only(config, family.only)
    values = {ours: config.get(*theirs) for ours, theirs in family.fields.items()}
    depth = values.get("transformer_depth", 1)
    if not isinstance(depth, int):
        if len(set(depth)) != 1:
            name, _ = family.fields["transformer_depth"]
            raise ValueError(f"{name} is {depth}: all levels here have the same depth")
        values["transformer_depth"] = depth[0]
    return {k: _ints(v) if isinstance(v, Sequence) else v for k, v in values.items()}


def _written(network: UNet | VAE, family: _Family) -> dict[str, Any]:
    """The fields of a network in a family's names, and its options for other models."""
    fields = {theirs: getattr(network, ours) for ours, (theirs, _) in family.fields.items()}
    return {**family.only, **fields}


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


def _widths(widths: Sequence[int]) -> dict[str, Any]:
    """diffusers' widths of the levels as the first one's and multiples of it."""
    if any(width % widths[0] for width in widths):
        raise ValueError(
            f"block_out_channels is {list(widths)}: they must be multiples of the first"
        )
    return {"width": widths[0], "channel_mult": tuple(width // widths[0] for width in widths)}


def _diffusers_widths(width: int, mult: Sequence[int], group: str) -> list[int]:
    if mult[0] != 1:
        raise ValueError(
            f"{group}.channel_mult is {tuple(mult)}: in diffusers the first level is as wide as "
            "the first convolution. Write a .safetensors file instead"
        )
    return [width * m for m in mult]


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    ints = tuple(int(value) for value in values)
    if any(float(value) != whole for value, whole in zip(values, ints, strict=True)):
        raise ValueError(f"the config holds {list(values)}, where whole numbers are expected")
    return ints
