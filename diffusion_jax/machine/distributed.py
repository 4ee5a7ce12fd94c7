"""Several processes as one: who takes part, a start that ends, and one end for all.

A command is alone unless it is told otherwise: by --coordinator, --num_processes and --process_id
(or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment), or by the
environment of Slurm's srun or of GKE's TPU pods with more than one process. On a TPU VM or under
MPI, --distributed=on lets JAX find the others.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags, logging
from jax.experimental import multihost_utils

from diffusion_jax.machine import exits, meeting, peers

_NEWS = 5.0  # Seconds until the death of a process is known to all, and more.
_TEXT = 500  # Bytes of what a process says to all.
_DISTRIBUTED = flags.DEFINE_enum(
    "distributed", "auto", ["auto", "on", "off"], "Whether to join other processes."
)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.")
_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many there are.", lower_bound=1)
_PROCESS = flags.DEFINE_integer("process_id", None, "Which of them this is.", lower_bound=0)
_TIMEOUT = flags.DEFINE_integer(
    "join_timeout", 300, "Seconds to wait for the others at the start.", lower_bound=1
)


class _Watch:
    """The watch that this process keeps over others, and what it says then."""

    def __init__(self) -> None:
        self.others: peers.Peers | None = None
        self.advice: Callable[[], str] = lambda: "Start all processes again."


_watch = _Watch()


def join() -> None:
    """Joins the other processes, if there are any; call it before anything touches a device.

    The first logs a table of processes and devices, and from then on what all do. ValueError if
    it is not clear who takes part. If not all are there after --join_timeout seconds, this process
    ends with code 1.
    """
    choice = _DISTRIBUTED.value
    who = _explicit(os.environ) or _detected(os.environ)
    if choice == "off" or (choice == "auto" and who is None):
        return
    who = who or {}
    with _deadline(_TIMEOUT.value, who):
        _meet(who)
        jax.distributed.initialize(
            **who,
            # JAX would end the process by a signal, without a word on what to do.
            initialization_timeout=_TIMEOUT.value + 60,
        )
        hosts = gather_text(socket.gethostname())  # The first thing that all do together.
        if jax.process_count() > 1:
            known = [who["coordinator_address"].rpartition(":")[0]] if "process_id" in who else []
            _watch.others = peers.start(jax.process_index(), hosts, gather_text, known, _advice)
    logging.info("process %d of %d", jax.process_index(), jax.process_count())
    if jax.process_index():
        logging.set_verbosity(logging.WARNING)  # The first says what all do.
    logging.info("processes and devices\n%s", table(hosts, jax.devices()))


def advise(advice: Callable[[], str]) -> None:
    """What to say, beside what happened, when another process dies or a step hangs."""
    _watch.advice = advice


def hanging() -> str:
    """What is known of a step that hangs, and what to do about it, for a message."""
    silent = _watch.others.silent() if _watch.others else ""
    others = f"{silent}. " if silent else "All other processes answer. " if _watch.others else ""
    return f"{others}{_advice()}"


def table(hosts: Sequence[str], devices: Sequence[Any]) -> str:
    """A line for each process: its number, its host, its devices."""
    rows = [("process", "host", "devices")]
    for process, host in enumerate(hosts):
        mine = [device for device in devices if device.process_index == process]
        ids = ",".join(str(device.id) for device in mine)
        rows.append((str(process), host, f"{len(mine)} x {mine[0].device_kind} (ids {ids})"))
    width = max(len(host) for _, host, _ in rows)
    return "\n".join(f"{number:>7}  {host:<{width}}  {what}" for number, host, what in rows)


def gather_text(text: str) -> list[str]:
    """What each process says, cut at 500 bytes; every process must call it alike."""
    if jax.process_count() == 1:
        return [text]
    row = np.zeros(_TEXT, np.uint8)
    raw = text.encode()[:_TEXT]
    row[: len(raw)] = np.frombuffer(raw, np.uint8)
    rows = multihost_utils.process_allgather(row)
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in np.atleast_2d(rows)]


@contextlib.contextmanager
def sigterm() -> Iterator[Callable[[int], bool]]:
    """stopping(step): whether SIGTERM has come, which then no longer ends the process.

    Of several processes one may get it alone, and all must stop at the same step.
    """
    if jax.process_count() > 1:  # JAX's service listens for the signal and agrees on a step.
        yield multihost_utils.reached_preemption_sync_point
        return
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(True))
    try:
        yield lambda step: bool(received)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Ends several processes together: all wait for the last at success, none at a failure.

    Without it the interpreter of a process that failed would wait for the others, which wait for
    it, and end by a signal that hides the exit code.
    """
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if jax.distributed.is_initialized() and code not in (None, 0, exits.PREEMPTED):
            _fail(error, code if isinstance(code, int) else 1)
        _leave()
        raise
    _leave()


