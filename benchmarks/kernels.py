"""Compare the speed and memory of optimized operations with straightforward implementations.

    python -m benchmarks.kernels --batch=4 --size=32 --width=128

For each implementation, the command compiles a program that computes the operation and its
gradients. It prints the program's median time in milliseconds and its temporary memory in MiB. It
also checks that all implementations of an operation return the same numbers.
"""

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from benchmarks import measure
from diffusion_jax import cli
from diffusion_jax.nn import ops
from diffusion_jax.train import optimizer

flags.adopt_module_key_flags(measure)
_BATCH = flags.DEFINE_integer("batch", 4, "Number of images.", lower_bound=1)
_SIZE = flags.DEFINE_integer("size", 32, "Side of the images in pixels.", lower_bound=2)
_WIDTH = flags.DEFINE_integer("width", 128, "Channels, a multiple of 32.", lower_bound=32)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Dtype of images and kernels."
)
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed calls.", lower_bound=1)
_NHWC = ("NHWC", "HWIO", "NHWC")


def main(argv: list[str]) -> None:
    """Measure all implementations of each operation, and print the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: write flags as --NAME=VALUE", 2)
    if _WIDTH.value % 32:
        raise app.UsageError(f"--width={_WIDTH.value}: it must be a multiple of 32", 2)
    measure.say(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {_DTYPE.value}")
    measure.say("| operation | form | ms | temporary MiB |\n|---|---|---|---|")
    for name, (variants, arguments) in _cases().items():
        reference = None
        for variant, function in variants.items():
            seconds, memory, out = _measure(function, arguments)
            measure.say(f"| {name} | {variant} | {1e3 * seconds:.1f} | {memory / 2**20:.1f} |")
            reference = out if reference is None else reference
            _check(name, variant, out, reference)
    for variant, seconds in _updates().items():
        measure.say(
            f"| AdamW and one average, 4 M parameters | {variant} | {1e3 * seconds:.1f} | |"
        )


def _cases() -> dict[str, tuple[dict[str, Callable], tuple]]:
    b, s, c = int(_BATCH.value), int(_SIZE.value), int(_WIDTH.value)
    x, up = _normal(b, s, s, c), _normal(4, 4, c, c) / (4 * c**0.5)
    vector, rows = _normal(c), jnp.float32(_normal(b, c))
    norm = (x, vector, vector, rows, rows)
    few, first, last = _normal(b, s, s, 3), _normal(3, 3, 3, c), _normal(3, 3, c, 3) / c
    return {
        "convolution 4x4, stride 2, transposed": (
            {"lax.conv_transpose": _dilated, "one 2x2": _one, "four 2x2 (ours)": _four},
            (x, up),
        ),
        "group norm, scale and shift, SiLU": (
            {"differentiated": _plain_norm, "own gradient (ours)": _own_norm},
            norm,
        ),
        "convolution 3x3, 3 to many channels": (
            {"plain (ours)": _conv, "padded to 8": _padded_input},
            (few, first),
        ),
        "convolution 3x3, many to 3 channels": (
            {"plain (ours)": _conv, "padded to 8": _padded_output},
            (x, last),
        ),
    }


def _measure(function: Callable, arguments: tuple) -> tuple[float, int, tuple]:
    """Compile a function with its gradients, and time the program.

    Returns (median seconds, temporary bytes, (value, gradients)). The value is the sum of the
    function's output times random numbers.
    """
    cotangent = _normal(*jax.eval_shape(function, *arguments).shape)
    loss = lambda cotangent, *a: (function(*a).astype(jnp.float32) * cotangent).sum()
    step = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(1, len(arguments) + 1))))
    arguments = (cotangent, *arguments)
    compiled = step.lower(*arguments).compile()
    memory: Any = compiled.memory_analysis()
    return _seconds(compiled, *arguments), memory.temp_size_in_bytes, compiled(*arguments)


def _updates() -> dict[str, float]:
    """Time updates of the parameters (with AdamW) and of an average of the parameters.

    One variant compiles the two updates as two programs, the other compiles both as one program.
    Returns the median seconds by variant. The parameters are 64 kernels of 256 x 256.
    """
    params = {str(i): jnp.full((256, 256), 1.0 + i) for i in range(64)}
    tx = optimizer.adamw(optimizer.warmup_constant(1e-4, 1))
    state, ema = tx.init(params), jax.tree.map(jnp.copy, params)

    def update(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    def average(ema, params):
        return jax.tree.map(lambda e, p: 0.999 * e + 0.001 * p, ema, params)

    def both(params, state, ema):
        params, state = update(params, state)
        return params, state, average(ema, params)

    first, second, one = jax.jit(update), jax.jit(average), jax.jit(both)

    def apart(params, state, ema):
        params, state = first(params, state)
        return params, state, second(ema, params)

    return {
        "two programs": _seconds(apart, params, state, ema),
        "one (ours)": _seconds(one, params, state, ema),
    }


def _seconds(function: Callable, *arguments: Any) -> float:
    """Return the median seconds of --repeats calls, after one call as warm-up."""
    return statistics.median(measure.rounds(lambda: function(*arguments), int(_REPEATS.value)))


def _check(name: str, variant: str, out: tuple, reference: tuple) -> None:
    for ours, theirs in zip(jax.tree.leaves(out), jax.tree.leaves(reference), strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        error, largest = np.abs(ours - theirs).max(), np.abs(theirs).max()
        if error > (0.05 if _DTYPE.value == "bfloat16" else 1e-3) * largest:
            raise AssertionError(
                f"{name}: the results of {variant!r} differ from those of the first form by up to "
                f"{error}, which is too much for values of up to {largest}"
            )


def _normal(*shape: int) -> jax.Array:
    values = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    return jnp.asarray(values, _DTYPE.value)


def _dilated(x, kernel):
    flipped = kernel[::-1, ::-1]
    return jax.lax.conv_general_dilated(
        x, flipped, (1, 1), ((2, 2), (2, 2)), lhs_dilation=(2, 2), dimension_numbers=_NHWC
    )


def _one(x, kernel):
    (b, h, w, c), d = x.shape, kernel.shape[-1]
    phases = kernel[::-1, ::-1].reshape(2, 2, 2, 2, c, d)  # [row, i, column, j, C, D]
    phases = phases.transpose(0, 2, 4, 1, 3, 5).reshape(2, 2, c, 4 * d)
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    out = jax.lax.conv_general_dilated(x, phases, (1, 1), "VALID", dimension_numbers=_NHWC)
    out = out.reshape(b, h + 1, w + 1, 2, 2, d)
    rows = jnp.stack([out[:, i : i + h, :, i] for i in (0, 1)], axis=2)  # [B, H, 2, W+1, 2, D]
    out = jnp.stack([rows[:, :, :, j : j + w, j] for j in (0, 1)], axis=4)
    return out.reshape(b, 2 * h, 2 * w, d)


def _four(x, kernel):
    return ops.conv_transpose_4x4(x, kernel, jnp.zeros(kernel.shape[-1], x.dtype))


def _own_norm(x, weight, bias, scale, shift):
    return ops.group_norm(x, weight, bias, scale, shift, silu=True)


def _plain_norm(x, weight, bias, scale, shift):
    b, c = x.shape[0], x.shape[-1]
    groups = x.astype(jnp.float32).reshape(b, -1, 32, c // 32)
    mean = groups.mean((1, 3), keepdims=True)
    variance = ((groups - mean) ** 2).mean((1, 3), keepdims=True)
    normal = ((groups - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    out = (normal * weight + bias) * (1 + scale[:, None, None]) + shift[:, None, None]
    return jax.nn.silu(out.astype(x.dtype))


def _conv(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=_NHWC)


def _padded_input(x, kernel):
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 5)))
    return _conv(x, jnp.pad(kernel, ((0, 0), (0, 0), (0, 5), (0, 0))))


def _padded_output(x, kernel):
    return _conv(x, jnp.pad(kernel, ((0, 0), (0, 0), (0, 0), (0, 5))))[..., :3]


if __name__ == "__main__":
    cli.run(main)
