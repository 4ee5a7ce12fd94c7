"""Rank implementations of the models' operations by their speed on the current device.

    python -m benchmarks.kernels --batch=16 --size=64 --width=320 --dtype=bfloat16
    python -m benchmarks.kernels --batch=16 --size=64 --width=320 --dtype=bfloat16 \\
        --compile_for=h100

For each form of an operation, the command compiles a program that computes the operation and its
gradients, on GPUs with deterministic kernels only, as in training. It calls the program many times
before it waits for the results. It prints the median time of a call in microseconds and the
program's temporary memory in MiB. "(ours)" marks the form that the models use on this device. The
last column is the largest difference from the first form, in the output or a gradient, divided by
the largest value. A form that fails, for example because a kernel does not support the device, gets
a row with its error. If a form fails or is wrong, the exit code is 1.

With --compile_for, nothing runs: XLA compiles each form for a GPU that this machine lacks (see
launch/planner/gpu.py). The columns are then the program's temporary memory, the bytes that its
instructions read and write, and the number of its copies and transpositions.
"""

import functools
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from benchmarks import forms, measure
from benchmarks.profile import hlo
from diffusion_jax import cli
from diffusion_jax.devices import sharding
from diffusion_jax.nn import attention, ops
from diffusion_jax.train import autotuning, optimizer
from launch import accelerators
from launch.planner import compiling, gpu

flags.adopt_module_key_flags(measure)
_BATCH = flags.DEFINE_integer("batch", 4, "Number of images.", lower_bound=1)
_SIZE = flags.DEFINE_integer("size", 32, "Side of the images in pixels, even.", lower_bound=2)
_WIDTH = flags.DEFINE_integer("width", 128, "Channels, a multiple of 64.", lower_bound=64)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Dtype of images and kernels.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed groups of calls.", lower_bound=1)
_GROUP_S = flags.DEFINE_float("group_s", 0.1, "Seconds that a group of calls should take.", lower_bound=0.0)
_COMPILE_FOR = flags.DEFINE_enum("compile_for", None, [*gpu.DEVICES], "Compile for this GPU instead of measuring.")
_HEAD_DIM = 64
_TEXT_TOKENS = 128  # Tokens of text after the image's, of which a mask hides half.


def main() -> None:
    """Measure all forms of each operation, and print the table."""
    if _WIDTH.value % 64 or _SIZE.value % 2:
        raise app.UsageError(
            f"--width={_WIDTH.value} --size={_SIZE.value}: give a width that is a multiple of 64, and an even size", 2
        )
    if _COMPILE_FOR.value:
        compiling.prepare(1, "gpu")
        cli.start(alone=True)
        _compile_all(_COMPILE_FOR.value)
        return
    cli.start()
    measure.say(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {_DTYPE.value}")
    measure.say("| operation | form | us | temporary MiB | difference |\n|---|---|---|---|---|")
    bad = []
    for name, (variants, arguments) in _operations().items():
        reference = None
        for form, function in variants.items():
            try:
                seconds, memory, out = _measure(function, arguments)
            except Exception as error:  # Of a compiler or a kernel: the other forms still count.
                row, wrong = f"{type(error).__name__}: {_first_line(error)} | | ", True
            else:
                reference = out if reference is None else reference
                difference, wrong = _difference(out, reference)
                row = f"{1e6 * seconds:.1f} | {memory / 2**20:.1f} | {difference:.1g}"
            measure.say(f"| {name} | {form} | {row}{' WRONG' * wrong} |")
            bad += [f"{name}: {form}"] * wrong
    for form, seconds in _updates().items():
        measure.say(f"| AdamW and one average, 4 M parameters | {form} | {1e6 * seconds:.1f} | | |")
    if bad:
        sys.exit(f"failed or wrong: {'; '.join(bad)}")


def _compile_all(kind: str) -> None:
    """Compile all forms for a GPU of this kind, and print the table."""
    target = accelerators.parse(f"{kind}:1")
    with cli.bad_input():
        if missing := gpu.missing(target):
            raise ValueError(missing)
        (device,) = gpu.devices(target)
    mesh = jax.sharding.Mesh(np.array([[[device]]]), sharding.AXES)
    measure.say(f"compiled for {kind}, jax {jax.__version__}, {_DTYPE.value}")
    measure.say("| operation | form | temporary MiB | MB moved | copies |\n|---|---|---|---|---|")
    for name, (variants, arguments) in sharding.ambient(mesh, _operations)().items():
        for form, function in variants.items():
            step, arrays = _with_gradients(sharding.ambient(mesh, function), arguments)
            place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in arrays]
            compiled: Any = autotuning.compile_step(step.lower(*shapes), {})
            moved, copies = hlo.bytes_moved(compiled.as_text())
            temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
            measure.say(f"| {name} | {form} | {temporary:.1f} | {moved / 1e6:.0f} | {copies} |")


