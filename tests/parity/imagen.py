"""Comparison of Imagen's UNets with saved cases from NVIDIA NeMo.

A case is an .npz file with arrays in torch's layouts:
- `config`: NeMo's config as JSON.
- `sd/NAME`: the weights, with NeMo's names.
- `in/x`, `in/time`, `in/text_embed` and `in/text_mask`: the inputs. UNets for super-resolution also
  have `in/x_low_res` and, with noise augmentation, `in/time_low_res`.
- `out/y`: NeMo's output.
- `out/y_cfg3` (optional): the output with classifier-free guidance 3.
- `grad/x` (optional): the gradient of sum(y * `in/cot`) with respect to x.
"""

import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from imagen_jax.efficient_unet import EfficientUNet
from imagen_jax.unet import UNet
from imagen_jax.weights import nemo
from tests.parity import compare

TOLERANCE = {"max_abs_error": 3e-5, "cfg_max_abs_error": 3e-5, "grad_max_abs_error": 1e-4}
"""Largest absolute errors allowed: of `out/y`, `out/y_cfg3` and `grad/x`."""


def verify(case: Mapping[str, np.ndarray]) -> dict[str, float | int | None]:
    """Return the largest absolute errors of a case (the keys of TOLERANCE), and "parameters".

    Errors are None if the case lacks the output, and infinite or NaN if this project's output is.
    Raises ValueError if the case does not have the format that the module's docstring describes, or
    its config is invalid.
    """
    _check_case(case)
    unet = nemo.unet_from_config(json.loads(case["config"].item()))
    inputs = _case_inputs(case, unet)
    state = {n.removeprefix("sd/"): a for n, a in case.items() if n.startswith("sd/")}
    params = nemo.from_nemo(state, unet, inputs["text"].shape[-1])

    cot = _nhwc(case["in/cot"]) if "grad/x" in case else None

    @jax.jit
    def run(params, inputs):
        apply = lambda x: unet.apply(params, **(inputs | {"x": x}))
        if cot is None:
            return apply(inputs["x"]), None
        y, pullback = jax.vjp(apply, inputs["x"])
        return y, pullback(cot)[0]

    with jax.default_matmul_precision("highest"):
        y, gradient = run(params, inputs)
        null, _ = run(params, inputs | {"text": jnp.zeros_like(inputs["text"])})
    errors = {
        "max_abs_error": _error(y, case["out/y"]),
        "cfg_max_abs_error": _error(null + 3 * (y - null), case.get("out/y_cfg3")),
        "grad_max_abs_error": _error(gradient, case.get("grad/x")),
    }
    return errors | {"parameters": compare.count(params)}


def _check_case(case: Mapping[str, np.ndarray]) -> None:
    needed = ["config", "in/x", "in/time", "in/text_embed", "in/text_mask", "out/y"]
    if "grad/x" in case:
        needed.append("in/cot")
    missing = [name for name in needed if name not in case]
    if not any(name.startswith("sd/") for name in case):
        missing.append("sd/<parameter>")
    if missing:
        raise ValueError(f"the case lacks {', '.join(missing)}: it holds {', '.join(sorted(case)[:8])} ...")


def _case_inputs(case: Mapping[str, np.ndarray], unet: UNet | EfficientUNet) -> dict[str, jax.Array]:
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
            raise ValueError(f"the case lacks {key}, which its config requires")
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
        raise ValueError(f"the case's output has shape {reference_nhwc.shape}, but ours has {ours.shape}")
    return float(jnp.abs(ours - reference_nhwc).max())
