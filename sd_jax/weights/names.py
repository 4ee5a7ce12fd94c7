"""Stable Diffusion's parameters under the names of LDM, NeMo and diffusers: tables of them.

LDM's names are those of CompVis', Stability's and MLPerf's checkpoints, without the prefixes that
whole checkpoints have (see checkpoints.py). NeMo's VAE has LDM's names.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax.weights import torch_weights
from diffusion_jax.weights.torch_weights import (
    CONV,
    CONV2D_1,
    LINEAR,
    Entry,
    StateDict,
    layer,
    norm,
)
from sd_jax import unet as unet_module
from sd_jax import vae as vae_module
from sd_jax.unet import UNet, blocks_per_level
from sd_jax.vae import VAE


class _Words(NamedTuple):
    """What a dialect calls the parts of a block, by our names."""

    ends: dict[str, str]
    res: dict[str, str]
    block: dict[str, str]


_TRANSFORMER = {
    "self_norm": "norm1",
    "cross_norm": "norm2",
    "ff_norm": "norm3",
    "ff_in": "ff.net.0.proj",
    "ff_out": "ff.net.2",
}
_LDM = _Words(
    ends={
        "time_dense1": "time_embed.0",
        "time_dense2": "time_embed.2",
        "init_conv": "input_blocks.0.0",
        "out_norm": "out.0",
        "out_conv": "out.2",
    },
    res={
        "norm1": "in_layers.0",
        "conv1": "in_layers.2",
        "emb": "emb_layers.1",
        "norm2": "out_layers.0",
        "conv2": "out_layers.3",
        "skip": "skip_connection",
    },
    block=_TRANSFORMER,
)
_WORDS = {
    "ldm": _LDM,
    # Norm and SiLU are one module in NeMo, and norms belong to what follows them.
    "nemo": _Words(
        ends=_LDM.ends | {"out_conv": "out.1"},
        res=_LDM.res | {"conv1": "in_layers.1", "conv2": "out_layers.2"},
        block={
            "self_norm": "attn1.norm",
            "cross_norm": "attn2.norm",
            "ff_norm": "ff.net.0",
            "ff_in": "ff.net.1.proj",
            "ff_out": "ff.net.3",
        },
    ),
    "diffusers": _Words(
        ends={
            "time_dense1": "time_embedding.linear_1",
            "time_dense2": "time_embedding.linear_2",
            "init_conv": "conv_in",
            "out_norm": "conv_norm_out",
            "out_conv": "conv_out",
        },
        res={
            "norm1": "norm1",
            "conv1": "conv1",
            "emb": "time_emb_proj",
            "norm2": "norm2",
            "conv2": "conv2",
            "skip": "conv_shortcut",
        },
        block=_TRANSFORMER,
    ),
}


def unet_table(unet: UNet, dialect: str) -> list[Entry]:
    """The name of every parameter of a UNet in a dialect."""
    words = _WORDS[dialect]
    entries = [
        *layer(words.ends["time_dense1"], "time_dense1", LINEAR),
        *layer(words.ends["time_dense2"], "time_dense2", LINEAR),
        *layer(words.ends["init_conv"], "init_conv", CONV),
        *norm(words.ends["out_norm"], "out_norm"),
        *layer(words.ends["out_conv"], "out_conv", CONV),
    ]
    for place in _places(unet):
        torch = place.diffusers if dialect == "diffusers" else place.ldm
        if place.kind == "res":
            entries += _res(torch, place.path, words.res, place.projected)
        elif place.kind == "attn":
            entries += _transformer(unet, torch, place.path, words.block)
        else:
            # LDM and diffusers differ in what they call the convolution of a resampling.
            ldm = "op" if place.kind == "down" else "conv"
            part = "conv" if dialect == "diffusers" else ldm
            entries += layer(f"{torch}.{part}", place.path, CONV)
    return _in_params(entries)


def vae_table(vae: VAE, dialect: str) -> list[Entry]:
    """The name of every parameter of a VAE in a dialect."""
    of_diffusers = dialect == "diffusers"
    entries = layer("quant_conv", "encoder/quant", CONV2D_1)
    entries += layer("post_quant_conv", "decoder/post_quant", CONV2D_1)
    for half in ("encoder", "decoder"):
        entries += layer(f"{half}.conv_in", f"{half}/init_conv", CONV)
        entries += norm(f"{half}.{'conv_' * of_diffusers}norm_out", f"{half}/out_norm")
        entries += layer(f"{half}.conv_out", f"{half}/out_conv", CONV)
        entries += _vae_middle(half, of_diffusers)
    levels = len(vae.channel_mult)
    words = {"norm1": "norm1", "conv1": "conv1", "norm2": "norm2", "conv2": "conv2"}
    words["skip"] = "conv_shortcut" if of_diffusers else "nin_shortcut"
    width = vae.width
    for level, mult in enumerate(vae.channel_mult):
        torch = f"encoder.down_blocks.{level}" if of_diffusers else f"encoder.down.{level}"
        for i in range(vae.num_res_blocks):
            block = f"{torch}.resnets.{i}" if of_diffusers else f"{torch}.block.{i}"
            projected, width = width != vae.width * mult, vae.width * mult
            entries += _res(block, f"encoder/down_{level}_{i}_res", words, projected)
        if level < levels - 1:
            conv = f"{torch}.downsamplers.0.conv" if of_diffusers else f"{torch}.downsample.conv"
            entries += layer(conv, f"encoder/down_{level}_resample", CONV)
    for level, mult in reversed(list(enumerate(vae.channel_mult))):
        up = f"decoder.up_blocks.{levels - 1 - level}"
        torch = up if of_diffusers else f"decoder.up.{level}"
        for i in range(vae.num_res_blocks + 1):
            block = f"{torch}.resnets.{i}" if of_diffusers else f"{torch}.block.{i}"
            projected, width = width != vae.width * mult, vae.width * mult
            entries += _res(block, f"decoder/up_{level}_{i}_res", words, projected)
        if level > 0:
            conv = f"{torch}.upsamplers.0.conv" if of_diffusers else f"{torch}.upsample.conv"
            entries += layer(conv, f"decoder/up_{level}_resample", CONV)
    return _in_params(entries)


def unet_dialect(state: StateDict) -> str:
    """The dialect of a UNet's names; ValueError if it is none."""
    marks = {"diffusers": "conv_norm_out.weight", "nemo": "out.1.weight", "ldm": "out.2.weight"}
    return _dialect(state, marks, "Stable Diffusion UNet")


