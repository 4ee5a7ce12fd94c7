"""Find the module that produced a non-finite loss or gradient, by running the batch again.

The loss and its gradient are a list of operations (a jaxpr), and each operation is labelled with
its module. A jitted function runs all operations of the forward and the backward pass again.
When the next operation belongs to another module, the function checks the outputs of the current
operation. This works for any network.
"""

import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.extend import core
from jax.sharding import NamedSharding
from jaxtyping import Array, Key

from diffusion_jax import files
from diffusion_jax.devices.sharding import ambient
from diffusion_jax.task import LABELS, Batch, Frozen, LossFn, Metrics, Params
from diffusion_jax.train.state import split

REPORT = "not_finite.json"
# Operations that only call a jaxpr. Others that hold a jaxpr (scan, cond) count as one operation.
_REMAT = ("checkpoint", "remat2")
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", *_REMAT)
_OUTSIDE = "the loss, outside of its modules"
_AT_START = 10  # Steps in a row that may be skipped before the first finite one.
_LISTED = 16  # The largest number of samples and modules in a report.
Names = Callable[[Sequence[int]], list[str]]
"""Maps row numbers of the batch to the names of the pictures in these rows."""


class SkippedSteps:
    """A detector of skipped steps. A step is skipped if its loss or gradient is not finite."""

    def __init__(self, step: int, skipped: int, lag: int, most: int) -> None:
        """Create a detector for a run at step `step` that has skipped `skipped` steps so far.

        A step is checked `lag` steps later, so that the host does not wait for it. `failed` raises
        NothingLearned after `most` skipped steps in a row, or after min(most, 10) if no step has
        been finite yet.
        """
        self._skipped, self._lag, self._most = skipped, lag, most
        self._learned = skipped < step
        self._in_a_row = 0
        self._under_way: list[tuple[int, Batch, Metrics]] = []
        self._over = False

    def failed(self, step: int, batch: Batch, metrics: Metrics, last: bool) -> tuple[int, Batch] | None:
        """Add a step, and check the step that came `lag` steps earlier.

        Return the number and the batch of the checked step if it is the first that was skipped
        since this process started. Otherwise, return None. If `last` is True, no step follows, and
        all pending steps are checked. Raises NothingLearned after too many skipped steps in a row.
        """
        first = None
        self._under_way.append((step, {} if self._over else batch, metrics))
        while len(self._under_way) > (0 if last else self._lag):
            step, batch, metrics = self._under_way.pop(0)
            skipped = int(metrics["skipped"])
            self._in_a_row = self._in_a_row + 1 if skipped > self._skipped else 0
            self._learned |= not self._in_a_row
            self._skipped = skipped
            if self._in_a_row and not self._over:
                self._over, first = True, (step, batch)
                self._under_way = [(step, {}, metrics) for step, _, metrics in self._under_way]
            if self._in_a_row == (self._most if self._learned else min(self._most, _AT_START)):
                raise NothingLearned(step, self._in_a_row)
        return first


class NothingLearned(RuntimeError):
    """Error raised if too many steps in a row are skipped."""

    def __init__(self, step: int, steps: int) -> None:
        """Create the error for `steps` skipped steps in a row, ending with step `step`."""
        super().__init__(
            f"the last {steps} steps, up to step {step}, were skipped because their loss or "
            f"gradient was not finite ({REPORT} in the workdir says where the first such value "
            "came from). The last step is not saved. Fix the cause, such as a high learning rate "
            "or broken data, and start again from the last checkpoint, or raise "
            "optimizer.max_skipped"
        )


class Observed(NamedTuple):
    """The result of running one micro batch of B samples again, as host arrays."""

    part: int
    """Index of the first micro batch with a non-finite value, or of the last if all are finite."""
    modules: Sequence[str]
    """Module names in the order in which the modules finished, one entry per call."""
    bad: np.ndarray
    """bool [modules]: whether any value of the module's output is not finite."""
    rows: np.ndarray
    """bool [modules, B]: which samples have a non-finite output. All are False if the output does
    not have one row per sample."""
    inputs: Mapping[str, np.ndarray]
    """Which inputs have a non-finite value, keyed by their paths: a bool [] for each parameter, and
    a bool [B] for each array of the batch."""
    labels: Mapping[str, np.ndarray]
    """The "sigma" and "loss" of each sample, [B], if the task's loss labels these arrays."""


