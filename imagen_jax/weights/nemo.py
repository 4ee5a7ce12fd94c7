"""Imagen's weights and configs under NeMo's names: a table of names for each network.

NeMo's `unet_type` is "base" or "sr-unet" for UNet, "sr" for EfficientUNet.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from diffusion_jax.weights import torch_weights
from diffusion_jax.weights.torch_weights import Entry, StateDict, layer, norm
from imagen_jax import efficient_unet
from imagen_jax import unet as unet_module
from imagen_jax.conditioning import example_inputs
from imagen_jax.efficient_unet import EfficientUNet
from imagen_jax.unet import UNet, attends, blocks_per_level

PREFIX = "model.model.unet."
"""Where NeMo's model keeps the UNet."""


def table(unet: UNet | EfficientUNet) -> list[Entry]:
    """NeMo's name of every parameter."""
    entries = _unet_table(unet) if isinstance(unet, UNet) else _efficient_table(unet)
    return [e._replace(path=f"params/{e.path}") for e in _conditioning(unet) + entries]


def from_nemo(state: StateDict, unet: UNet | EfficientUNet, text_width: int) -> Any:
    """A NeMo state dict as params of `unet`; `text_width` is that of the text embeddings.

    Takes names with NeMo's prefixes or without. ValueError that lists the keys that do not fit.
    """
    state = _bare(state)
    for part in ("weight", "bias"):  # NeMo registers this one layer twice.
        alias = state.pop(f"input_blocks.0.0.{part}", None)
        if alias is not None and not np.array_equal(alias, state.get(f"init_conv.0.{part}", alias)):
            raise ValueError(
                f"input_blocks.0.0.{part} and init_conv.0.{part} are one array under two names, "
                "but differ in this state dict"
            )
        if alias is not None:
            state.setdefault(f"init_conv.0.{part}", alias)
    return torch_weights.to_params(state, table(unet), abstract_params(unet, text_width))


def to_nemo(params: Any, unet: UNet | EfficientUNet) -> dict[str, np.ndarray]:
    """Params as a NeMo state dict, without prefixes, the first layer of a UNet twice."""
    state = torch_weights.to_state_dict(params, table(unet))
    if isinstance(unet, UNet):
        for part in ("weight", "bias"):
            state[f"input_blocks.0.0.{part}"] = state[f"init_conv.0.{part}"]
    return state


def abstract_params(unet: UNet | EfficientUNet, text_width: int) -> Any:
    """Shapes of a UNet's parameters, without making them; ValueError if its fields do not fit."""
    if isinstance(unet, UNet):
        unet_module.check_layers(unet)
    else:
        efficient_unet.check_layers(unet)
    return jax.eval_shape(lambda: unet.init(jax.random.key(0), **example_inputs(unet, text_width)))