def vae_dialect(state: StateDict) -> str:
    """The dialect of a VAE's names; ValueError if it is none."""
    marks = {"diffusers": "encoder.conv_norm_out.weight", "ldm": "encoder.norm_out.weight"}
    return _dialect(state, marks, "autoencoder")


def unet_from_torch(state: StateDict, unet: UNet, text_width: int) -> Any:
    """A state dict in any dialect as params; ValueError that lists the keys that do not fit."""
    table = unet_table(unet, unet_dialect(state))
    return torch_weights.to_params(state, table, abstract_unet(unet, text_width))


def vae_from_torch(state: StateDict, vae: VAE) -> Any:
    """A state dict in any dialect as params; ValueError that lists the keys that do not fit."""
    dialect = vae_dialect(state)
    state = _today(state) if dialect == "diffusers" else state
    return torch_weights.to_params(state, vae_table(vae, dialect), abstract_vae(vae))


def unet_to_torch(params: Any, unet: UNet, dialect: str) -> dict[str, np.ndarray]:
    """Params as a state dict in a dialect."""
    return torch_weights.to_state_dict(params, unet_table(unet, dialect))


def vae_to_torch(params: Any, vae: VAE, dialect: str) -> dict[str, np.ndarray]:
    """Params as a state dict in a dialect."""
    return torch_weights.to_state_dict(params, vae_table(vae, dialect))