def _operations() -> dict[str, tuple[dict[str, Callable], tuple]]:
    """Return {operation: ({form: function}, arguments)}. The first form is the reference."""
    b, s, c = int(_BATCH.value), int(_SIZE.value), int(_WIDTH.value)
    x, kernel = _normal(b, s, s, c), _normal(4, 4, c, c) / (4 * c**0.5)
    vector, rows = _normal(c), jnp.float32(_normal(b, c))
    few, first, last = _normal(b, s, s, 3), _normal(3, 3, 3, c), _normal(3, 3, c, 3) / c
    gated = (_normal(b, s * s, c), _normal(c, 8 * c) / c**0.5, jnp.float32(_normal(8 * c)))
    gpu, tpu = ops.platform() == "gpu", ops.platform() == "tpu"
    return {
        f"attention over {s * s} pixels": (_attention(None), _heads(s * s)),
        f"attention over {s * s} pixels and {_TEXT_TOKENS} tokens, half of them masked": (
            _attention(jnp.arange(_TEXT_TOKENS) < _TEXT_TOKENS // 2),
            _heads(s * s + _TEXT_TOKENS),
        ),
        "convolution 4x4, stride 2": (
            _ours({"direct": True, "2x2 on patches": False}, forms.halving, forms.halving_by_patches),
            (x, kernel),
        ),
        "convolution 4x4, stride 2, transposed": (
            _ours({"direct": tpu, "four 2x2": not tpu}, forms.dilated, ops.transpose_by_phases),
            (x, kernel),
        ),
        "gated MLP, product of C and 8 C channels": (
            _ours(
                {"one product": not gpu, "two products": False, "two products, own gradient": gpu},
                forms.one_product,
                forms.two_products,
                forms.own_gradient,
            ),
            gated,
        ),
        "product of C and 4 C channels, with bias": (
            _ours(
                {
                    "bias summed apart": not tpu,
                    "row of the kernel's gradient": tpu,
                    "row of the kernel's gradient, padded": False,
                },
                forms.biased,
                ops._linear,
                forms.biased_row,
            ),
            (gated[0], gated[1][:, : 4 * c], gated[2][: 4 * c]),
        ),
        "group norm, scale and shift, SiLU": (
            _ours({"differentiated": False, "own gradient": True}, forms.plain_norm, forms.own_norm)
            | ({"Pallas": forms.pallas_norm} if gpu else {}),
            (x, vector, vector, rows, rows),
        ),
        "convolution 3x3, C to C channels": (
            _ours({"kernel HWIO": True}, forms.conv),
            (x, _normal(3, 3, c, c) / (3 * c**0.5)),
        ),
        "the same with the other order of the kernel": (
            _ours({"kernel OHWI": False}, forms.conv_ohwi),
            (x, _normal(c, 3, 3, c) / (3 * c**0.5)),
        ),
        "convolution 3x3, 3 to many channels": (
            _ours({"plain": True, "padded to 8": False}, forms.conv, forms.padded_input),
            (few, first),
        ),
        "convolution 3x3, many to 3 channels": (
            _ours({"plain": True, "padded to 8": False}, forms.conv, forms.padded_output),
            (x, last),
        ),
    }


def _ours(names: Mapping[str, bool], *functions: Callable) -> dict[str, Callable]:
    """Return {name: function}, with " (ours)" after the names whose value is True."""
    return {name + " (ours)" * ours: function for (name, ours), function in zip(names.items(), functions, strict=True)}


def _attention(mask: jax.Array | None) -> dict[str, Callable]:
    """Return the forms of attention that suit the device. `mask`, [L], covers the last keys.

    cuDNN's kernel without key lengths ignores the mask, so it is a form only without one.
    """
    tokens = int(_SIZE.value) ** 2
    keys = tokens + (0 if mask is None else len(mask))
    mine = attention.choose(tokens, keys, _HEAD_DIM, _DTYPE.value)
    other = {"cpu": ["blockwise"], "gpu": ["cudnn"], "tpu": ["splash"]}[ops.platform()]

    def attend(q, k, v, implementation):
        rows = None if mask is None else jnp.broadcast_to(mask, (len(q), len(mask)))
        return attention.attend(q, k, v, rows, implementation=implementation)

    forms = {
        name + " (ours)" * (name == mine): functools.partial(attend, implementation=name) for name in ("xla", *other)
    }
    if mask is None and ops.platform() == "gpu":
        forms["cudnn without key lengths"] = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    return forms


def _heads(keys: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return q of all pixels, and k and v of `keys` tokens, in heads of 64 channels."""
    b, heads = int(_BATCH.value), int(_WIDTH.value) // _HEAD_DIM
    q = _normal(b, int(_SIZE.value) ** 2, heads, _HEAD_DIM)
    return q, _normal(b, keys, heads, _HEAD_DIM), _normal(b, keys, heads, _HEAD_DIM)


def _measure(function: Callable, arguments: tuple) -> tuple[float, int, tuple]:
    """Compile a function with its gradients, and time the program.

    Returns (seconds per call, temporary bytes, (value, gradients)). The value is the sum of the
    function's output times random numbers.
    """
    step, arguments = _with_gradients(function, arguments)
    options = autotuning.deterministic_options(True)
    compiled = autotuning.compile_step(step.lower(*arguments), options)
    memory: Any = compiled.memory_analysis()
    return _seconds(compiled, *arguments), memory.temp_size_in_bytes, compiled(*arguments)


def _with_gradients(function: Callable, arguments: tuple) -> tuple[Any, tuple]:
    """Return the jitted value and gradients of a function, and the arguments of the program."""
    cotangent = _normal(*jax.eval_shape(function, *arguments).shape)
    loss = lambda cotangent, *a: (function(*a).astype(jnp.float32) * cotangent).sum()
    step = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(1, len(arguments) + 1))))
    return step, (cotangent, *arguments)


def _updates() -> dict[str, float]:
    """Time updates of the parameters (with AdamW) and of an average of the parameters.

    One variant compiles the two updates as two programs, the other compiles both as one program.
    Returns the seconds per call by variant. The parameters are 64 kernels of 256 x 256.
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

    return {"two programs": _seconds(apart, params, state, ema), "one (ours)": _seconds(one, params, state, ema)}


def _seconds(function: Callable, *arguments: Any) -> float:
    """Return the median seconds of a call, in --repeats groups of calls with one wait each."""
    measure.timed(lambda: function(*arguments))  # Warm-up.
    once = measure.timed(lambda: function(*arguments))[1]
    calls = max(1, int(_GROUP_S.value / once))
    group = lambda: [function(*arguments) for _ in range(calls)][-1]
    return statistics.median(measure.rounds(group, int(_REPEATS.value), warmup=0)) / calls


def _difference(out: tuple, reference: tuple) -> tuple[float, bool]:
    """Return the largest relative difference of two results, and whether it is too large.

    A difference is relative to the largest value of its array. NaN is too large.
    """
    differences = []
    for ours, theirs in zip(jax.tree.leaves(out), jax.tree.leaves(reference), strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        differences.append(np.abs(ours - theirs).max() / np.abs(theirs).max())
    largest = float(np.max(differences))
    return largest, not largest <= (0.05 if _DTYPE.value == "bfloat16" else 1e-3)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:100].replace("|", "/")


def _normal(*shape: int) -> jax.Array:
    values = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    return jnp.asarray(values, _DTYPE.value)


if __name__ == "__main__":
    cli.run(main)
