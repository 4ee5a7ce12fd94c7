"""Comparison of Stable Diffusion's UNet and VAE with saved cases from reference implementations.

A case is an .npz file with arrays in torch's layouts. `w/NAME` are the weights, with the names of
LDM, NeMo or diffusers. `__meta__` is JSON with `config`, which has LDM's or diffusers' fields, and
for an LDM UNet also `norm_groups`. The other arrays are inputs and outputs. Every output that the
case contains is compared.

Outputs of a UNet, with their inputs in brackets:
- `y` (`x`, `t`, `ctx`), `y_frac` (`x`, `t_frac`, `ctx`), `y_ctx_padded` (`x`, `t`, `ctx_padded`).
- `y_ns` (`x_ns`, `t_ns`, `ctx`): `t_ns` is 500 by default. If `x_ns` has fewer rows than `ctx`,
  only the first rows of `ctx` are used.
- `act/NAME`: outputs of blocks in the computation of `y`.
- `loss_eps` and `loss_v` (clean latents `x`, `noise`, `t`, `ctx`): means over all elements.
- `grad_eps/NAME` and `grad_v/NAME`: gradients of these losses with respect to the weights.
- `gnorm_eps/NAME` and `gnorm_v/NAME`: norms of these gradients.

Outputs of a VAE, with their inputs in brackets:
- `encoder_out` (`x`): the encoder's output before quant_conv.
- `moments`, `mean` and `std` (`x`): the moments, and the mean and standard deviation they encode.
- `sample` and `latent_scaled` (`x`, noise `n`): a sample, and the sample times the scaling factor.
- `decode` (`z`): the decoder's output.
- `std_x40` (`moments_x40`): the standard deviation of given moments.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax.diffusion import noise, precond
from sd_jax import vae
from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import formats, names
from tests.parity import compare

TOLERANCE = {"max_relative_error": 3e-5, "grad_max_relative_error": 1e-4}
"""Largest errors allowed, relative to the largest absolute value of the reference's array."""
Arrays = Mapping[str, np.ndarray]
_WEIGHTS = ("w/", "sd/", "weights/")


def verify(case: Arrays) -> dict[str, float | int | None]:
    """Return the relative errors of a case, and the number of "parameters".

    The errors are those of each output by name (without activations and gradients), the largest of
    all outputs and activations ("max_relative_error"), and the largest of all gradients
    ("grad_max_relative_error"; None without gradients). They are infinite or NaN if this project's
    output is. Raises ValueError if the case does not have the format that the module's docstring
    describes.
    """
    weights = {name.partition("/")[2]: a for name, a in case.items() if name.startswith(_WEIGHTS)}
    others = {
        name.removeprefix("in/").removeprefix("out/"): array
        for name, array in case.items()
        if not name.startswith(_WEIGHTS)
    }
    if not weights:
        raise ValueError(f"the case lacks weights under w/: it holds {_few(case)}")
    weights = {name: np.asarray(w, np.float32) for name, w in weights.items()}
    meta = _meta(others)
    with jax.default_matmul_precision("highest"):
        if "encoder.conv_in.weight" in weights:
            outputs, parameters = _vae(weights, meta, others)
        else:
            outputs, parameters = _unet(weights, meta, others)
    pairs = {name: (np.asarray(ours), others[name]) for name, ours in outputs.items()}
    if not pairs:
        raise ValueError(f"the case holds no output that can be compared: it holds {_few(others)}")
    return _report(pairs) | {"parameters": parameters}


def _unet(weights: Arrays, meta: Mapping[str, Any], case: Arrays) -> tuple[dict[str, Any], int]:
    if "block_out_channels" in meta["config"]:
        unet = formats.unet_from_diffusers(meta["config"])
    else:
        unet = formats.unet_from_ldm(meta["config"], meta.get("norm_groups"))
    dialect, width = names.unet_dialect(weights), names.text_width(weights)
    params = names.unet_from_torch(weights, unet, width)
    params = jax.tree.map(jnp.asarray, params)
    outputs = _unet_outputs(unet, params, case)
    for predicts in ("eps", "v"):
        if f"loss_{predicts}" in case:
            outputs |= _losses(unet, params, case, predicts, dialect)
    return outputs, compare.count(params)