def activations(unet: UNet) -> dict[str, str]:
    """LDM's names of its blocks, and ours of the layer whose output is theirs."""
    outputs = {"time_embed": "time_dense2", "input_blocks.0": "init_conv"}
    for place in _places(unet):
        outputs[place.ldm.rpartition(".")[0]] = place.path  # The last one of a block stays.
    return outputs


def text_width(state: StateDict) -> int:
    """The width of the text that a UNet's state dict attends to."""
    return next(w.shape[1] for name, w in state.items() if name.endswith("attn2.to_k.weight"))


def abstract_unet(unet: UNet, text_width: int) -> Any:
    """Shapes of the parameters, without making them; ValueError for fields that do not fit."""
    unet_module.check(unet)
    size = 2 ** (len(unet.channel_mult) - 1)
    x, time, text = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((1, size, size, unet.in_channels), (1,), (1, 1, text_width))
    )
    return jax.eval_shape(unet.init, jax.random.key(0), x, time, text)


def abstract_vae(vae: VAE) -> Any:
    """Shapes of the parameters, without making them; ValueError for fields that do not fit."""
    vae_module.check(vae)
    size = vae_module.factor(vae)
    images = jax.ShapeDtypeStruct((1, size, size, vae.image_channels), jnp.float32)
    eps = jax.ShapeDtypeStruct((1, 1, 1, vae.latent_channels), jnp.float32)
    return jax.eval_shape(vae.init, jax.random.key(0), images, eps)


class _Place(NamedTuple):
    """A block of the UNet: our name, its kind ("res", "attn", "down", "up"), and its two places."""

    path: str
    kind: str
    ldm: str
    diffusers: str
    projected: bool = False


def _places(unet: UNet) -> Iterator[_Place]:
    blocks, last = blocks_per_level(unet), len(unet.channel_mult) - 1
    width, skips, at = unet.width, [unet.width], 1  # input_blocks.0 is the first convolution.
    for level, mult in enumerate(unet.channel_mult):
        theirs = f"down_blocks.{level}"
        for i in range(blocks[level]):
            projected, width = width != unet.width * mult, unet.width * mult
            ours, ldm = f"down_{level}_{i}", f"input_blocks.{at}"
            yield _Place(f"{ours}_res", "res", f"{ldm}.0", f"{theirs}.resnets.{i}", projected)
            if level in unet.attention_levels:
                yield _Place(f"{ours}_attn", "attn", f"{ldm}.1", f"{theirs}.attentions.{i}")
            skips.append(width)
            at += 1
        if level < last:
            ldm, down = f"input_blocks.{at}.0", f"{theirs}.downsamplers.0"
            yield _Place(f"down_{level}_resample", "down", ldm, down)
            skips.append(width)
            at += 1
    yield _Place("mid_res_0", "res", "middle_block.0", "mid_block.resnets.0")
    yield _Place("mid_attn", "attn", "middle_block.1", "mid_block.attentions.0")
    yield _Place("mid_res_1", "res", "middle_block.2", "mid_block.resnets.1")
    at = 0
    for level, mult in reversed(list(enumerate(unet.channel_mult))):
        theirs = f"up_blocks.{last - level}"
        for i in range(blocks[level] + 1):
            projected, width = width + skips.pop() != unet.width * mult, unet.width * mult
            ours, ldm = f"up_{level}_{i}", f"output_blocks.{at}"
            attends = level in unet.attention_levels
            yield _Place(f"{ours}_res", "res", f"{ldm}.0", f"{theirs}.resnets.{i}", projected)
            if attends:
                yield _Place(f"{ours}_attn", "attn", f"{ldm}.1", f"{theirs}.attentions.{i}")
            if level > 0 and i == blocks[level]:
                ldm, up = f"{ldm}.{1 + attends}", f"{theirs}.upsamplers.0"
                yield _Place(f"up_{level}_resample", "up", ldm, up)
            at += 1


