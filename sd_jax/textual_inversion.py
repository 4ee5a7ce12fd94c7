"""Textual inversion (Gal et al. 2022): train the vectors of a new word, and freeze all networks.

The config's text.learned_tokens names the word. Only its vectors and the learned loss weighting
(see objective.LEARNED_WEIGHTING) are trained, averaged and saved. The gradient passes through the
UNet and CLIP, which computes the text in every step.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from diffusion_jax.task import Params, Task
from diffusion_jax.text.encoder import LEARNED_WORD


def adapt(task: Task, base: Params) -> Task:
    """Return a task that trains the vectors of the text encoder's new word, and freezes `base`.

    `base` holds the UNet's parameters, or only their shapes if the task is only traced.
    """
    initial = task.frozen["text"]["params"][LEARNED_WORD]

    def init(key):
        others = {name: tree for name, tree in task.init(key).items() if name != "params"}
        has_values = isinstance(initial, np.ndarray)  # Otherwise, only the shapes matter.
        return {LEARNED_WORD: jnp.asarray(initial) if has_values else jnp.zeros(initial.shape), **others}

    return task._replace(
        init=init,
        loss=with_word(task.loss),
        sample=with_word(task.sample),
        frozen={"task": task.frozen, "base": base},
        measure=task.measure and task.measure._replace(errors=with_word(task.measure.errors)),
        sampler_inputs=task.sampler_inputs and with_word(task.sampler_inputs),
        constrain=lambda params: params,
        shown=lambda frozen, batch: task.shown(frozen["task"], batch),
    )


def with_word(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of a Task to take the vectors of a word instead of the UNet's parameters.

    The wrapped function expects the UNet in frozen["base"], and the task's own frozen weights in
    frozen["task"]. These may hold the vectors of further words after the trained ones.
    """

    def adapted(params, frozen, *arguments):
        others = {name: tree for name, tree in params.items() if name != LEARNED_WORD}
        text = frozen["task"]["text"]
        words = jnp.asarray(text["params"][LEARNED_WORD]).at[: len(params[LEARNED_WORD])]
        text = {**text, "params": {**text["params"], LEARNED_WORD: words.set(params[LEARNED_WORD])}}
        whole = {**frozen["base"], **others}
        return function(whole, {**frozen["task"], "text": text}, *arguments)

    return adapted