def _unet_outputs(unet: UNet, params: Any, case: Arrays) -> dict[str, jax.Array]:
    @jax.jit
    def run(params, x, t, text):
        layers = lambda module, method: method == "__call__"
        return unet.apply(params, x, t, text, capture_intermediates=layers, mutable="intermediates")

    outputs = {}
    kinds = {
        "y": ("x", "t", "ctx"),
        "y_frac": ("x", "t_frac", "ctx"),
        "y_ns": ("x_ns", "t_ns", "ctx"),
        "y_ctx_padded": ("x", "t", "ctx_padded"),
    }
    case = {"t_ns": np.full(len(case.get("x_ns", ())), 500)} | dict(case)
    for name, inputs in kinds.items():
        if name not in case:
            continue
        x, t, text = (_needed(case, key) for key in inputs)
        t, text = np.asarray(t, np.float32), np.asarray(text, np.float32)
        y, state = run(params, _nhwc(x), jnp.asarray(t[: len(x)]), jnp.asarray(text[: len(x)]))
        outputs[name] = _nchw(y)
        if name == "y":
            outputs |= _activations(unet, state["intermediates"], case)
    return outputs


def _activations(unet: UNet, captured: Any, case: Arrays) -> dict[str, jax.Array]:
    values = {}
    for theirs, ours in names.activations(unet).items():
        if f"act/{theirs}" in case:
            value = captured[ours]["__call__"][0]
            values[f"act/{theirs}"] = _nchw(value) if value.ndim == 4 else value
    return values


def _losses(unet: UNet, params: Any, case: Arrays, predicts: str, dialect: str) -> dict[str, jax.Array | np.ndarray]:
    table = noise.ldm_log_alphas()
    sigma = noise.sigma_at(table, jnp.asarray(_needed(case, "t"), jnp.float32))
    kind = precond.epsilon if predicts == "eps" else precond.velocity
    x0, eps, text = (_needed(case, key) for key in ("x", "noise", "ctx"))
    arrays = (_nhwc(x0), _nhwc(eps), sigma, jnp.asarray(text), kind(noise.time_of(table))(sigma))
    loss, gradient = _loss_and_gradient(unet)(params, *arrays)
    gradients = names.unet_to_torch(gradient, unet, dialect)
    norms = {name: np.linalg.norm(g) for name, g in gradients.items()}
    known = {f"loss_{predicts}": loss}
    known |= {f"grad_{predicts}/{name}": g for name, g in gradients.items()}
    known |= {f"gnorm_{predicts}/{name}": n for name, n in norms.items()}
    return {name: value for name, value in known.items() if name in case}


_compiled: dict[UNet, Callable] = {}


def _loss_and_gradient(unet: UNet) -> Callable:
    """Return a compiled function that computes (loss, gradient).

    The losses for eps and v share this function, because they differ only in the values of its
    argument `scalings`.
    """

    def loss(params, x0, eps, sigma, text, scalings):
        def network(x, t) -> Any:
            return unet.apply(params, x, t, text)

        return precond.loss(network, lambda _: scalings, x0, eps, sigma).mean()

    return _compiled.setdefault(unet, jax.jit(jax.value_and_grad(loss)))


def ldm_vae(config: Mapping[str, Any]) -> VAE:
    """Return the VAE that an LDM ddconfig describes, or a config that contains a ddconfig."""
    config = config.get("ddconfig", config)
    return VAE(
        width=config["ch"],
        channel_mult=tuple(config["ch_mult"]),
        num_res_blocks=config["num_res_blocks"],
        latent_channels=config["z_channels"],
    )