def _res(torch: str, path: str, words: Mapping[str, str], projected: bool) -> list[Entry]:
    """`projected`: the width changes, so that the shortcut has parameters."""
    layouts = {"conv1": CONV, "emb": LINEAR, "conv2": CONV, "skip": CONV2D_1}
    entries = []
    for part, word in words.items():
        if part in ("norm1", "norm2"):
            entries += norm(f"{torch}.{word}", f"{path}/{part}")
        elif part != "skip" or projected:
            entries += layer(f"{torch}.{word}", f"{path}/{part}", layouts[part])
    return entries


def _transformer(unet: UNet, torch: str, path: str, words: Mapping[str, str]) -> list[Entry]:
    projection = LINEAR if unet.linear_projections else CONV2D_1
    entries = norm(f"{torch}.norm", f"{path}/norm")
    entries += layer(f"{torch}.proj_in", f"{path}/in", projection)
    entries += layer(f"{torch}.proj_out", f"{path}/out", projection)
    for i in range(unet.transformer_depth):
        block = f"{torch}.transformer_blocks.{i}"
        for name in ("self_norm", "cross_norm", "ff_norm"):
            entries += norm(f"{block}.{words[name]}", f"{path}/{name}_{i}")
        for name in ("ff_in", "ff_out"):
            entries += layer(f"{block}.{words[name]}", f"{path}/{name}_{i}", LINEAR)
        for name, theirs in (("self", "attn1"), ("cross", "attn2")):
            attention = f"{path}/{name}_{i}"
            for n in "qkv":
                weight = f"{block}.{theirs}.to_{n}.weight"
                entries.append(Entry(weight, f"{attention}/{n}/kernel", LINEAR))
            entries += layer(f"{block}.{theirs}.to_out.0", f"{attention}/out", LINEAR)
    return entries


def _vae_middle(half: str, of_diffusers: bool) -> list[Entry]:
    words = {name: name for name in ("norm1", "conv1", "norm2", "conv2")}
    entries = []
    for i in (0, 1):
        block = f"mid_block.resnets.{i}" if of_diffusers else f"mid.block_{i + 1}"
        entries += _res(f"{half}.{block}", f"{half}/mid_res_{i}", words, False)
    torch = f"{half}.mid_block.attentions.0" if of_diffusers else f"{half}.mid.attn_1"
    parts = _VAE_ATTENTION if of_diffusers else dict(zip("qkv", "qkv", strict=True))
    path = f"{half}/mid_attn"
    entries += norm(f"{torch}.{'group_' * of_diffusers}norm", f"{path}/norm")
    for part in ("q", "k", "v", "out"):
        word = parts.get(part, "proj_out")
        layout = LINEAR if of_diffusers else CONV2D_1
        entries += layer(f"{torch}.{word}", f"{path}/{part}", layout)
    return entries


_VAE_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "out": "to_out.0"}
_VAE_ATTENTION_ONCE = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def _today(state: StateDict) -> dict[str, np.ndarray]:
    """diffusers' VAE with the names of its attention that it has had since version 0.14."""
    renamed = {}
    for name, array in state.items():
        head, _, rest = name.partition(".attentions.0.")
        part, _, kind = rest.rpartition(".")
        if part in _VAE_ATTENTION_ONCE:
            name = f"{head}.attentions.0.{_VAE_ATTENTION_ONCE[part]}.{kind}"
            array = array.reshape(array.shape[:2]) if kind == "weight" else array
        renamed[name] = array
    return renamed


def _dialect(state: StateDict, marks: Mapping[str, str], what: str) -> str:
    for dialect, mark in marks.items():
        if mark in state:
            return dialect
    raise ValueError(
        f"these weights are no {what}: among {len(state)} arrays such as "
        f"{', '.join(sorted(state)[:3])} there is none of {', '.join(marks.values())}"
    )


def _in_params(entries: list[Entry]) -> list[Entry]:
    return [entry._replace(path=f"params/{entry.path}") for entry in entries]