def investigate(
    path: pathlib.Path,
    step: int,
    now: int,
    loss_fn: LossFn,
    params: Params,
    frozen: Frozen,
    batch: Batch,
    keys: Key[Array, "B"],
    passes: int,
    everywhere: NamedSharding,
    names: Names,
) -> None:
    """Run the batch of `step` again, and write a report on non-finite values to `path`.

    Every process must call this function with the same arguments. `params` holds the parameters
    after step `now`. `keys` are the images' keys, and the batch is divided into `passes` micro
    batches. `everywhere` is the replicated sharding. `names` gives the names of the pictures in the
    batch. If the batch cannot run again, usually for lack of memory, no report is written, and a
    warning is logged.
    """
    logging.warning(
        "the loss or gradient of step %d is not finite: running its batch again to find the module that causes this",
        step,
    )
    try:
        observed = watch(loss_fn, params, frozen, batch, keys, passes, everywhere)
    except jax.errors.JaxRuntimeError as error:  # Mostly out of memory. Training continues.
        logging.warning(
            "the loss or gradient of step %d is not finite, but its batch could not run again: %s", step, error
        )
        return
    explain(path, step, now, observed, passes, names)


def explain(path: pathlib.Path, step: int, now: int, observed: Observed, passes: int, names: Names) -> None:
    """Write what the rerun of step `step` found to `path` as JSON, and log a summary.

    `observed` is what it found. The rerun used the weights after step `now`, which may be later.
    The batch consists of `passes` micro batches. `names` maps row numbers of the batch to the names
    of their pictures.
    """
    modules = list(dict.fromkeys(np.array(observed.modules)[observed.bad].tolist()))
    inside = [module for module in modules if module != _OUTSIDE]
    rows = _bad_rows(observed)
    some = (rows if rows.size else np.arange(observed.rows.shape[1]))[:_LISTED]
    samples = [int(row) * passes + observed.part for row in some]
    finite = lambda rows: [x if math.isfinite(x) else None for x in rows.tolist()]
    numbers = {k: finite(v[some]) for k, v in observed.labels.items()}
    columns = {"row": samples, "name": names(samples), **numbers}
    report = {
        "step": step,
        "parameters_of_step": now,
        "again_not_finite": bool(modules),
        "module": inside[0] if inside else modules[0] if modules else None,
        "modules": modules[:_LISTED],
        "inputs": [name for name, bad in observed.inputs.items() if bad.any()][:_LISTED],
        "num_samples": len(rows),
        "samples": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
    }
    if jax.process_index() == 0:
        files.write_whole(path, json.dumps(report, indent=1) + "\n")
    first = report["samples"][0]
    at = f" at sigma {first['sigma']:.4g}" if "sigma" in first else ""
    logging.warning(
        "step %d: %s; inputs that are not finite: %s; samples that are not finite: %d of %d%s. See %s",
        step,
        f"the first values that are not finite come from {report['module']}"
        if modules
        else "all values were finite when its batch ran again",
        ", ".join(report["inputs"]) or "none",
        len(rows),
        observed.rows.shape[1],
        f", such as {first['name']}{at}" if len(rows) else "",
        path,
    )


def watch(
    loss_fn: LossFn,
    params: Params,
    frozen: Frozen,
    batch: Batch,
    keys: Key[Array, "B"],
    passes: int,
    everywhere: NamedSharding,
) -> Observed:
    """Run a step's loss and gradient again, and check the output of each module.

    The micro batches run in order, up to the first with a non-finite value. The result describes
    the last micro batch that ran. `keys` are the images' keys, and the batch is divided into
    `passes` micro batches. The function needs about as much memory and compile time as a
    training step. Every process must call it with the same arguments.
    """
    modules: list[str] = []
    gradient = observed_gradient(loss_fn, everywhere)

    def run(params, frozen, batch, keys):
        _, walk = gradient(params, frozen, batch, keys)
        walk.look()
        modules[:] = walk.modules
        bad = {"params": jax.tree.map(_bad, params), "batch": jax.tree.map(walk.rows_of, batch)}
        return jnp.stack(walk.bad), jnp.stack(walk.rows), bad, walk.labels

    again = jax.jit(run, out_shardings=everywhere)
    observed = None
    for index, (micro, of_micro) in enumerate(micro_batches(batch, keys, passes)):
        bad, rows, inputs, labels = jax.device_get(again(params, frozen, micro, of_micro))
        leaves, _ = jax.tree.flatten_with_path(inputs)
        named = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
        observed = Observed(index, modules, bad, rows, named, labels)
        if bad.any():
            break
    assert observed is not None
    return observed


def micro_batches(batch: Batch, keys: Key[Array, "B"], passes: int) -> Iterator[tuple[Batch, Key[Array, "b"]]]:
    """Yield (micro batch, its images' keys) for each pass of a step."""
    parts = jax.jit(split, static_argnums=1)((batch, keys), passes)
    for index in range(passes):
        yield jax.tree.map(lambda x, index=index: x[index], parts)