def _vae(weights: Arrays, meta: Mapping[str, Any], case: Arrays) -> tuple[dict[str, Any], int]:
    config = meta["config"]
    model = formats.vae_from_diffusers(config) if "block_out_channels" in config else ldm_vae(config)
    params = jax.tree.map(jnp.asarray, names.vae_from_torch(weights, model))
    known: dict[str, jax.Array] = {}
    if "x" in case:
        known |= _encoded(model, params, case)
    if "moments_x40" in case:
        known["std_x40"] = _nchw(vae.mean_and_std(_nhwc(case["moments_x40"]))[1])
    if "decode" in case:
        decode = jax.jit(lambda params, z: model.apply(params, z, method="decode"))
        known["decode"] = _nchw(decode(params, _nhwc(_needed(case, "z"))))
    return {name: value for name, value in known.items() if name in case}, compare.count(params)


def _encoded(model: VAE, params: Any, case: Arrays) -> dict[str, jax.Array]:
    @jax.jit
    def encode(params, x):
        layers = lambda module, method: module.name == "out_conv"
        # model.encode rejects sizes that cannot be halved at each level. For such sizes, the
        # reference drops the last pixels.
        encoder = lambda model, x: model.encoder(x)
        return model.apply(params, x, method=encoder, capture_intermediates=layers, mutable="intermediates")

    moments, state = encode(params, _nhwc(case["x"]))
    before_quant = state["intermediates"]["encoder"]["out_conv"]["__call__"][0]
    mean, std = vae.mean_and_std(moments)
    known = {"encoder_out": before_quant, "moments": moments, "mean": mean, "std": std}
    if "n" in case:
        known["sample"] = vae.sample(moments, _nhwc(case["n"]))
        known["latent_scaled"] = vae.SCALE * known["sample"]
    return {name: _nchw(value) for name, value in known.items()}


def _report(pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, float | None]:
    for name, (ours, theirs) in pairs.items():
        if ours.shape != theirs.shape:
            raise ValueError(f"the case's {name} has shape {theirs.shape}, but ours has {ours.shape}")
    of_outputs, of_gradients = {}, {}
    sizes = {name: float(np.max(np.abs(theirs), initial=0)) for name, (_, theirs) in pairs.items()}
    largest: dict[str, float] = {}
    for name, size in sizes.items():
        kind = name.partition("/")[0]
        largest[kind] = max(size, largest.get(kind, 0))
    for name, (ours, theirs) in pairs.items():
        error = float(np.max(np.abs(ours - np.float64(theirs)), initial=0))
        is_gradient = name.startswith(("grad_", "gnorm_"))
        # A gradient's error is relative to its own largest value. A gradient below 1e-3 of the
        # largest gradient may be pure rounding, so its error is relative to this limit.
        floor = 1e-3 * largest[name.partition("/")[0]] if is_gradient else 0
        errors = of_gradients if is_gradient else of_outputs
        errors[name] = error / max(sizes[name], floor, 1e-30)
    listed = {name: e for name, e in of_outputs.items() if not name.startswith("act/")}
    return {
        **listed,
        "max_relative_error": _worst(of_outputs.values()),
        "grad_max_relative_error": _worst(of_gradients.values()),
    }


def _worst(errors: Any) -> float | None:
    return max(errors, key=lambda e: np.inf if np.isnan(e) else e, default=None)


def _meta(case: Arrays) -> dict[str, Any]:
    text = next((case[name] for name in ("__meta__", "config", "meta") if name in case), None)
    if text is None:
        raise ValueError(f"the case lacks __meta__: it holds {_few(case)}")
    meta = json.loads(text.item())
    if not isinstance(meta, dict):
        raise ValueError(f"the case's __meta__ is a {type(meta).__name__}: write a JSON object")
    return meta if isinstance(meta.get("config"), dict) else {**meta, "config": meta}


def _needed(case: Arrays, name: str) -> np.ndarray:
    if name not in case:
        raise ValueError(f"the case lacks {name}: it holds {_few(case)}")
    return case[name]


def _nhwc(images: np.ndarray) -> jax.Array:
    return jnp.asarray(images, jnp.float32).transpose(0, 2, 3, 1)


def _nchw(images: jax.Array) -> jax.Array:
    return images.transpose(0, 3, 1, 2)


def _few(arrays: Mapping[str, Any]) -> str:
    return ", ".join(sorted(arrays)[:8]) + (" ..." if len(arrays) > 8 else "")