def unet_from_config(config: Any) -> UNet | EfficientUNet:
    """The network of a NeMo model config (`unet_type`, `unet`, `noise_cond_aug`), NeMo's defaults.

    ValueError if it asks for what is not here, or for what NeMo could not build either.
    """
    if not isinstance(config, Mapping):
        raise ValueError(
            f"the config is a {type(config).__name__}: it must be a mapping that holds `unet`"
        )
    fields, kind = config.get("unet"), config.get("unet_type", "base")
    if not isinstance(fields, Mapping):
        there = ", ".join(map(str, config)) or "nothing"
        raise ValueError(f"the config lacks `unet`, the network's fields: it holds {there}")
    if kind not in ("base", "sr-unet", "sr"):
        raise ValueError(f"unet_type {kind!r} is not known: it must be 'base', 'sr-unet' or 'sr'")
    missing = [name for name in ("image_size", "embed_dim") if name not in fields]
    if missing:
        raise ValueError(f"the config's unet lacks {' and '.join(missing)}, which have no default")
    if fields.get("channels", 3) != 3:
        raise ValueError(f"unet.channels is {fields['channels']}: images here have 3")
    noise_aug = bool(config.get("noise_cond_aug") or fields.get("noise_cond_aug", False))
    try:
        if kind == "sr":
            unet = _efficient_unet(fields, noise_aug)
            efficient_unet.check_layers(unet)
        else:
            unet = _unet(fields, fields.get("low_res_cond", kind == "sr-unet"), noise_aug)
            unet_module.check_layers(unet)
    except TypeError as error:
        raise ValueError(f"a value in the config's unet is of another type: {error}") from error
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
        raise ValueError(f"unet.stride is {fields['stride']}: a level can only halve, by 2")
    mult = _ints(get("channel_mult", (1, 1, 2, 4, 8)))
    blocks = _ints(get("num_resblocks", (1, 2, 4, 8, 8)))
    attention = get("atnn_enabled_at", (0, 0, 0, 0, 1))
    if min(len(blocks), len(attention)) < len(mult):
        raise ValueError(
            f"unet.channel_mult has {len(mult)} levels, num_resblocks {len(blocks)} and "
            f"atnn_enabled_at {len(attention)}: each needs one entry a level"
        )
    by_width = get("per_head_channels", 64) != -1
    return EfficientUNet(
        **_common_fields(fields),
        channel_mult=mult,
        # NeMo makes the first block of a level whatever their number, and looks at no more levels.
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


def _unet_table(unet: UNet) -> list[Entry]:
    entries = layer("init_conv.0", "init_conv", torch_weights.CONV)
    levels = list(zip(unet.channel_mult, blocks_per_level(unet), strict=True))
    width = unet.embed_dim * unet.channel_mult[0]
    skips = [width]
    block = 1  # input_blocks.0 is init_conv under a second name.
    for level, (mult, count) in enumerate(levels):
        for i in range(count):
            torch, width_in, width = f"input_blocks.{block}", width, unet.embed_dim * mult
            entries += _res(f"{torch}.0", f"down_{level}_{i}_res", width_in != width)
            if attends(unet, level):
                entries += _attention(unet.attention, f"{torch}.1", f"down_{level}_{i}_attn")
            skips.append(width)
            block += 1
        if level < len(levels) - 1:
            entries += _down(unet, f"input_blocks.{block}.0", f"down_{level}_resample")
            skips.append(width)
            block += 1
    entries += _res("middle_block.0", "mid_res_0")
    entries += _attention(unet.attention, "middle_block.1", "mid_attn")
    entries += _res("middle_block.2", "mid_res_1")
    block = 0
    for level, (mult, count) in reversed(list(enumerate(levels))):
        for i in range(count + 1):
            torch, width_in, width = f"output_blocks.{block}", width, unet.embed_dim * mult
            entries += _res(f"{torch}.0", f"up_{level}_{i}_res", width_in + skips.pop() != width)
            if attends(unet, level):
                entries += _attention(unet.attention, f"{torch}.1", f"up_{level}_{i}_attn")
            if level > 0 and i == count:
                up = f"{torch}.{2 if attends(unet, level) else 1}"
                entries += _up(unet, up, f"up_{level}_resample")
            block += 1
    entries += norm("out.0", "out_norm")
    return entries + layer("out.2", "out_conv", torch_weights.CONV)


def _efficient_table(unet: EfficientUNet) -> list[Entry]:
    entries = layer("init_conv", "init_conv", torch_weights.CONV)
    resamplings = {"D": torch_weights.CONV, "U": torch_weights.CONV_TRANSPOSE}
    for side, name in (("D", "down"), ("U", "up")):
        for level, count in enumerate(unet.num_res_blocks):
            torch = f"{side}Blocks.{level}"
            for i in range(count):
                entries += _efficient_res(f"{torch}.blocks.{i}", f"{name}_{level}_{i}_res")
            if level in unet.attention_levels:
                path = f"{name}_{level}_attn"
                entries += _attention(unet.attention, f"{torch}.attention_layer", path)
            if level < len(unet.num_res_blocks) - 1:
                entries += layer(f"{torch}.conv", f"{name}_{level}_resample", resamplings[side])
    return entries + layer("out", "out_conv", torch_weights.CONV2D_1)


def _conditioning(unet: UNet | EfficientUNet) -> list[Entry]:
    linear = torch_weights.LINEAR
    entries = _time("time_embed", "time_embed", unet)
    if unet.noise_aug:
        entries += _time("lowres_time_embed", "low_res_time_embed", unet)
    if unet.text_pooling == "attention":
        entries += layer("attention_pooling.0.W", "text_pool/score", linear)
        entries += norm("attention_pooling.1", "text_pool/norm")
        entries += layer("attention_pooling.2", "text_pool/out", linear)
    entries += layer("text_to_cond", "text_to_cond", linear)
    entries += norm("to_text_non_attn_cond.0", "text_embed/norm")
    entries += layer("to_text_non_attn_cond.1", "text_embed/dense1", linear)
    entries += layer("to_text_non_attn_cond.3", "text_embed/dense2", linear)
    if unet.null_token:
        entries.append(Entry("null_text_embedding", "null_token", torch_weights.VECTOR))
    return entries


def _time(torch: str, path: str, unet: UNet | EfficientUNet) -> list[Entry]:
    entries = layer(f"{torch}.1", f"{path}/dense1", torch_weights.LINEAR)
    entries += layer(f"{torch}.3", f"{path}/dense2", torch_weights.LINEAR)
    if unet.learned_time_dim:
        entries.append(Entry(f"{torch}.0.weights", f"{path}/frequencies", torch_weights.VECTOR))
    return entries


def _res(torch: str, path: str, projected: bool = False) -> list[Entry]:
    """`projected`: the width changes, so that the shortcut has parameters."""
    entries = [
        *norm(f"{torch}.in_layers.0", f"{path}/norm1"),
        *layer(f"{torch}.in_layers.2", f"{path}/conv1", torch_weights.CONV),
        *layer(f"{torch}.emb_layers.1", f"{path}/emb", torch_weights.LINEAR),
        *norm(f"{torch}.out_layers.0", f"{path}/norm2"),
        *layer(f"{torch}.out_layers.3", f"{path}/conv2", torch_weights.CONV),
    ]
    if projected:
        entries += layer(f"{torch}.skip_connection", f"{path}/skip", torch_weights.CONV2D_1)
    return entries


def _efficient_res(torch: str, path: str) -> list[Entry]:
    return [
        *norm(f"{torch}.in_layers.0", f"{path}/norm1"),
        *layer(f"{torch}.in_layers.2", f"{path}/conv1", torch_weights.CONV),
        *layer(f"{torch}.emb_layers.1", f"{path}/emb", torch_weights.LINEAR),
        *norm(f"{torch}.out_layers.0", f"{path}/norm2"),
        *layer(f"{torch}.out_layers.2", f"{path}/conv2", torch_weights.CONV),
        *layer(f"{torch}.shortcut", f"{path}/skip", torch_weights.CONV2D_1),
    ]


def _down(unet: UNet, torch: str, path: str) -> list[Entry]:
    if unet.resblock_updown:
        return _res(torch, path)
    return layer(f"{torch}.op", path, torch_weights.CONV) if unet.conv_resample else []


def _up(unet: UNet, torch: str, path: str) -> list[Entry]:
    if not unet.resblock_updown:
        return layer(f"{torch}.conv", path, torch_weights.CONV_TRANSPOSE)
    return [
        *_res(torch, path),
        *layer(f"{torch}.h_upd.conv", f"{path}/up_h", torch_weights.CONV_TRANSPOSE),
        *layer(f"{torch}.x_upd.conv", f"{path}/up_x", torch_weights.CONV_TRANSPOSE),
    ]


def _attention(kind: str, torch: str, path: str) -> list[Entry]:
    if kind == "stacked":
        return [
            *layer(f"{torch}.proj_in", f"{path}/in", torch_weights.CONV2D_1),
            *norm(f"{torch}.norm", f"{path}/norm"),
            *_attention("self", f"{torch}.self_attention_block", f"{path}/self"),
            *_attention("cross", f"{torch}.cross_attention_block", f"{path}/cross"),
            *norm(f"{torch}.ff.norm", f"{path}/ff_norm"),
            *layer(f"{torch}.ff.net.0.proj", f"{path}/ff_in", torch_weights.LINEAR),
            *layer(f"{torch}.ff.net.2", f"{path}/ff_out", torch_weights.LINEAR),
            *layer(f"{torch}.proj_out", f"{path}/out", torch_weights.CONV2D_1),
        ]
    norms, layers = _ATTENTION_PARTS[kind]
    entries = [entry for n in norms for entry in norm(f"{torch}.{n}", f"{path}/{n}")]
    for name in layers:
        entries += layer(f"{torch}.{name}", f"{path}/{name}", torch_weights.CONV1D_1)
    return entries + layer(f"{torch}.proj_out", f"{path}/out", torch_weights.CONV1D_1)


_ATTENTION_PARTS = {
    "self": (("norm",), ("qkv",)),
    "cross": (("norm", "norm_context"), ("q", "kv")),
    "fused": (("norm", "norm_context", "norm_self"), ("q", "kv_context", "kv_self")),
}


def _bare(state: StateDict) -> dict[str, np.ndarray]:
    """The arrays under their names without what NeMo's wrappers and torch.compile put in."""
    bare = {
        name.replace("_orig_mod.", "").rpartition("unet.")[2]: np.asarray(array)
        for name, array in state.items()
    }
    if len(bare) < len(state):
        raise ValueError(
            f"the state dict holds {len(state)} keys of only {len(bare)} names once prefixes such "
            "as 'model.model.unet.' are taken off: are these two models in one?"
        )
    return bare


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    """ValueError for fractions; 2.0 and "2", as YAML and JSON may have it, are 2."""
    ints = tuple(int(value) for value in values)
    if any(float(value) != whole for value, whole in zip(values, ints, strict=True)):
        raise ValueError(
            f"the config's unet holds {list(values)}, where whole numbers are expected"
        )
    return ints
