"""A config's train step on random weights and data, compiled, warmed up and timed."""

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import Mesh

from benchmarks import measure
from diffusion_jax.machine import flops, hardware, sharding
from diffusion_jax.train import loop, memory, optimizer
from diffusion_jax.train.state import init_state
from launch.planner import systems
from launch.planner.systems import Model

INPUTS = ("cached", "moments", "images")
"""For latent diffusion: moments and text states from storage; moments, with the text encoder in the
step; the autoencoder in it too."""
STEPS = flags.DEFINE_integer("steps", 30, "Timed steps.", lower_bound=1)
WARMUP = flags.DEFINE_integer("warmup", 5, "Steps before them.", lower_bound=0)
_INPUTS = flags.DEFINE_enum("inputs", "cached", INPUTS, "What Stable Diffusion has beforehand.")


class Timing(NamedTuple):
    """A step, as measured."""

    seconds: list[float]
    """Of each step."""
    trace_s: float
    lower_s: float
    compile_s: float
    flops: float
    """Of a step on all devices, with what is computed twice."""
    loss: float

    @property
    def median(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.seconds)

    def utilization(self, devices: int) -> float | None:
        """The share of the devices' peak rate, None where that is not known."""
        kind = jax.local_devices()[0].device_kind
        return hardware.utilization(self.flops, self.median, kind, devices)


def read(config: Mapping[str, Any]) -> tuple[Model, str | None]:
    """The model of a config with its inputs as --inputs says, and that, None where it is of pixels.

    No weights and no data are needed. ValueError that says what to change.
    """
    inputs = _INPUTS.value if "latents" in config else None
    if inputs:
        source = "folder" if inputs == "images" else "moments"
        whole = {"source": source, "mixture": (), "crop": "center", "flip": False, "resize": 0}
        store = "none" if inputs == "cached" else ""
        config = {
            **config,
            "data": {**config["data"], **whole},
            "text": {**config["text"], "store": store},
        }
    return systems.read(config), inputs


def no_arguments(argv: list[str]) -> None:
    """Ends the command at words that are no flags."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}", 2)


def run(model: Model, mesh: Mesh) -> Timing:
    """Compiles the step of the loop for this mesh, warms up and times it, the state donated."""
    task, settings, rules = model.task, model.optimizer, model.task.rules
    tx = optimizer.make_optimizer(settings, model.run.steps)
    create = lambda key: init_state(task.init(key), tx, settings.ema_decays, settings.ema_widths)
    whole, split = sharding.replicated(mesh), sharding.batch_sharding(mesh)
    key = jax.jit(jax.random.key, static_argnums=0, out_shardings=whole)(0)
    layout = sharding.shardings(model.state, mesh, rules)
    state = jax.jit(create, out_shardings=layout)(key)
    frozen = _filled(memory.shapes(task.frozen), lambda w: sharding.shardings(w, mesh, rules))
    rows = memory.batch_of(model.example, model.run.batch_size)
    batch = _filled(rows, lambda rows: jax.tree.map(lambda _: split, rows))

    step = loop.make_step(task, settings, tx, layout)
    traced, trace_s = measure.timed(lambda: step.trace(state, frozen, batch, key))
    lowered, lower_s = measure.timed(traced.lower)
    compiled, compile_s = measure.timed(lowered.compile)
    metrics = {}

    def train() -> Any:
        nonlocal state, metrics
        state, metrics = compiled(state, frozen, batch, key)
        return metrics

    seconds = measure.rounds(train, STEPS.value, WARMUP.value)
    work = flops.count(traced.jaxpr.jaxpr)
    return Timing(seconds, trace_s, lower_s, compile_s, float(work), float(metrics["loss"]))


def _filled(shapes: Any, where: Any) -> Any:
    """Numbers in these shapes, made on the devices: what they are costs nothing to draw."""

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == bool:
            return jnp.ones(leaf.shape, bool)
        count = jax.lax.iota(jnp.uint32, leaf.size).reshape(leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return ((count * jnp.uint32(2654435761)) >> 24).astype(
                leaf.dtype
            )  # Bytes (Knuth's hash).
        return (0.02 * jnp.sin(count.astype(jnp.float32))).astype(leaf.dtype)

    return jax.jit(lambda: jax.tree.map(fill, shapes), out_shardings=where(shapes))()
