"""Report steps of a training run: mean metrics and speed, and the modules and examples of one."""

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Key

from diffusion_jax.config.settings import Run
from diffusion_jax.data.pipeline import Batches
from diffusion_jax.devices import hardware
from diffusion_jax.logs import goodput
from diffusion_jax.logs.progress import step_line
from diffusion_jax.logs.run_log import MetricWriter, noise_level_means
from diffusion_jax.task import Batch, Frozen, Metrics, Params, Task
from diffusion_jax.train import not_finite

IN_FLIGHT = 2
"""The number of steps that the host may be ahead of the devices."""


def mean_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each metric over steps, keyed as in metrics.jsonl.

    `metrics` holds one dict of host arrays per step. "skipped" is a running total, so its last
    value is returned instead of the mean.
    """
    total = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *metrics)
    means = {name: value / len(metrics) for name, value in total.items() if np.ndim(value) == 0}
    return means | {"skipped": metrics[-1]["skipped"]} | noise_level_means(total)


def examine(
    task: Task,
    params: Params,
    frozen: Frozen,
    batch: Batch,
    keys: Key[Array, "B"],
    passes: int,
    everywhere: NamedSharding,
) -> tuple[dict[str, float], dict[str, Float[np.ndarray, "B"]]]:
    """Return the gradient norm of each module, and the labels of each example, of a step.

    The step takes `batch` in `passes` passes, and draws the noise of each image from its key. The
    labels are keyed by "sigma" and "loss". The results lie on all devices of `everywhere`.
    """
    gradient = not_finite.observed_gradient(task.loss, everywhere)

    @functools.partial(jax.jit, donate_argnums=0)
    def add(total, params, frozen, micro, keys):
        (_, grads), walk = gradient(params, frozen, micro, keys)
        replicated = lambda x: jax.lax.with_sharding_constraint(x, everywhere)
        return jax.tree.map(jnp.add, total, grads), jax.tree.map(replicated, walk.labels)

    total, labels = jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x))(params), []
    for micro in not_finite.micro_batches(batch, keys, passes):
        total, of_part = add(total, params, frozen, *micro)
        labels.append(jax.device_get(of_part))
    # Micro batch i holds rows i, i + passes, ...
    labels = jax.tree.map(lambda *rows: np.stack(rows, axis=1).reshape(-1), *labels)
    modules = jax.jit(module_norms, static_argnums=1, out_shardings=everywhere)(total, passes)
    return {name: float(norm) for name, norm in jax.device_get(modules).items()}, labels


def module_norms(total: Params, passes: int = 1) -> dict[str, jax.Array]:
    """Return the norm of each module's mean gradient over `passes` micro batches, keyed by module.

    `total` is the sum of the micro batches' gradients. A module is a child of the network. Its name
    follows "params" in the paths of its parameters.
    """
    squares: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(total):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        module = names[1 if names[0] == "params" else 0]
        squares[module] = squares.get(module, 0.0) + jnp.sum((leaf / passes) ** 2)
    return {module: jnp.sqrt(square) for module, square in squares.items()}


class StepReport:
    """Collects metrics and training time, and reports them.

    Time for drawing, scoring, the held-out loss and saving does not count. `seconds` holds this
    time, keyed by goodput.BESIDE.
    """

    def __init__(
        self, run: Run, writer: MetricWriter, num_devices: int, batches: Batches, seconds: Mapping[str, float]
    ) -> None:
        self.seconds = dict.fromkeys(goodput.BESIDE, 0.0) | dict(seconds)
        self._run, self._writer, self._batches = run, writer, batches
        self._num_devices, self._flops = num_devices, 0.0
        self._metrics: list[Metrics] = []
        self._since, self._waited = _clocks(), 0.0
        self._cpu_seconds = 0.0

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that all steps of this start have taken, in all threads."""
        return self._cpu_seconds + float((_clocks() - self._since)[1])

    def add(self, metrics: Metrics, flops: float) -> None:
        """Add a step's metrics, and the number of its floating-point operations.

        Then wait until the devices have computed the step that came IN_FLIGHT steps earlier.
        """
        self._metrics.append(metrics)
        self._flops += flops
        if len(self._metrics) > IN_FLIGHT:
            jax.block_until_ready(self._metrics[-1 - IN_FLIGHT])

    def report(self, step: int) -> None:
        """Write the mean metrics since the last report, and log a progress line."""
        metrics = jax.device_get(self._metrics)
        self._cpu_seconds = self.cpu_seconds()
        seconds, cpu_seconds = ((_clocks() - self._since) / len(metrics)).tolist()
        scalars = mean_metrics(metrics)
        device = jax.local_devices()[0]
        line = {
            "images_per_second": self._run.batch_size / seconds,
            "loss": float(scalars["loss"]),
            "seconds_left": (self._run.steps - step) * seconds,
            "memory": hardware.memory(device),
            "utilization": hardware.utilization(
                self._flops / len(metrics), seconds, device.device_kind, self._num_devices
            ),
        }
        logging.info("%s", step_line(step, self._run.steps, **line))
        unusable = {f"data/{name}": count for name, count in self._batches.skipped().items()}
        speed = {
            "images_per_second": line["images_per_second"],
            "data/waiting": self._waited / (seconds * len(metrics)),
            "cpu_seconds_per_step": cpu_seconds,
        }
        self._writer.write_scalars(step, scalars | speed | unusable)
        self._metrics, self._flops = [], 0.0
        self._since, self._waited = _clocks(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside this context as waiting for data."""
        start = time.time()
        with jax.profiler.TraceAnnotation("data"):
            yield
        self._waited += time.time() - start

    @contextlib.contextmanager
    def paused(self, kind: str) -> Iterator[None]:
        """Wait until all steps so far are computed, then stop the clock inside this context.

        The time inside this context counts as `kind`, one of goodput.BESIDE.
        """
        jax.block_until_ready(self._metrics)
        start = _clocks()
        yield
        spent = _clocks() - start
        self.seconds[kind] += float(spent[0])
        self._since += spent


def _clocks() -> Float[np.ndarray, "2"]:
    """Return the time, and the CPU time of all threads of this process, in seconds."""
    return np.array([time.time(), time.process_time()])
