"""Imagen weights under NeMo's names, and the proof that they give the same numbers here.

    python -m imagen_jax.weights verify CASE.npz

reads a case saved from the reference implementation (`config`, the state dict under `sd/`, inputs
under `in/`, outputs under `out/`, the input's gradient under `grad/x`), builds the model that its
config describes, and prints one line of JSON: the largest errors of the output, of the output at
guidance 3 and of the gradient (null where the case has none), and the number of parameters. The
exit code is 0 within 3e-5 (gradient 1e-4), 1 beyond, 2 if the case cannot be read.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from diffusion_jax import torch_weights
from diffusion_jax.torch_weights import Entry, StateDict, layer, norm
from imagen_jax.conditioning import example_inputs
from imagen_jax.unet import UNet, attends, blocks_per_level, check_layers

TOLERANCE = {"max_abs_error": 3e-5, "cfg_max_abs_error": 3e-5, "grad_max_abs_error": 1e-4}


def unet_table(unet: UNet) -> list[Entry]:
    """NeMo's name of every parameter of a UNet."""
    entries = _conditioning(unet)
    entries += layer("init_conv.0", "init_conv", torch_weights.CONV)
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
    entries += layer("out.2", "out_conv", torch_weights.CONV)
    return [e._replace(path=f"params/{e.path}") for e in entries]


def from_nemo(state: StateDict, unet: UNet, text_width: int) -> Any:
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
    return torch_weights.to_params(state, unet_table(unet), abstract_params(unet, text_width))


def to_nemo(params: Any, unet: UNet) -> dict[str, np.ndarray]:
    """Params as a NeMo state dict, without prefixes, the alias of the first layer included."""
    state = torch_weights.to_state_dict(params, unet_table(unet))
    alias = {
        f"input_blocks.0.0.{part}": state[f"init_conv.0.{part}"] for part in ("weight", "bias")
    }
    return state | alias


def abstract_params(unet: UNet, text_width: int) -> Any:
    """Shapes of a UNet's parameters, without making them; ValueError if its fields do not fit."""
    check_layers(unet)
    return jax.eval_shape(lambda: unet.init(jax.random.key(0), **example_inputs(unet, text_width)))


def unet_from_nemo_config(config: Mapping[str, Any]) -> UNet:
    """The UNet of a NeMo model config (`unet_type`, `unet`, `noise_cond_aug`), NeMo's defaults.

    ValueError if it asks for what is not here, or for what NeMo could not build either.
    """
    kind, fields = config.get("unet_type", "base"), dict(config["unet"])
    if kind not in ("base", "sr-unet"):
        raise ValueError(f"unet_type {kind!r} is not known here: it must be 'base' or 'sr-unet'")
    get = lambda name, default: fields.get(name, default)
    missing = [name for name in ("image_size", "embed_dim") if name not in fields]
    if missing:
        raise ValueError(f"the config's unet lacks {' and '.join(missing)}, which have no default")
    low_res = bool(get("low_res_cond", kind == "sr-unet"))
    unet = UNet(
        image_size=fields["image_size"],
        embed_dim=fields["embed_dim"],
        channel_mult=tuple(get("channel_mult", (1, 2, 3, 4))),
        num_res_blocks=_int_or_tuple(get("num_res_blocks", 3)),
        attention_resolutions=tuple(map(int, get("attention_resolutions", (8, 16, 32)))),
        attention=get("attention_type", "fused"),
        head_dim=get("per_head_channels", 64),
        cond_dim=get("cond_dim", 512),
        text_pooling=get("feature_pooling_type", "attention"),
        learned_time_dim=get("learned_sinu_pos_emb_dim", 16),
        null_token=get("use_null_token", False),
        init_kernel=get("init_conv_kernel_size", 3),
        scale_shift=get("scale_shift_norm", True),
        resblock_updown=get("resblock_updown", False),
        conv_resample=get("resample_with_conv", True),
        dropout=float(get("dropout", 0.0)),
        low_res=low_res,
        noise_aug=low_res and bool(config.get("noise_cond_aug") or get("noise_cond_aug", False)),
        remat=get("gradient_checkpointing", False),
    )
    check_layers(unet)
    return unet


