"""Comparison of T5 and CLIP with saved cases from reference implementations.

A case is an .npz file. `w/NAME` are the weights, with the names of Hugging Face or OpenCLIP. Their
names also tell whether the case is for T5 or CLIP. `__meta__` is the config as JSON. The inputs are
`ids`, `mask` and `image` (normalized, [N, C, H, W]), optionally with the prefix `in/`. All other
arrays are outputs, optionally with the prefix `out/`. Every output with a known name is compared:
- T5: `last_hidden_state`, and `hidden_0`, `hidden_1`, ... for the layers. A case may have more
  texts: for the input `NAME_ids` (and optionally `NAME_mask`), the output `NAME`.
- CLIP's text tower: `last_hidden_state` (or `last`), `penultimate`, `hidden_0`, ..., `pooled` and
  `text_features`.
- CLIP's image tower: `image_features`. If the case has no text tower, also `last_hidden_state`,
  `hidden_0`, ... and `pooled`.
- Both towers: `clip_score` [images, texts], the cosines of their features.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax.metrics.clip_score import normalised
from diffusion_jax.text import clip, clip_weights, t5
from diffusion_jax.weights import torch_weights
from tests.parity import compare

TOLERANCE = {"max_relative_error": 1e-5}
"""Largest error allowed, relative to the largest absolute value of the reference's output."""
Arrays = Mapping[str, np.ndarray]


def verify(case: Arrays) -> dict[str, float | int]:
    """Return the relative error of each output, "max_relative_error" and "parameters".

    "max_relative_error" is the largest error, and "parameters" the number of parameters. Raises
    ValueError if the case does not have the format that the module's docstring describes.
    """
    weights = _under(case, ("w/", "sd/", "weights/"))
    if not weights:
        raise ValueError(f"the case lacks weights under w/: it holds {', '.join(sorted(case)[:8])}")
    others = {n: a for n, a in case.items() if not n.startswith(("w/", "sd/", "weights/"))}
    inputs = {n.removeprefix("in/"): a for n, a in others.items() if not n.startswith("out/")}
    outputs = {n.removeprefix("out/"): a for n, a in others.items() if not n.startswith("in/")}
    config = _config(case)
    run = _t5 if any("DenseReluDense" in name for name in weights) else _clip
    with jax.default_matmul_precision("highest"):
        known, parameters = run(weights, config, inputs)
    errors = {n: _error(n, known[n], outputs[n]) for n in sorted(known) if n in outputs}
    if not errors:
        raise ValueError(f"the case holds no output that can be compared: add one of {', '.join(sorted(known))}")
    worst = max(errors.values(), key=lambda e: np.inf if np.isnan(e) else e)
    return {**errors, "max_relative_error": worst, "parameters": parameters}


def _config(case: Arrays) -> dict[str, Any]:
    text = next((case[n] for n in ("__meta__", "config", "meta") if n in case), None)
    if text is None:
        raise ValueError("the case lacks __meta__, its config as JSON")
    config = json.loads(str(text))
    return config.get("config", config)


def _t5(weights: Arrays, config: Mapping[str, Any], inputs: Arrays):
    model, table = t5.from_state(weights, config)
    params = torch_weights.to_params(t5.used(weights), table, t5.abstract_params(model))
    states = jax.jit(lambda p, i, m: model.apply(p, i, m, method="hidden_states"))
    known: dict[str, Any] = {}
    for name in inputs:
        prefix = re.fullmatch(r"(\w+_)?(input_)?ids", name)
        if not prefix:
            continue
        ids, start = inputs[name].astype(np.int32), prefix[1] or ""
        mask = _first(inputs, f"{start}mask", f"{start}attention_mask")
        hidden = states(params, ids, np.ones_like(ids) if mask is None else mask)
        known |= {f"{start}hidden_{i}": h for i, h in enumerate(hidden)}
        known |= {f"{start}last_hidden_state": hidden[-1], start.rstrip("_"): hidden[-1]}
    return _some(known, "ids"), compare.count(params)


def _clip(weights: Arrays, config: Mapping[str, Any], inputs: Arrays):
    opened = clip_weights.from_state(weights, config)
    known: dict[str, Any] = {}
    count = 0
    ids = _first(inputs, "ids", "input_ids", "text_ids")
    images = _first(inputs, "image", "images", "pixel_values")
    if clip_weights.TEXT in opened.towers and ids is not None:
        tower, table = clip.text_tower(opened)
        params = _load(opened, table, clip.abstract_params(tower))
        mask = _first(inputs, "mask", "attention_mask")
        out = jax.jit(tower.apply)(params, ids.astype(np.int32), mask)
        known |= {
            **dict.fromkeys(("last_hidden_state", "last"), out.last),
            **dict.fromkeys(_PENULTIMATE, out.penultimate),
            **dict.fromkeys(("pooled", "pooler_output"), out.pooled),
            **{f"hidden_{i}": h for i, h in enumerate(out.layers)},
            **dict.fromkeys(("text_features", "text_embeds"), out.projected),
        }
        count += compare.count(params)
    if clip_weights.VISION in opened.towers and images is not None:
        tower, table = clip.image_tower(opened)
        params = _load(opened, table, clip.abstract_params(tower))
        pixels = jnp.asarray(images, jnp.float32).transpose(0, 2, 3, 1)
        out = jax.jit(tower.apply)(params, pixels)
        alone = (
            {}
            if clip_weights.TEXT in opened.towers
            else {
                **dict.fromkeys(("last_hidden_state", "last"), out.last),
                **dict.fromkeys(("pooled", "pooler_output"), out.pooled),
                **{f"hidden_{i}": h for i, h in enumerate(out.layers)},
            }
        )
        named = {"image_last_hidden_state": out.last, "image_pooled": out.pooled}
        features = dict.fromkeys(("image_features", "image_embeds"), out.projected)
        known |= {**alone, **named, **features}
        count += compare.count(params)
    known = {name: value for name, value in known.items() if value is not None}
    if "image_features" in known and "text_features" in known:
        images, texts = (
            normalised(np.asarray(known[name], np.float64)) for name in ("image_features", "text_features")
        )
        known["clip_score"] = images @ texts.T
    return _some(known, "ids or an image"), count


_PENULTIMATE = ("penultimate", "penultimate_ln", "hf_last_hidden_state")


def _load(opened: clip_weights.ClipWeights, table: list[torch_weights.Entry], abstract: Any) -> Any:
    return torch_weights.to_params(clip_weights.tower_state(opened, table), table, abstract)


def _under(case: Arrays, prefixes: tuple[str, ...]) -> dict[str, np.ndarray]:
    return {n.partition("/")[2]: a for n, a in case.items() if n.startswith(prefixes)}


def _first(inputs: Arrays, *names: str) -> np.ndarray | None:
    return next((inputs[name] for name in names if name in inputs), None)


def _some(known: dict[str, Any], needed: str) -> dict[str, Any]:
    if not known:
        raise ValueError(f"the case lacks inputs: it needs {needed}")
    return known


def _error(name: str, ours: jax.Array, reference: np.ndarray) -> float:
    if ours.shape != reference.shape:
        raise ValueError(f"the case's {name} has shape {reference.shape}, but ours has {ours.shape}")
    largest = np.abs(reference).max()
    return float(np.abs(np.asarray(ours) - reference).max() / (largest or 1))
