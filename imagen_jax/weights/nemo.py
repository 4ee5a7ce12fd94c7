"""Convert weights to and from NeMo's names and layouts, and build networks from NeMo's configs.

NeMo's `unet_type` is "base" or "sr-unet" for UNet and "sr" for EfficientUNet.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from diffusion_jax.config.picture_fields import Field
from diffusion_jax.nn import picture_fields
from diffusion_jax.nn.layers import blocks_per_level
from diffusion_jax.weights import guided_diffusion, torch_weights
from diffusion_jax.weights.torch_weights import (
    CONV1D_1,
    CONV2D_1,
    CONV_TRANSPOSE,
    LINEAR,
    Entry,
    Layout,
    NameRules,
    StateDict,
)
from imagen_jax import efficient_unet
from imagen_jax import unet as unet_module
from imagen_jax.conditioning import example_inputs
from imagen_jax.efficient_unet import EfficientUNet
from imagen_jax.magnitude_unet import MagnitudeUNet
from imagen_jax.transformer import Transformer
from imagen_jax.unet import UNet, attends

NemoNetwork = UNet | EfficientUNet | MagnitudeUNet | Transformer
PREFIX = "model.model.unet."
"""Prefix of the UNet's arrays in a NeMo checkpoint."""


def table(params: Any, unet: UNet | EfficientUNet) -> list[Entry]:
    """Return an entry with NeMo's name and layout for every array of `params`.

    Only the paths and shapes in `params` matter, so its leaves may be abstract.
    """
    return torch_weights.table(params, _name_of(unet), _layouts(unet))


def from_nemo(state: StateDict, unet: UNet | EfficientUNet, text_width: int) -> Any:
    """Convert a NeMo state dict to params of `unet`, for text embeddings of width `text_width`.

    The prefixes that NeMo adds to names are optional. Raises ValueError if arrays are missing or
    unknown or have other shapes; the message lists their names.
    """
    # Remove the prefixes of NeMo's wrappers and of torch.compile.
    arrays = {name.replace("_orig_mod.", "").rpartition("unet.")[2]: np.asarray(array) for name, array in state.items()}
    if len(arrays) < len(state):
        raise ValueError(
            f"the file has {len(state)} arrays, but without prefixes such as 'model.model.unet.' "
            f"only {len(arrays)} of their names are different: it may hold two models, such as raw "
            "and averaged weights. Convert a file with only one model"
        )
    state = arrays
    for part in ("weight", "bias"):  # NeMo registers this layer under two names.
        alias = state.pop(f"input_blocks.0.0.{part}", None)
        if alias is not None and not np.array_equal(alias, state.get(f"init_conv.0.{part}", alias)):
            raise ValueError(
                f"input_blocks.0.0.{part} and init_conv.0.{part} differ, but NeMo stores the same "
                "array under both names: the file is damaged or not NeMo's"
            )
        if alias is not None:
            state.setdefault(f"init_conv.0.{part}", alias)
    abstract = abstract_params(unet, text_width)
    return torch_weights.to_params(state, table(abstract, unet), abstract)


def to_nemo(params: Any, unet: UNet | EfficientUNet) -> dict[str, np.ndarray]:
    """Convert the parameters of `unet` to a NeMo state dict, with names without prefixes.

    The first layer of a UNet occurs twice in the state dict, because NeMo has two names for it.
    """
    state = torch_weights.to_state_dict(params, table(params, unet))
    if isinstance(unet, UNet):
        for part in ("weight", "bias"):
            state[f"input_blocks.0.0.{part}"] = state[f"init_conv.0.{part}"]
    return state


def require_nemo(unet: NemoNetwork) -> UNet | EfficientUNet:
    """Return `unet` if NeMo has networks of its kind. Raises ValueError otherwise."""
    if isinstance(unet, MagnitudeUNet | Transformer):
        raise ValueError(
            f"NeMo has no {type(unet).__name__}: only models whose unet.kind is 'unet' or 'efficient' can be converted"
        )
    return unet


def abstract_params(unet: NemoNetwork, text_width: int, named: Sequence[Field] = ()) -> Any:
    """Return the parameters of a network as shapes and types, without computing them.

    `text_width` is the width of the text embeddings, and `named` holds the fields that
    the network sees.
    """
    inputs: dict[str, Any] = example_inputs(unet, text_width) | picture_fields.example(named)
    return jax.eval_shape(lambda: unet.init(jax.random.key(0), **inputs))


