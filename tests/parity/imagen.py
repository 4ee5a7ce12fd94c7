"""The proof that weights give the same numbers here as in NeMo: saved cases, computed again.

A case holds NeMo's config as JSON (`config`), its state dict under `sd/`, inputs under `in/`,
outputs under `out/` and the input's gradient under `grad/x`, arrays in torch's layouts.
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


def verify(case: Mapping[str, np.ndarray]) -> dict[str, float | int | None]:
    """The largest absolute errors of a saved case, and the number of parameters.

    The module's docstring tells the format. ValueError where the case or its config is not as it
    says. Errors that are not finite stay so.
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
        raise ValueError(
            f"the case lacks {', '.join(missing)}: it holds {', '.join(sorted(case)[:8])} ..."
        )


def _case_inputs(
    case: Mapping[str, np.ndarray], unet: UNet | EfficientUNet
) -> dict[str, jax.Array]:
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