def observed_gradient(loss_fn: LossFn, everywhere: NamedSharding) -> Callable[..., tuple[Any, "Walk"]]:
    """Return the function (params, frozen, batch, keys) -> (((loss, metrics), gradients), walk).

    It is called inside jax.jit.
    """
    gradient = ambient(everywhere.mesh, jax.value_and_grad(loss_fn, has_aux=True))

    def run(*inputs):
        closed, shapes = jax.make_jaxpr(gradient, return_shape=True)(*inputs)
        walk = Walk(len(jax.tree.leaves(inputs[2])[0]))
        outputs = walk.run(closed.jaxpr, closed.consts, jax.tree.leaves(inputs), "")
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs), walk

    return run


class Walk:
    """An interpreter of jaxprs that checks whether each module's output is finite.

    `labels` holds the "sigma" and "loss" of each sample, [B], if the loss labels these arrays.
    """

    def __init__(self, batch_size: int) -> None:
        self.modules: list[str] = []
        self.bad: list[Any] = []
        self.rows: list[Any] = []
        self.labels: dict[str, Any] = {}
        self._batch_size = batch_size
        self._last: tuple[str, Sequence[Any]] | None = None

    def run(self, program: Any, consts: Sequence[Any], inputs: Sequence[Any], outer: str) -> list:
        """Evaluate a jaxpr that lies in the named scope `outer`, and return its outputs."""
        values = dict(zip((*program.constvars, *program.invars), (*consts, *inputs), strict=True))
        read = lambda v: v.val if isinstance(v, core.Literal) else values[v]
        for equation in program.eqns:
            scope = f"{outer}/{equation.source_info.name_stack}"
            outputs = self._apply(equation, list(map(read, equation.invars)), scope)
            values |= zip(equation.outvars, outputs, strict=True)
        return list(map(read, program.outvars))

    def look(self) -> None:
        """Record whether the current module's last outputs are finite."""
        if self._last is not None:
            scope, outputs = self._last
            self.modules.append(module_of(scope))
            self.bad.append(jnp.stack([_bad(x) for x in outputs]).any())
            self.rows.append(jnp.stack([self.rows_of(x) for x in outputs]).any(0))

    def rows_of(self, x: Any) -> Any:
        """Return which rows of x are not finite, bool [B].

        If x is not a floating-point array [B, ...], the result is False for all rows.
        """
        if not jnp.issubdtype(x.dtype, jnp.inexact) or x.shape[:1] != (self._batch_size,):
            return jnp.zeros(self._batch_size, bool)
        return ~jnp.isfinite(x).reshape(self._batch_size, -1).all(1)

    def _apply(self, equation: core.JaxprEqn, inputs: list[Any], scope: str) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            if name in _REMAT:  # Keep XLA from storing values that are meant to be recomputed.
                inputs = jax.lax.optimization_barrier(inputs)
            inner = params["call_jaxpr" if "call_jaxpr" in params else "jaxpr"]
            program = getattr(inner, "jaxpr", inner)
            return self.run(program, getattr(inner, "consts", ()), inputs, scope)
        outputs = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(params))
        outputs = outputs if equation.primitive.multiple_results else [outputs]
        if name == "name" and params["name"] in LABELS:
            self.labels.setdefault(params["name"], outputs[0])
        if self._last is not None and self._last[0] != scope:
            self.look()
        self._last = scope, outputs
        return outputs


def module_of(scope: str) -> str:
    """Convert a named scope to a module: "/transpose(jvp(UNet))/mid" -> "gradient of UNet/mid"."""
    inner = scope.rpartition("/jvp(")  # Rematerialised operations repeat the scope.
    plain = re.sub(r"\w+\(|\)", "", "".join(inner[1:]))
    parts = [p for p in plain.split("/") if p not in ("", "checkpoint", "rematted_computation")]
    name = "/".join(parts)
    return (f"gradient of {name}" if "transpose(" in scope else name) if name else _OUTSIDE


def _bad_rows(observed: Observed) -> np.ndarray:
    """Return the indices of the samples whose loss is not finite.

    If all losses are finite, return the samples with a non-finite input. If the inputs are finite
    too, return the samples with a non-finite output of the first module that has any.
    """
    losses = ~np.isfinite(observed.labels.get("loss", np.zeros(observed.rows.shape[1])))
    inputs = [bad for bad in observed.inputs.values() if bad.ndim]
    rows = [losses, np.any(inputs, axis=0), *observed.rows]
    return np.flatnonzero(next((bad for bad in rows if bad.any()), losses))


def _bad(x: Any) -> Any:
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return ~jnp.isfinite(x).all() if inexact else jnp.zeros((), bool)
