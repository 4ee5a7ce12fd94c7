"""Convert Stable Diffusion's parameters to and from the names of LDM, NeMo and diffusers.

Each set of names is called a dialect: "ldm", "nemo" or "diffusers". The checkpoints of CompVis,
Stability and MLPerf have LDM's names, and so does NeMo's VAE. The prefixes that names have in
complete checkpoints are added and removed elsewhere (see file_parts.py and checkpoints.py).
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax.config.picture_fields import Field
from diffusion_jax.files import untrusted
from diffusion_jax.nn import picture_fields
from diffusion_jax.nn.layers import blocks_per_level
from diffusion_jax.weights import guided_diffusion, torch_weights
from diffusion_jax.weights.torch_weights import CONV2D_1, LINEAR, Entry, StateDict
from sd_jax import unet as unet_module
from sd_jax import vae as vae_module
from sd_jax.unet import UNet
from sd_jax.vae import VAE

_TRANSFORMER = (
    ("in", "proj_in"),
    ("out", "proj_out"),
    (r"self_(\d+)/out", r"transformer_blocks.\1.attn1.to_out.0"),
    (r"self_(\d+)/(\w)", r"transformer_blocks.\1.attn1.to_\2"),
    (r"cross_(\d+)/out", r"transformer_blocks.\1.attn2.to_out.0"),
    (r"cross_(\d+)/(\w)", r"transformer_blocks.\1.attn2.to_\2"),
    (r"self_norm_(\d+)", r"transformer_blocks.\1.norm1"),
    (r"cross_norm_(\d+)", r"transformer_blocks.\1.norm2"),
    (r"ff_norm_(\d+)", r"transformer_blocks.\1.norm3"),
    (r"ff_in_(\d+)", r"transformer_blocks.\1.ff.net.0.proj"),
    (r"ff_out_(\d+)", r"transformer_blocks.\1.ff.net.2"),
)
_LDM_ENDS = (
    ("time_dense1", "time_embed.0"),
    ("time_dense2", "time_embed.2"),
    ("init_conv", "input_blocks.0.0"),
    ("out_norm", "out.0"),
    ("out_conv", "out.2"),
)
_LDM_INSIDE = (
    ("norm1", "in_layers.0"),
    ("conv1", "in_layers.2"),
    ("emb", "emb_layers.1"),
    ("norm2", "out_layers.0"),
    ("conv2", "out_layers.3"),
    ("skip", "skip_connection"),
    *_TRANSFORMER,
)
_ENDS = {
    "ldm": _LDM_ENDS,
    # In NeMo, a norm and SiLU are one module, and the norms of transformers are part of the layer
    # that follows them.
    "nemo": (("out_conv", "out.1"), *_LDM_ENDS),
    "diffusers": (
        ("time_dense(1|2)", r"time_embedding.linear_\1"),
        ("init_conv", "conv_in"),
        ("out_norm", "conv_norm_out"),
        ("out_conv", "conv_out"),
    ),
}
_INSIDE = {
    "ldm": _LDM_INSIDE,
    "nemo": (
        ("conv1", "in_layers.1"),
        ("conv2", "out_layers.2"),
        (r"self_norm_(\d+)", r"transformer_blocks.\1.attn1.norm"),
        (r"cross_norm_(\d+)", r"transformer_blocks.\1.attn2.norm"),
        (r"ff_norm_(\d+)", r"transformer_blocks.\1.ff.net.0"),
        (r"ff_in_(\d+)", r"transformer_blocks.\1.ff.net.1.proj"),
        (r"ff_out_(\d+)", r"transformer_blocks.\1.ff.net.3"),
        *_LDM_INSIDE,
    ),
    "diffusers": (("emb", "time_emb_proj"), ("skip", "conv_shortcut"), *_TRANSFORMER),
}
# On the way up, diffusers counts the levels from the deepest one, as `_reversed_up` does.
_DIFFUSERS_PLACES = (
    (r"(down|up)_(\d+)_(\d+)_res", r"\1_blocks.\2.resnets.\3"),
    (r"(down|up)_(\d+)_(\d+)_attn", r"\1_blocks.\2.attentions.\3"),
    (r"(down|up)_(\d+)_resample", r"\1_blocks.\2.\1samplers.0"),
    (r"mid_res_(\d)", r"mid_block.resnets.\1"),
    ("mid_attn", "mid_block.attentions.0"),
)
_VAE = {
    "ldm": (
        ("encoder/quant", "quant_conv"),
        ("decoder/post_quant", "post_quant_conv"),
        (r"(\w+)/init_conv", r"\1.conv_in"),
        (r"(\w+)/out_(norm|conv)", r"\1.\2_out"),
        (r"(\w+)/mid_res_0/(\w+)", r"\1.mid.block_1.\2"),
        (r"(\w+)/mid_res_1/(\w+)", r"\1.mid.block_2.\2"),
        (r"(\w+)/mid_attn/out", r"\1.mid.attn_1.proj_out"),
        (r"(\w+)/mid_attn/(\w+)", r"\1.mid.attn_1.\2"),
        (r"(\w+)/(down|up)_(\d+)_(\d+)_attn/out", r"\1.\2.\3.attn.\4.proj_out"),
        (r"(\w+)/(down|up)_(\d+)_(\d+)_attn/(\w+)", r"\1.\2.\3.attn.\4.\5"),
        (r"(\w+)/(down|up)_(\d+)_(\d+)_res/skip", r"\1.\2.\3.block.\4.nin_shortcut"),
        (r"(\w+)/(down|up)_(\d+)_(\d+)_res/(\w+)", r"\1.\2.\3.block.\4.\5"),
        (r"(\w+)/(down|up)_(\d+)_resample", r"\1.\2.\3.\2sample.conv"),
    ),
    "diffusers": (
        ("encoder/quant", "quant_conv"),
        ("decoder/post_quant", "post_quant_conv"),
        (r"(\w+)/init_conv", r"\1.conv_in"),
        (r"(\w+)/out_norm", r"\1.conv_norm_out"),
        (r"(\w+)/out_conv", r"\1.conv_out"),
        (r"(\w+)/mid_res_(\d)/(\w+)", r"\1.mid_block.resnets.\2.\3"),
        (r"(\w+)/mid_attn/norm", r"\1.mid_block.attentions.0.group_norm"),
        (r"(\w+)/mid_attn/out", r"\1.mid_block.attentions.0.to_out.0"),
        (r"(\w+)/mid_attn/(\w)", r"\1.mid_block.attentions.0.to_\2"),
        (r"(\w+)/(down|up)_(\d+)_(\d+)_attn/norm", r"\1.\2_blocks.\3.attentions.\4.group_norm"),
        (r"(\w+)/(down|up)_(\d+)_(\d+)_attn/out", r"\1.\2_blocks.\3.attentions.\4.to_out.0"),
        (r"(\w+)/(down|up)_(\d+)_(\d+)_attn/(\w)", r"\1.\2_blocks.\3.attentions.\4.to_\5"),
        (r"(\w+)/(down|up)_(\d+)_(\d+)_res/skip", r"\1.\2_blocks.\3.resnets.\4.conv_shortcut"),
        (r"(\w+)/(down|up)_(\d+)_(\d+)_res/(\w+)", r"\1.\2_blocks.\3.resnets.\4.\5"),
        (r"(\w+)/(down|up)_(\d+)_resample", r"\1.\2_blocks.\3.\2samplers.0.conv"),
    ),
}


def unet_table(params: Any, unet: UNet, dialect: str) -> list[Entry]:
    """Return an Entry for each UNet parameter: its name in a dialect, its path and its layout.

    `dialect` is "ldm", "nemo" or "diffusers". The leaves of `params` may be arrays or shapes.
    """
    projection = LINEAR if unet.linear_projections else CONV2D_1
    layouts = [(".*/skip", CONV2D_1), (".*_attn/(in|out)", projection)]
    names = {"places": _ldm_places(unet), "ends": _ENDS[dialect], "inside": _INSIDE[dialect]}
    if dialect == "diffusers":
        converted = lambda block: _reversed_up(block, unet.channel_mult)
        places = {b: torch_weights.rename(converted(b), _DIFFUSERS_PLACES) for b in names["places"]}
        names |= {"places": places, "halve": "conv"}
    name_of = functools.partial(guided_diffusion.layer_name, **names)
    return torch_weights.table(params, name_of, layouts)


def vae_table(params: Any, vae: VAE, dialect: str) -> list[Entry]:
    """Return an Entry for each VAE parameter: its name in a dialect, its path and its layout.

    `dialect` is "ldm", "nemo" or "diffusers". The leaves of `params` may be arrays or shapes.
    """
    layouts = [(".*/(skip|quant|post_quant)", CONV2D_1)]
    if dialect == "diffusers":
        levels = vae.channel_mult
        name_of = lambda path: torch_weights.rename(_reversed_up(path, levels), _VAE["diffusers"])
    else:  # NeMo's VAE has LDM's names.
        name_of = lambda path: torch_weights.rename(path, _VAE["ldm"])
        layouts.append((".*_attn/.*", CONV2D_1))
    return torch_weights.table(params, name_of, layouts)


def _ldm_places(unet: UNet) -> dict[str, str]:
    levels = len(unet.channel_mult)
    attends = [level in unet.attention_levels for level in range(levels)]
    return guided_diffusion.places(blocks_per_level(unet.num_res_blocks, levels), attends)


def _reversed_up(path: str, levels: Sequence[int]) -> str:
    """Renumber the levels on the way up in a path, so that level 0 is the deepest one."""
    return re.sub(r"\bup_(\d+)", lambda m: f"up_{len(levels) - 1 - int(m[1])}", path)


def unet_dialect(state: StateDict) -> str:
    """Return the dialect of a UNet's array names: "ldm", "nemo" or "diffusers".

    Raises ValueError if the names belong to none of these dialects.
    """
    marks = {"diffusers": "conv_norm_out.weight", "nemo": "out.1.weight", "ldm": "out.2.weight"}
    return _dialect(state, marks, "a Stable Diffusion UNet")


def vae_dialect(state: StateDict) -> str:
    """Return the dialect of a VAE's array names, "ldm" or "diffusers".

    Raises ValueError if the names belong to neither of these dialects.
    """
    marks = {"diffusers": "encoder.conv_norm_out.weight", "ldm": "encoder.norm_out.weight"}
    return _dialect(state, marks, "an autoencoder")


def unet_from_torch(state: StateDict, unet: UNet, text_width: int) -> Any:
    """Convert a UNet's state dict, with LDM's, NeMo's or diffusers' names, to params.

    Raises ValueError if arrays are missing or unknown; the message lists their names.
    """
    dialect, abstract = unet_dialect(state), abstract_unet(unet, text_width)
    return torch_weights.to_params(state, unet_table(abstract, unet, dialect), abstract)


def vae_from_torch(state: StateDict, vae: VAE) -> Any:
    """Convert a VAE's state dict, with LDM's or diffusers' names, to params.

    Raises ValueError if arrays are missing or unknown; the message lists their names.
    """
    dialect = vae_dialect(state)
    state = _with_current_names(state) if dialect == "diffusers" else state
    abstract = abstract_vae(vae)
    return torch_weights.to_params(state, vae_table(abstract, vae, dialect), abstract)


def unet_to_torch(params: Any, unet: UNet, dialect: str) -> dict[str, np.ndarray]:
    """Convert a UNet's params to a state dict with the names of "ldm", "nemo" or "diffusers"."""
    return torch_weights.to_state_dict(params, unet_table(params, unet, dialect))


