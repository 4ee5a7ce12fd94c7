"""Timing of a config's train step with random weights and data."""

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from jax.sharding import Mesh

from benchmarks import measure
from diffusion_jax.devices import flops, hardware, sharding
from diffusion_jax.train import autotuning, loop, memory, optimizer
from diffusion_jax.train.state import init_state
from launch.planner import tasks
from launch.planner.tasks import PlannedTask

INPUTS = ("cached", "moments", "images")
"""Inputs of a latent diffusion step. "cached": latent moments and text embeddings, so the step runs
only the UNet. "moments": latent moments and texts, so the step also runs the text encoder.
"images": images and texts, so the step runs the text encoder and the autoencoder too."""
_STEPS = flags.DEFINE_integer("steps", 0, "Timed steps; 0: as many as fit into --seconds.", lower_bound=0)
_SECONDS = flags.DEFINE_float(
    "seconds",
    60.0,
    "Time for the timed steps. A GPU slows down within the first ones, as it "
    "reaches its limits of power and temperature.",
    lower_bound=0.0,
)
_L2_FETCH = flags.DEFINE_integer(
    "l2_fetch", 0, "On GPUs, bytes that are fetched at once into the L2 cache: 32, 64 or 128; 0: CUDA's default."
)
_HUNDRED = 100
_WARMUP = flags.DEFINE_integer("warmup", 5, "Steps before the timed ones.", lower_bound=0)
_PROFILE = flags.DEFINE_bool("profile", False, "On GPUs, also profile three steps: which kernels take how long.")
_INPUTS = flags.DEFINE_enum(
    "inputs", "cached", INPUTS, "What a Stable Diffusion step reads; it computes everything else."
)


class Timing(NamedTuple):
    """Measured times of a train step, and the seconds to trace, lower and compile it."""

    seconds: list[float]
    """Seconds of each timed step."""
    trace_s: float
    lower_s: float
    compile_s: float
    flops: float
    """FLOPs of a step on all devices, including recomputation."""
    loss: float
    """Loss of the last step."""
    kernels: dict[str, Any] | None = None
    """Milliseconds of a GPU's kernels per step (see `measure.gpu_kernels`); None unless
    --profile."""
    passes: int = 1
    """The number of passes of a step."""
    gpu: Mapping[str, float] = {}
    """A GPU's power ("watts") and clock ("mhz") while the steps ran. With --l2_fetch, also
    "l2_fetch", the size that CUDA reports."""

    @property
    def first(self) -> float:
        """Seconds of the median of the first hundred steps, or of the first half if fewer ran."""
        return statistics.median(self.seconds[: self._part])

    @property
    def median(self) -> float:
        """Seconds of the median of the last hundred steps, or of the last half if fewer ran."""
        return statistics.median(self.seconds[-self._part :])

    @property
    def _part(self) -> int:
        return min(_HUNDRED, -(-len(self.seconds) // 2))

    def utilization(self, devices: int) -> float | None:
        """Return the achieved share of the devices' peak FLOP/s, or None if the peak is unknown."""
        kind = jax.local_devices()[0].device_kind
        return hardware.utilization(self.flops, self.median, kind, devices)


def read(config: Mapping[str, Any]) -> tuple[PlannedTask, str | None]:
    """Return a config's model, without weights and data, and the inputs that its train step reads.

    The inputs are the value of --inputs (see INPUTS), or None for models that diffuse pixels.
    Raises ValueError if the config has mistakes.
    """
    inputs = _INPUTS.value if "latents" in config else None
    if inputs:
        source = "folder" if inputs == "images" else "moments"
        data = {"source": source, "mixture": (), "crop": "center", "flip": False, "resize": 0}
        store = "none" if inputs == "cached" else ""
        config = {**config, "data": {**config["data"], **data}, "text": {**config["text"], "store": store}}
    return tasks.read(config), inputs


def run(model: PlannedTask, mesh: Mesh) -> Timing:
    """Compile the train step for this mesh, and time it after some warm-up steps."""
    task, settings, rules = model.task, model.optimizer, model.task.rules
    tx = optimizer.make_optimizer(settings, model.run.steps)
    create = lambda key: init_state(task.init(key), tx, settings.ema_decays, settings.ema_widths)
    replicated, split = sharding.replicated(mesh), sharding.batch_sharding(mesh)
    key = jax.jit(jax.random.key, static_argnums=0, out_shardings=replicated)(0)
    layout = sharding.shardings(model.state, mesh, rules)
    state = loop.new_state(create, key, layout)
    frozen = _filled(memory.shapes(task.frozen), lambda w: sharding.shardings(w, mesh, rules))
    rows = memory.batch_of(model.example, model.run.batch_size)
    batch = _filled(rows, lambda rows: jax.tree.map(lambda _: split, rows))

    passes = optimizer.num_passes(settings, model.run.batch_size, mesh)
    step = loop.make_step(task, settings, tx, layout, passes)
    traced, trace_s = measure.timed(lambda: step.trace(state, frozen, batch, key))
    lowered, lower_s = measure.timed(traced.lower)
    options = autotuning.deterministic_options(model.run.deterministic)
    compiled, compile_s = measure.timed(lambda: autotuning.compile_step(lowered, options))
    metrics = {}

    def train() -> Any:
        nonlocal state, metrics
        state, metrics = compiled(state, frozen, batch, key)
        return metrics

    for _ in range(_WARMUP.value):
        jax.block_until_ready(train())
    reported = {}
    if _L2_FETCH.value and jax.default_backend() == "gpu":
        reported = {"l2_fetch": measure.set_l2_fetch(_L2_FETCH.value)}
    with measure.gpu_power() as power:
        seconds = measure.in_flight(train, _STEPS.value, _SECONDS.value)
    kernels = measure.gpu_kernels(train) if _PROFILE.value else None
    work = float(flops.count(traced.jaxpr.jaxpr))
    loss = float(metrics["loss"])
    return Timing(seconds, trace_s, lower_s, compile_s, work, loss, kernels, passes, power | reported)


def _filled(shapes: Any, shardings_of: Any) -> Any:
    """Return arrays of these shapes, created on the devices with cheap pseudorandom values.

    `shardings_of` maps the tree of shapes to a tree of shardings. Booleans are all True.
    """

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == bool:
            return jnp.ones(leaf.shape, bool)
        count = jax.lax.iota(jnp.uint32, leaf.size).reshape(leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            hashes = count * jnp.uint32(2654435761)  # Knuth's multiplicative hash.
            return (hashes >> 24).astype(leaf.dtype)  # The highest byte of the hash.
        return (0.02 * jnp.sin(count.astype(jnp.float32))).astype(leaf.dtype)

    return jax.jit(lambda: jax.tree.map(fill, shapes), out_shardings=shardings_of(shapes))()
