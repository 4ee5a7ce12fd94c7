"""LoRA (Hu et al. 2021): convert a Task so that it trains low-rank factors of frozen weights.

A kernel W [..., in, out] becomes W + scale * alpha / rank * down @ up, with down [..., in, rank]
and up [rank, out]. For a convolution, this adds a convolution to `rank` channels followed by a 1x1
convolution. `up` starts at 0, so that at step 0 the model computes the same as without LoRA. Only
the factors and the learned loss weighting (see objective.LEARNED_WEIGHTING) are trained, averaged
and saved.
"""

import difflib
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PRNGKeyArray

from diffusion_jax.config.settings import Lora
from diffusion_jax.devices.sharding import FSDP
from diffusion_jax.task import Params, Task

FACTORS, _NETWORK, _KERNEL = "lora", "params", "kernel"
ArrayShape = tuple[int, ...]


def adapt(task: Task, base: Params, s: Lora) -> Task:
    """Return a task that trains factors for the layers that s.targets selects, and freezes `base`.

    `base` holds the network's parameters, or only their shapes if the task is only traced. s.scale
    affects sampling, but not training. Raises ValueError if no layer matches s.targets or s.rank is
    too large.
    """
    layers(base, s)  # Raise errors before anything compiles.
    training = functools.partial(_merged, scale=s.alpha_by_rank)

    def loss(params, frozen, batch, keys):
        return task.loss(training(frozen["base"], params), frozen["task"], batch, keys)

    def errors(params, frozen, batch, keys, sigma):
        assert task.measure is not None
        whole = training(frozen["base"], params)
        return task.measure.errors(whole, frozen["task"], batch, keys, sigma)

    return task._replace(
        init=lambda key: init(key, task.init(key), s),
        loss=loss,
        sample=drawn(task.sample, s),
        frozen={"task": task.frozen, "base": base},
        rules=[(r"/(down|up)$", FSDP), *task.rules],
        measure=task.measure and task.measure._replace(errors=errors),
        sampler_inputs=task.sampler_inputs and drawn(task.sampler_inputs, s),
        constrain=lambda params: params,
        shown=lambda frozen, batch: task.shown(frozen["task"], batch),
    )


def drawn(function: Callable[..., Any], s: Lora) -> Callable[..., Any]:
    """Wrap a Task's `sample` or `sampler_inputs` to take LoRA factors instead of full parameters.

    The wrapped function expects the weights to adapt in frozen["base"], and the task's own frozen
    weights in frozen["task"]. It multiplies the factors' product by s.scale * alpha / rank.
    """
    whole = functools.partial(_merged, scale=s.scale * s.alpha_by_rank)

    def adapted(params, frozen, *arguments):
        return function(whole(frozen["base"], params), frozen["task"], *arguments)

    return adapted


def init(key: PRNGKeyArray, params: Params, s: Lora) -> Params:
    """Return the initial factors for the layers of `params` that s.targets selects.

    `down` is drawn from U(-1, 1) / sqrt(fan_in), as torch and peft initialise a linear layer. `up`
    is 0. The learned loss weighting in `params` is returned unchanged.
    """
    factors = {}
    for number, (path, shape) in enumerate(layers(params, s).items()):
        limit, key_down = math.prod(shape[:-1]) ** -0.5, jax.random.fold_in(key, number)
        down = jax.random.uniform(key_down, (*shape[:-1], s.rank), minval=-limit, maxval=limit)
        factors[path] = {"down": down, "up": jnp.zeros((s.rank, shape[-1]))}
    learned = {name: tree for name, tree in params.items() if name != _NETWORK}
    return {FACTORS: unflatten_dict(factors, sep="/"), **learned}


def merge(base: Params, params: Params, s: Lora) -> Params:
    """Return the parameters of the full network: the weights `base` plus the LoRA's change.

    `params` holds the factors. The change is their product, times s.scale * alpha / rank.
    """
    return _merged(base, params, s.scale * s.alpha_by_rank)


def flat(params: Params) -> dict[str, dict[str, Any]]:
    """Return the factors {"down": ..., "up": ...} of each layer, keyed by the layer's path."""
    pairs: dict[str, dict[str, Any]] = {}
    for path, array in flatten_dict(params[FACTORS], sep="/").items():
        layer, _, name = path.rpartition("/")
        pairs.setdefault(layer, {})[name] = array
    return pairs


def layers(params: Params, s: Lora) -> dict[str, ArrayShape]:
    """Return the kernel shapes of all layers whose path matches s.targets, keyed by path.

    Raises ValueError if no path matches, or if s.rank exceeds the largest possible rank of a
    matching kernel, min(product of the other dimensions, out).
    """
    leaves: dict[str, Any] = flatten_dict(params[_NETWORK], sep="/")
    kernels = {
        path.removesuffix(f"/{_KERNEL}"): tuple(leaf.shape)
        for path, leaf in leaves.items()
        if path.endswith(f"/{_KERNEL}")
    }
    if not kernels:
        raise ValueError("this network has no layers that LoRA can adapt: train all weights with lora.rank=0")
    try:
        chosen = {path: shape for path, shape in kernels.items() if re.search(s.targets, path)}
    except re.error as error:
        raise ValueError(f"lora.targets is {s.targets!r}, which is not a regular expression: {error}") from None
    if not chosen:
        near = difflib.get_close_matches(s.targets, kernels, n=3, cutoff=0) or list(kernels)[:3]
        raise ValueError(
            f"lora.targets is {s.targets!r}, which matches none of the {len(kernels)} layers: "
            f"the expression must match paths such as {', '.join(near)}"
        )
    for path, shape in chosen.items():
        if s.rank > min(math.prod(shape[:-1]), shape[-1]):
            raise ValueError(
                f"lora.rank is {s.rank}, but the kernel of {path} has shape {shape}, "
                f"so its rank is {min(math.prod(shape[:-1]), shape[-1])} at most: lower lora.rank, "
                "or exclude this layer with lora.targets"
            )
    return chosen


def _merged(base: Params, params: Params, scale: float) -> Params:
    kernels: dict[str, Any] = flatten_dict(base[_NETWORK], sep="/")
    for path, pair in flat(params).items():
        name = f"{path}/{_KERNEL}"
        # Use float32 even if matmuls default to bfloat16. The cost is negligible.
        product = jnp.matmul(pair["down"], pair["up"], precision=jax.lax.Precision.HIGHEST)
        kernels[name] = kernels[name] + scale * product
    learned = {name: tree for name, tree in params.items() if name != FACTORS}
    return {_NETWORK: unflatten_dict(kernels, sep="/"), **learned}