def unet_from_config(config: Any) -> UNet | EfficientUNet:
    """Build the network that a NeMo model config describes. Missing fields get NeMo's defaults.

    Only the fields `unet_type`, `unet` and `noise_cond_aug` of the config are read. Raises
    ValueError for a network that this project does not implement or that NeMo itself cannot build.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"NeMo's config is a {type(config).__name__}: it must be a mapping with the key `unet`")
    fields, kind = config.get("unet"), config.get("unet_type", "base")
    if not isinstance(fields, Mapping):
        keys = ", ".join(map(str, config)) or "nothing"
        raise ValueError(f"NeMo's config has no group `unet` with the network's fields: its keys are {keys}")
    if kind not in ("base", "sr-unet", "sr"):
        raise ValueError(f"unet_type in NeMo's config is {kind!r}: it must be 'base', 'sr-unet' or 'sr'")
    missing = [name for name in ("image_size", "embed_dim") if name not in fields]
    if missing:
        raise ValueError(
            f"the group `unet` of NeMo's config lacks {' and '.join(missing)}: add the missing fields to the file"
        )
    if fields.get("channels", 3) != 3:
        raise ValueError(f"unet.channels in NeMo's config is {fields['channels']}, but only 3 is supported")
    noise_aug = bool(config.get("noise_cond_aug") or fields.get("noise_cond_aug", False))
    try:
        if kind == "sr":
            unet = _efficient_unet(fields, noise_aug)
            efficient_unet.check_layers(unet)
        else:
            unet = _unet(fields, fields.get("low_res_cond", kind == "sr-unet"), noise_aug)
            unet_module.check_layers(unet)
    except TypeError as error:
        raise ValueError(f"a value in the group `unet` of NeMo's config has the wrong type: {error}") from error
    return unet


def _unet(fields: Mapping[str, Any], low_res: bool, noise_aug: bool) -> UNet:
    get = lambda name, default: fields.get(name, default)
    blocks = get("num_res_blocks", 3)
    return UNet(
        **_common_fields(fields),
        channel_mult=_ints(get("channel_mult", (1, 2, 3, 4))),
        num_res_blocks=blocks if isinstance(blocks, int) else _ints(blocks),
        attention_resolutions=_ints(get("attention_resolutions", (8, 16, 32))),
        head_dim=get("per_head_channels", 64),
        cond_dim=get("cond_dim", 512),
        resblock_updown=get("resblock_updown", False),
        conv_resample=get("resample_with_conv", True),
        dropout=float(get("dropout", 0.0)),
        low_res=bool(low_res),
        noise_aug=bool(low_res) and noise_aug,
    )


def _efficient_unet(fields: Mapping[str, Any], noise_aug: bool) -> EfficientUNet:
    get = lambda name, default: fields.get(name, default)
    if get("stride", 2) != 2:
        raise ValueError(f"unet.stride in NeMo's config is {fields['stride']}, but only 2 is supported")
    mult = _ints(get("channel_mult", (1, 1, 2, 4, 8)))
    blocks = _ints(get("num_resblocks", (1, 2, 4, 8, 8)))
    attention = get("atnn_enabled_at", (0, 0, 0, 0, 1))
    if min(len(blocks), len(attention)) < len(mult):
        raise ValueError(
            f"in NeMo's config, unet.channel_mult has {len(mult)} levels, but unet.num_resblocks "
            f"has {len(blocks)} entries and unet.atnn_enabled_at has {len(attention)}: each needs "
            "one entry per level"
        )
    by_width = get("per_head_channels", 64) != -1
    return EfficientUNet(
        **_common_fields(fields),
        channel_mult=mult,
        # NeMo always builds the first block of a level, and ignores entries beyond the levels.
        num_res_blocks=tuple(max(count, 1) for count in blocks[: len(mult)]),
        attention_levels=tuple(level for level in range(len(mult)) if attention[level]),
        head_dim=get("per_head_channels", 64) if by_width else 0,
        num_heads=0 if by_width else get("num_attn_heads", 8),
        scale_skips=bool(get("skip_connection_scaling", False)),
        noise_aug=noise_aug,
    )


def _common_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    get = lambda name, default: fields.get(name, default)
    return dict(
        image_size=fields["image_size"],
        embed_dim=fields["embed_dim"],
        attention=get("attention_type", "fused"),
        text_pooling=get("feature_pooling_type", "attention"),
        learned_time_dim=get("learned_sinu_pos_emb_dim", 16),
        null_token=bool(get("use_null_token", False)),
        init_kernel=get("init_conv_kernel_size", 3),
        scale_shift=bool(get("scale_shift_norm", True)),
        remat=bool(get("gradient_checkpointing", False)),
    )


def _name_of(unet: UNet | EfficientUNet) -> Callable[[str], str]:
    """Return a function that maps a layer's path in the parameters of `unet` to NeMo's name."""
    if isinstance(unet, EfficientUNet):
        rules = (*_EFFICIENT_ENDS, *_CONDITIONING)
        return lambda path: _efficient_name(path, (*_EFFICIENT_INSIDE, *_INSIDE), rules)
    levels = len(unet.channel_mult)
    attending = [attends(unet, level) for level in range(levels)]
    blocks = blocks_per_level(unet.num_res_blocks, levels)
    places = guided_diffusion.places(blocks, attending)
    ends, inside = (*_UNET_ENDS, *_CONDITIONING), (*_UNET_INSIDE, *_INSIDE)
    return lambda path: guided_diffusion.layer_name(path, places, ends, inside)


def _efficient_name(path: str, inside: NameRules, ends: NameRules) -> str:
    block, _, layer = path.partition("/")
    place = torch_weights.rename(block, _EFFICIENT_PLACES)
    if place == block:
        return torch_weights.rename(path, ends)
    return f"{place}.{torch_weights.rename(layer, inside)}" if layer else place


_CONDITIONING = (
    ("low_res_time_embed/dense1", "lowres_time_embed.1"),
    ("low_res_time_embed/dense2", "lowres_time_embed.3"),
    ("low_res_time_embed/frequencies", "lowres_time_embed.0.weights"),
    ("time_embed/dense1", "time_embed.1"),
    ("time_embed/dense2", "time_embed.3"),
    ("time_embed/frequencies", "time_embed.0.weights"),
    ("text_pool/score", "attention_pooling.0.W"),
    ("text_pool/norm", "attention_pooling.1"),
    ("text_pool/out", "attention_pooling.2"),
    ("text_embed/norm", "to_text_non_attn_cond.0"),
    ("text_embed/dense1", "to_text_non_attn_cond.1"),
    ("text_embed/dense2", "to_text_non_attn_cond.3"),
    ("null_token", "null_text_embedding"),
)
_UNET_ENDS = (("init_conv", "init_conv.0"), ("out_norm", "out.0"), ("out_conv", "out.2"))
_EFFICIENT_ENDS = (("out_conv", "out"),)
_EFFICIENT_PLACES = (
    (r"down_(\d+)_(\d+)_res", r"DBlocks.\1.blocks.\2"),
    (r"down_(\d+)_attn", r"DBlocks.\1.attention_layer"),
    (r"down_(\d+)_resample", r"DBlocks.\1.conv"),
    (r"up_(\d+)_(\d+)_res", r"UBlocks.\1.blocks.\2"),
    (r"up_(\d+)_attn", r"UBlocks.\1.attention_layer"),
    (r"up_(\d+)_resample", r"UBlocks.\1.conv"),
)
# Names of the layers inside residual blocks (up_h and up_x only in those that resample), and of the
# layers inside all kinds of attention.
_UNET_INSIDE = (("conv2", "out_layers.3"), ("skip", "skip_connection"))
_EFFICIENT_INSIDE = (("conv2", "out_layers.2"), ("skip", "shortcut"))
_INSIDE = (
    ("norm1", "in_layers.0"),
    ("conv1", "in_layers.2"),
    ("emb", "emb_layers.1"),
    ("norm2", "out_layers.0"),
    ("up_h", "h_upd.conv"),
    ("up_x", "x_upd.conv"),
    ("in", "proj_in"),
    ("out", "proj_out"),
    ("(self|cross)/out", r"\1_attention_block.proj_out"),
    (r"(self|cross)/(\w+)", r"\1_attention_block.\2"),
    ("ff_norm", "ff.norm"),
    ("ff_in", "ff.net.0.proj"),
    ("ff_out", "ff.net.2"),
)


def _layouts(unet: UNet | EfficientUNet) -> list[tuple[str, Layout]]:
    """Return the layouts of the kernels that NeMo does not store in the default layout.

    Each layout comes with a pattern of the paths that have it. Most of these kernels are 1x1 or
    transposed convolutions in NeMo.
    """
    stacked = [(".*_attn/(in|out)", CONV2D_1), (r".*_attn/ff_\w+", LINEAR)]
    return [
        *(stacked if unet.attention == "stacked" else []),
        (".*_attn/.*", CONV1D_1),
        (".*/skip", CONV2D_1),
        (r"up_\d+_resample(/up_[hx])?", CONV_TRANSPOSE),
        *([("out_conv", CONV2D_1)] if isinstance(unet, EfficientUNet) else []),
    ]


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    """Convert values of a NeMo config to integers. Values such as 2.0 and "2" become 2.

    Raises ValueError if a value is not whole.
    """
    ints = tuple(int(value) for value in values)
    if any(float(value) != integer for value, integer in zip(values, ints, strict=True)):
        raise ValueError(f"the group `unet` of NeMo's config has {list(values)} where integers are expected")
    return ints