def _fail(error: BaseException, code: int) -> None:
    """Ends this process, and tells the others why."""
    if _watch.others and isinstance(error, jax.errors.JaxRuntimeError):
        _watch.others.wait_for_a_death(_NEWS)  # Of which the error is a consequence.
    why = f"with code {code}, for the reason that it gave"
    if not isinstance(error, SystemExit):
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    if _watch.others:
        _watch.others.leave(why, code)
    _end(code)


def _leave() -> None:
    if _watch.others:
        _watch.others.leave()
        _watch.others = None
    jax.distributed.shutdown()


def _advice() -> str:
    return _watch.advice()


def _meet(who: Mapping[str, Any]) -> None:
    """Compares who the processes are, where they were told of each other and not found by JAX."""
    if "process_id" in who and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
        meeting.meet(who["coordinator_address"], who["process_id"], who["num_processes"])


def _explicit(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The arguments that flags or JAX's variables give; ValueError if they give a part alone."""
    number = lambda name: int(environment[name]) if environment.get(name) else None
    said = {
        "coordinator_address": _COORDINATOR.value or environment.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": _PROCESSES.value or number("JAX_NUM_PROCESSES"),
        "process_id": number("JAX_PROCESS_ID") if _PROCESS.value is None else _PROCESS.value,
    }
    if said["num_processes"] == 1 or all(value is None for value in said.values()):
        return None
    missing = [name for name, value in said.items() if value is None]
    if missing:
        raise ValueError(
            f"of several processes {', '.join(missing)} is not said: give --coordinator=HOST:PORT, "
            "--num_processes and --process_id together, or JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        )
    if said["process_id"] >= said["num_processes"]:
        raise ValueError(
            f"process_id {said['process_id']} of {said['num_processes']} processes: they are "
            f"numbered from 0 to {said['num_processes'] - 1}"
        )
    if not re.fullmatch(r".+:\d+", said["coordinator_address"]):
        raise ValueError(f"coordinator {said['coordinator_address']!r} is not HOST:PORT")
    return said | {"cluster_detection_method": "deactivate"}


def _detected(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The cluster that JAX is to ask, if the environment is that of several processes."""
    if "SLURM_STEP_NODELIST" in environment and int(environment.get("SLURM_NTASKS", 1)) > 1:
        return {"cluster_detection_method": "slurm", "local_device_ids": _slurm_ids(environment)}
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    if "," in hosts or int(environment.get("MEGASCALE_NUM_SLICES", 1)) > 1:
        return {"cluster_detection_method": "gketpu"}
    return None


def _slurm_ids(environment: Mapping[str, str]) -> list[int] | None:
    """All GPUs of the node for its only task, of which JAX would take the first alone."""
    alone = re.fullmatch(r"1(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if not alone or "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    return list(range(int(environment.get("SLURM_GPUS_ON_NODE") or 0))) or None


@contextlib.contextmanager
def _deadline(seconds: int, who: Mapping[str, Any]) -> Iterator[None]:
    """Ends the process with a message if what is inside takes longer."""

    def give_up():
        process = "this process" if "process_id" not in who else f"process {who['process_id']}"
        others = f"all {who['num_processes']}" if "num_processes" in who else "all"
        where = who.get("coordinator_address", "the address that JAX found")
        print(
            f"error: {process} waited {seconds} s for {others} to meet at {where}: look whether "
            "each was started, with the same number of processes and an id of its own, and "
            "whether the port is open; --join_timeout waits longer",
            file=sys.stderr,
        )
        _end(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