def verify(case: Mapping[str, np.ndarray]) -> dict[str, float | int | None]:
    """The largest absolute errors of a saved case, and the number of parameters.

    The module's docstring tells the format. ValueError where the case or its config is not as it
    says.
    """
    _check_case(case)
    unet = unet_from_nemo_config(json.loads(case["config"].item()))
    inputs = _case_inputs(case, unet)
    state = {n.removeprefix("sd/"): a for n, a in case.items() if n.startswith("sd/")}
    params = from_nemo(state, unet, inputs["text"].shape[-1])

    cot = _nhwc(case["in/cot"]) if "grad/x" in case else None

    @jax.jit
    def run(params, inputs):
        y, pullback = jax.vjp(lambda x: unet.apply(params, **(inputs | {"x": x})), inputs["x"])
        return y, None if cot is None else pullback(cot)[0]

    with jax.default_matmul_precision("highest"):
        y, gradient = run(params, inputs)
        null, _ = run(params, inputs | {"text": jnp.zeros_like(inputs["text"])})
    errors = {
        "max_abs_error": _error(y, case["out/y"]),
        "cfg_max_abs_error": _error(null + 3 * (y - null), case.get("out/y_cfg3")),
        "grad_max_abs_error": _error(gradient, case.get("grad/x")),
    }
    return errors | {"parameters": sum(leaf.size for leaf in jax.tree.leaves(params))}


def within_tolerance(errors: Mapping[str, float | int | None]) -> bool:
    """Whether every error that a case has is at most TOLERANCE; NaN is not."""
    return all(
        error <= TOLERANCE[name]
        for name, error in errors.items()
        if name in TOLERANCE and error is not None
    )


def _conditioning(unet: UNet) -> list[Entry]:
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


def _time(torch: str, path: str, unet: UNet) -> list[Entry]:
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


def _int_or_tuple(value: int | list[int]) -> int | tuple[int, ...]:
    return value if isinstance(value, int) else tuple(value)


def _check_case(case: Mapping[str, np.ndarray]) -> None:
    needed = ["config", "in/x", "in/time", "in/text_embed", "in/text_mask", "out/y"]
    if "grad/x" in case:
        needed.append("in/cot")
    missing = [name for name in needed if name not in case]
    if not any(name.startswith("sd/") for name in case):
        missing.append("sd/<parameter>")
    if missing:
        raise ValueError(
            f"the case lacks {', '.join(missing)}: it holds {', '.join(sorted(case)[:8])} ..."
        )


def _case_inputs(case: Mapping[str, np.ndarray], unet: UNet) -> dict[str, jax.Array]:
    inputs = {
        "x": _nhwc(case["in/x"]),
        "time": _float32(case["in/time"]),
        "text": _float32(case["in/text_embed"]),
        "text_mask": jnp.asarray(case["in/text_mask"] != 0),
    }
    extras = {}
    if unet.low_res:
        extras["low_res"] = "in/x_low_res", _nhwc
    if unet.noise_aug:
        extras["low_res_time"] = "in/time_low_res", _float32
    for name, (key, convert) in extras.items():
        if key not in case:
            raise ValueError(f"the case lacks {key}, which its config asks for")
        inputs[name] = convert(case[key])
    return inputs


def _float32(array: np.ndarray) -> jax.Array:
    return jnp.asarray(array, jnp.float32)


def _nhwc(images: np.ndarray) -> jax.Array:
    return _float32(images).transpose(0, 2, 3, 1)


def _error(ours: jax.Array | None, reference: np.ndarray | None) -> float | None:
    if ours is None or reference is None:
        return None
    reference_nhwc = _nhwc(reference)
    if reference_nhwc.shape != ours.shape:
        raise ValueError(f"the case's output is {reference_nhwc.shape}, and ours {ours.shape}")
    return float(jnp.abs(ours - reference_nhwc).max())


def main(argv: list[str]) -> None:
    """Runs `verify`."""
    if len(argv) != 3 or argv[1] != "verify":
        raise app.UsageError("Usage: python -m imagen_jax.weights verify CASE.npz")
    try:
        errors = verify(torch_weights.read(argv[2]))
    except (ValueError, TypeError, KeyError, OSError) as error:
        print(f"error: cannot verify {argv[2]}: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(errors))
    sys.exit(0 if within_tolerance(errors) else 1)


if __name__ == "__main__":
    app.run(main)