def vae_to_torch(params: Any, vae: VAE, dialect: str) -> dict[str, np.ndarray]:
    """Convert a VAE's params to a state dict with the names of "ldm", "nemo" or "diffusers"."""
    return torch_weights.to_state_dict(params, vae_table(params, vae, dialect))


def activations(unet: UNet) -> dict[str, str]:
    """Map each UNet block's name in LDM to the layer here that computes the block's output.

    The values are names of layers. With them, the activations of both networks can be compared.
    """
    outputs = {"time_embed": "time_dense2", "input_blocks.0": "init_conv"}
    for path, torch in _ldm_places(unet).items():
        outputs[torch.rpartition(".")[0]] = path  # The last layer of a block overwrites the others.
    return outputs


def text_width(state: StateDict) -> int:
    """Return the width of the text embeddings that a UNet attends to, given its state dict.

    Raises ValueError if the arrays are not those of a UNet with such attention.
    """
    unet_dialect(state)
    widths = [w.shape[1] for name, w in state.items() if name.endswith("attn2.to_k.weight")]
    if not widths:
        raise ValueError(
            "the UNet does not attend to text (it has no array attn2.to_k.weight): choose one of Stable Diffusion"
        )
    return widths[0]


def abstract_unet(unet: UNet, text_width: int, named: Sequence[Field] = ()) -> Any:
    """Return the shapes of a UNet's parameters. Raises ValueError if the UNet is invalid.

    `text_width` is the width of the text embeddings, and `named` holds the fields that
    the UNet sees.
    """
    unet_module.check(unet)
    size = 2 ** (len(unet.channel_mult) - 1)
    x, time, text = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((1, size, size, unet.in_channels), (1,), (1, 1, text_width))
    )
    numbers: dict[str, Any] = picture_fields.example(named)
    return jax.eval_shape(unet.init, jax.random.key(0), x, time, text, **numbers)


