"""Check whether a device computes each operation of the models correctly and fast.

The reference is computed in float32 on the CPU, from the same bfloat16 inputs. An operation is
"wrong" if a value or gradient differs by more than bfloat16 rounding explains. An attention
implementation is "slow" if it takes more than 1.5 times as long as the plain one ("xla"). A large
matrix product or convolution is "slow" below 40 % of the peak that the manufacturer states.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffusion_jax.devices import hardware
from diffusion_jax.nn import ops
from diffusion_jax.nn.attention import IMPLEMENTATIONS, attend

ALLOWED = 0.03
"""The largest allowed error, relative to the array's largest absolute value.

It allows for about eight bfloat16 rounding errors.
"""
_SHARE = 0.4  # Large products and convolutions below this share of the peak FLOP/s are slow.
_UPLOAD = 2e9  # Copies to the device below this many bytes/s are slow.

Operation = Callable[..., jax.Array]


class Check(NamedTuple):
    """An operation to check: the function `run` with arguments of the shapes in `shapes`."""

    name: str
    run: Operation
    shapes: Sequence[tuple[int, ...]]
    plain: str = ""
    """The name of the check that measures the plain implementation. The times of the two checks are
    compared. "" for no comparison."""


def on(device: Any) -> list[dict[str, Any]]:
    """Run all checks on a device, and return one dict for each check.

    A dict holds the name of the check ("check"), measurements, and a "verdict". Measurements are
    the relative "error", the milliseconds per call ("ms"), or "gb_per_s". The verdict is "right",
    "wrong" or "slow: ...", or "does not run: ..." if the operation fails. The last dicts come from
    `outside_jit`, `upload` and `collective`, which uses all local devices.
    """
    rows = []
    for check in checks(device.platform):
        rows.append(_row(check, device, {row["check"]: row.get("ms") for row in rows}))
    return [*rows, *outside_jit(device), upload(device), *collective(jax.local_devices())]


def checks(platform: str) -> list[Check]:
    """Return the checks for a platform ("cpu", "gpu" or "tpu").

    They cover the operations that backends implement differently: attention, convolutions and
    group norm.
    """
    attention, sizes = [], [(256, 333, 64), (1024, 1152, 64), (512, 589, 128)]
    unsupported = {"cpu": ("cudnn", "splash"), "tpu": ("cudnn",), "gpu": ("splash",)}
    others = ("auto", *unsupported.get(platform, ()))
    for queries, keys, width in sizes[: 1 if platform == "cpu" else None]:
        shapes = [(2, queries, 4, width), (2, keys, 4, width), (2, keys, 4, width)]
        for name in [name for name in IMPLEMENTATIONS if name not in others]:
            title = lambda name, shape=(queries, keys, width): f"attention {name} {shape}"
            plain = title("xla") if name != "xla" else ""
            run = functools.partial(_attend, implementation=name)
            attention.append(Check(title(name), run, shapes, plain))
    image, wide = (4, 32, 32, 64), (4, 4, 64, 64)
    group_norm = lambda *arrays: ops.group_norm(*arrays, groups=32, eps=1e-5, silu=True)
    return [
        *attention,
        Check("convolution 3x3", _conv(1, 1), [image, (3, 3, 64, 64)]),
        Check("convolution 3x3, stride 2", _conv(2, 1), [image, (3, 3, 64, 64)]),
        Check("convolution 2x2, stride 2", _conv(2, 0), [image, (2, 2, 64, 64)]),
        Check("convolution 4x4, stride 2", _conv(2, 1), [image, wide]),
        Check("convolution 4x4, transposed", ops.conv_transpose_4x4, [image, wide, (64,)]),
        Check("group norm with SiLU", group_norm, [image, (64,), (64,)]),
    ]


def _attend(q, k, v, implementation):
    # The last 77 keys are text tokens. In the second row, only the first 20 of them are valid.
    mask = jnp.arange(77) < jnp.array([77, 20])[:, None]
    return attend(q, k, v, mask, implementation=implementation)


def _conv(stride: int, padding: int) -> Operation:
    def run(x, kernel):
        layout, pads = ("NHWC", "HWIO", "NHWC"), ((padding, padding),) * 2
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=layout)

    return run


def _row(check: Check, device: Any, times: dict[str, float | None]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(jnp.bfloat16) for shape in check.shapes]
    row: dict[str, Any] = {"check": check.name}
    try:
        inputs = [jax.device_put(a, device) for a in arrays]
        step = jax.jit(_with_gradients(check.run))
        results = jax.device_get(step(*inputs))
        row["ms"] = float(f"{1e3 * seconds(lambda: step(*inputs), 0.1):.3g}")
    except Exception as error:  # Any error of a backend is a result of the check.
        reason = str(error).splitlines()[0][:200]
        return row | {"verdict": f"does not run: {type(error).__name__}: {reason}"}
    row["error"] = float(f"{_error(results, _reference(check, arrays)):.2g}")
    row["verdict"] = "right" if row["error"] <= ALLOWED else "wrong"
    plain = times.get(check.plain)
    if row["verdict"] == "right" and plain and row["ms"] > 1.5 * plain:
        row["verdict"] = f"slow: xla takes {plain} ms"
    return row


def _reference(check: Check, arrays: Sequence[np.ndarray]) -> Any:
    """Return the output and gradients of an operation, computed in float32 on the CPU.

    Attention runs with implementation="xla".
    """
    run = check.run
    if isinstance(run, functools.partial):
        run = functools.partial(run.func, implementation="xla")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        wide = [jnp.asarray(np.asarray(a, np.float32)) for a in arrays]
        return jax.device_get(jax.jit(_with_gradients(run))(*wide))


def _with_gradients(run: Operation) -> Callable[..., Any]:
    """Return a function that computes `run` and its vector-Jacobian product with a fixed vector."""

    def both(*arrays):
        out, backward = jax.vjp(run, *arrays)
        pattern = 0.5 + jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return out, *backward(pattern.astype(out.dtype))

    return both


def _error(actual: Any, expected: Any) -> float:
    """Return the largest relative error, max|a - e| / max|e|, of the arrays in two trees.

    The error is NaN if a value is NaN.
    """
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    wide = ((np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)
    return float(np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in wide]))


def outside_jit(device: Any) -> list[dict[str, Any]]:
    """Compare single operations, each called outside of jit, with NumPy. Return one dict for each.

    On some GPUs, jax 0.11.0 and 0.11.1 return wrong numbers from such operations
    (https://github.com/jax-ml/jax/issues/40633).
    """
    values = np.arange(1, 257, dtype=np.float32)
    operations: dict[str, Callable[[Any, Any], Any]] = {
        "addition": lambda np_, x: np_.ones(4, "float32") + 1,
        "product": lambda np_, x: x * x,
        "sum": lambda np_, x: x.sum(),
        "cast": lambda np_, x: x.astype("int32") // 3,
        "slice": lambda np_, x: x[3:200:7],
        "matrix product": lambda np_, x: x.reshape(16, 16) @ np_.eye(16, dtype="float32"),
    }
    rows = []
    with jax.default_device(device):
        for name, run in operations.items():
            right = np.array_equal(np.asarray(run(jnp, jnp.asarray(values))), run(np, values))
            wrong = f"wrong: use another version of jax than {jax.__version__}"
            verdict = "right" if right else wrong
            rows.append({"check": f"{name}, outside of jit", "verdict": verdict})
    return rows


def upload(device: Any, size: int = 2**26) -> dict[str, Any]:
    """Measure the rate of copying `size` bytes from host memory to a device.

    Return a dict with the keys "check", "gb_per_s" (the rate in GB/s) and "verdict".
    """
    array = np.zeros(size, np.uint8)
    took = seconds(lambda: jax.device_put(array, device), 0.3)
    rate = size / took
    slow = device.platform != "cpu" and rate < _UPLOAD
    row = {"check": "upload", "gb_per_s": float(f"{rate / 1e9:.3g}")}
    return row | {"verdict": "slow: data may not keep up" if slow else "right"}


def collective(devices: Sequence[Any], size: int = 2**22) -> list[dict[str, Any]]:
    """Check the result of an all-reduce over `devices`, and measure its bandwidth.

    Each device contributes `size` float32 values. Return a list with one dict, which holds "check",
    "gb_per_s" (the bandwidth of a device in GB/s) and "verdict". With one device, return [].
    """
    if len(devices) < 2:
        return []
    mesh = Mesh(np.array(devices), ("all",))
    values = np.arange(1, len(devices) + 1, dtype=np.float32)
    rows = jax.device_put(np.broadcast_to(values[:, None], (len(values), size)), NamedSharding(mesh, P("all")))
    add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=P("all"), out_specs=P()))
    row: dict[str, Any] = {"check": f"sum over {len(devices)} devices"}
    try:
        total = np.asarray(add(rows))
        took = seconds(lambda: add(rows), 0.3)
    except Exception as error:  # Any error of a backend is a result of the check.
        return [row | {"verdict": f"does not run: {type(error).__name__}: {str(error)[:200]}"}]
    right = bool((total == values.sum()).all())
    moved = 2 * (len(devices) - 1) / len(devices) * 4 * size  # Bytes per device, in a ring.
    row |= {"gb_per_s": float(f"{moved / took / 1e9:.3g}")}
    return [row | {"verdict": "right" if right else "wrong"}]


def rates(device: Any) -> dict[str, Any]:
    """Measure the TFLOP/s that a large matrix product and a convolution reach on a device.

    Return a dict with the keys "dtype", "matmul", "conv" and "peak". The last three are TFLOP/s.
    "peak" is the peak that the manufacturer states, or None if it is unknown. If it is known, the
    dict also holds a "verdict": "right", or "slow: ..." with the names of the slow operations.
    """
    large, peak = device.platform != "cpu", hardware.peak_flops(device.device_kind)
    dtype = jnp.bfloat16 if large else jnp.float32
    with jax.default_device(device):
        measured = {
            "matmul": rate(*matmul(8192 if large else 1024, dtype)) / 1e12,
            "conv": rate(*conv(64 if large else 1, 256 if large else 64, dtype)) / 1e12,
        }
    rounded = {name: float(f"{value:.4g}") for name, value in measured.items()}
    slow = [name for name, value in measured.items() if peak and value * 1e12 < _SHARE * peak]
    verdict = {"verdict": f"slow: {', '.join(slow)}" if slow else "right"} if peak else {}
    return {"dtype": jnp.dtype(dtype).name, **rounded, "peak": peak and peak / 1e12, **verdict}


def matmul(size: int, dtype: Any) -> tuple[Callable[[], jax.Array], float]:
    """Return a function that multiplies two [size, size] matrices, and the FLOPs of one call."""
    a = jnp.ones((size, size), dtype)
    multiply = jax.jit(jnp.matmul)
    return lambda: multiply(a, a), 2.0 * size**3


def conv(batch: int, channels: int, dtype: Any) -> tuple[Callable[[], jax.Array], float]:
    """Return a function that convolves a batch of images, and the FLOPs of one call.

    The function applies a 3x3 convolution that maps 66x66 to 64x64 pixels and keeps the number of
    channels.
    """
    x = jnp.ones((batch, 66, 66, channels), dtype)
    kernel = jnp.ones((3, 3, channels, channels), dtype)
    convolve = jax.jit(_conv(1, 0))
    return lambda: convolve(x, kernel), 2.0 * batch * 64 * 64 * 9 * channels**2


def rate(run: Callable[[], jax.Array], flops: float) -> float:
    """Return the FLOP/s that `run` reaches. `flops` is the number of FLOPs in one call."""
    return flops / seconds(run, 0.5)


def seconds(run: Callable[[], Any], long: float) -> float:
    """Return the mean seconds per call, measured for about `long` seconds after a warm-up call."""
    jax.block_until_ready(run())
    start, calls, result = time.perf_counter(), 0, None
    while time.perf_counter() - start < long:
        for _ in range(4):  # Keep the device busy while the host queues more work.
            result = run()
        jax.block_until_ready(result)
        calls += 4
    return (time.perf_counter() - start) / calls