def abstract_vae(vae: VAE) -> Any:
    """Return the shapes of a VAE's parameters. Raises ValueError if the VAE is invalid."""
    vae_module.check(vae)
    size = vae_module.factor(vae)
    images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    eps = jax.ShapeDtypeStruct((1, 1, 1, vae.latent_channels), jnp.float32)
    return jax.eval_shape(vae.init, jax.random.key(0), images, eps)


_OLD_VAE_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def _with_current_names(state: StateDict) -> dict[str, np.ndarray]:
    """Rename the attention layers of a VAE of diffusers before 0.14 to diffusers' current names."""
    renamed = []
    for name, array in state.items():
        block, _, suffix = name.partition(".attentions.0.")
        part, _, kind = suffix.rpartition(".")
        if part in _OLD_VAE_ATTENTION:
            name = f"{block}.attentions.0.{_OLD_VAE_ATTENTION[part]}.{kind}"
            array = array.reshape(array.shape[:2]) if kind == "weight" else array
        renamed.append((name, array))
    return untrusted.once(renamed)


def _dialect(state: StateDict, marks: Mapping[str, str], kind: str) -> str:
    for dialect, mark in marks.items():
        if mark in state:
            return dialect
    raise ValueError(
        f"these weights are not those of {kind}, because their {len(state)} arrays "
        f"({', '.join(sorted(state)[:3])}, ...) include none of {', '.join(marks.values())}: "
        "choose another file"
    )
