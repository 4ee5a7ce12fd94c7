"""Start, run and end several processes together.

A command is a single process by default. It joins other processes if --coordinator,
--num_processes and --process_id are given, if JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
JAX_PROCESS_ID are set, or if Slurm's srun or GKE's TPU pods started several. On a TPU VM or under
MPI, --distributed=on lets JAX find the other processes.

When one process dies, JAX's coordination service ends all others. This happens at once if a
collective operation fails or the connection to process 0 breaks, otherwise after a heartbeat
timeout.
"""

import contextlib
import hashlib
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from absl import flags, logging
from jax.experimental import multihost_utils

from diffusion_jax import exits
from diffusion_jax.devices.crash_message import CrashMessage, exit_at_abort
from diffusion_jax.devices.stop_signals import end

_HEARTBEAT = 30  # Seconds of silence after which JAX takes a process for dead.
_GRACE = 2.0  # Seconds that process 0 gives others to report the same error before it ends.
_ABRUPTLY = "abruptly, usually because another process died"
_TEXT = 500  # gather_text cuts each text to this number of bytes.
_BROKEN = re.compile(r"\bgloo\b|\bnccl\b|coordination.?service", re.IGNORECASE)
_DISTRIBUTED = flags.DEFINE_enum(
    "distributed",
    "auto",
    ["auto", "on", "off"],
    "Whether to join other processes; auto: if flags, variables or the cluster name them.",
)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.")
_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.", lower_bound=1)
_PROCESS = flags.DEFINE_integer("process_id", None, "Index of this process, from 0.", lower_bound=0)
_TIMEOUT = flags.DEFINE_integer(
    "join_timeout", 300, "Seconds to wait for the other processes at the start.", lower_bound=1
)


class _Farewell:
    """The parts of the message that this process prints if another process dies."""

    advice = "Start all processes again."
    last_words: CrashMessage | None = None


def join() -> None:
    """Join the other processes, if there are any. Call this before anything touches a device.

    Process 0 logs a table of processes and devices. From then on, the other processes log only
    warnings. If not all processes have joined after --join_timeout seconds, this process prints a
    message and exits with code 1.

    Raises:
        ValueError: The flags or variables are incomplete or differ between processes.
        Busy: Another program holds the coordinator's port.
    """
    choice = _DISTRIBUTED.value
    identity = _explicit(os.environ) or _detected(os.environ)
    if choice == "off" or (choice == "auto" and identity is None):
        return
    identity = identity or {}
    _check_port(identity)
    with _deadline(_TIMEOUT.value, identity):
        jax.distributed.initialize(
            **identity,
            heartbeat_timeout_seconds=_HEARTBEAT,
            initialization_timeout=_TIMEOUT.value + 60,  # Longer than ours: JAX aborts.
        )
        hosts = gather_text(socket.gethostname())  # The first collective operation.
    counts = gather_text(str(identity.get("num_processes", jax.process_count())))
    if len(set(counts)) > 1:
        each = ", ".join(f"{count} in process {process}" for process, count in enumerate(counts))
        raise ValueError(f"num_processes is {each}: start all processes with the same --num_processes")
    if jax.process_count() > 1:
        _Farewell.last_words = CrashMessage(_farewell(_ABRUPTLY))
        exit_at_abort()
    logging.info("process %d of %d", jax.process_index(), jax.process_count())
    if jax.process_index():
        logging.set_verbosity(logging.WARNING)  # Process 0 logs for all.
    logging.info("processes and devices\n%s", table(hosts, jax.devices()))


def advise(advice: str) -> None:
    """Set the advice that is printed if another process dies or a step hangs."""
    _Farewell.advice = advice
    if _Farewell.last_words:
        _Farewell.last_words.replace(_farewell(_ABRUPTLY))


def advice() -> str:
    """Return the advice to print if another process dies or a step hangs, as set by `advise`."""
    return _Farewell.advice


def is_disconnection(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, reports a broken connection to a process."""
    kinds = (ValueError, jax.errors.JaxRuntimeError)  # JAX raises either.
    while error is not None:
        if isinstance(error, kinds) and _BROKEN.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def table(hosts: Sequence[str], devices: Sequence[Any]) -> str:
    """Return a printable table with one line per process: its index, its host and its devices."""
    rows = [("process", "host", "devices")]
    for process, host in enumerate(hosts):
        local = [device for device in devices if device.process_index == process]
        ids = ",".join(str(device.id) for device in local)
        rows.append((str(process), host, f"{len(local)} x {local[0].device_kind} (ids {ids})"))
    width = max(len(host) for _, host, _ in rows)
    return "\n".join(f"{number:>7}  {host:<{width}}  {text}" for number, host, text in rows)


def gather_text(text: str) -> list[str]:
    """Return the texts of all processes, in the order of their indices.

    Each text is cut to 500 bytes. All processes must call this function.
    """
    if jax.process_count() == 1:
        return [text]
    row = np.zeros(_TEXT, np.uint8)
    raw = text.encode()[:_TEXT]
    row[: len(raw)] = np.frombuffer(raw, np.uint8)
    rows = multihost_utils.process_allgather(row)
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in np.atleast_2d(rows)]


def check_equal(facts: Mapping[str, Any], advice: str) -> None:
    """Raise ValueError in all processes if they differ in a fact. The message names the first one.

    All processes must call this function, with the same names in the same order. `advice` ends the
    message.
    """
    short = lambda text: text if len(text) <= 100 else f"{text[:60]}... (digest {_hash(text)})"
    texts = {name: short(str(value)) for name, value in facts.items()}
    if len(set(gather_text(_hash(str(texts))))) == 1:
        return
    for name, text in texts.items():
        each = gather_text(text)
        if different := [process for process, other in enumerate(each) if other != each[0]]:
            raise ValueError(
                f"{name} is {each[0]} in process 0, but {each[different[0]]} in process {different[0]}: {advice}"
            )


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def ending_at_disconnection() -> Iterator[None]:
    """End this process with a message if the connection to another process breaks in this context.

    If this process did not end, it would wait for the lost process when it writes a checkpoint.
    """
    try:
        yield
    except Exception as error:
        if is_disconnection(error):
            _fail(error, 1)
        raise


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Make all processes of this job leave this context together.

    A process that leaves this context without an error waits until all others have left it, too. A
    process that fails ends without waiting. Without this context, a failed process and the other
    processes would wait for each other at exit, until a signal kills the failed process and hides
    its exit code.
    """
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if jax.distributed.is_initialized() and code not in (None, 0, *exits.STOPPED):
            _fail(error, code if isinstance(code, int) else 1)
        _leave()
        raise
    _leave()


def _fail(error: BaseException, code: int) -> NoReturn:
    if is_disconnection(error):
        text = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        print(_farewell(f"because it lost another process ({text})"), file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
        code = exits.INTERRUPTED
    elif not isinstance(error, SystemExit):
        traceback.print_exc()
    if jax.process_index() == 0 and code in (exits.REFUSED, exits.BUSY):
        time.sleep(_GRACE)  # The others end with process 0: let them report the error first.
    _cancel_last_words()
    end(code)


def _leave() -> None:
    _cancel_last_words()
    jax.distributed.shutdown()


def _cancel_last_words() -> None:
    if _Farewell.last_words:
        _Farewell.last_words.cancel()
        _Farewell.last_words = None


def _farewell(how: str) -> str:
    name = f"process {jax.process_index()} on {socket.gethostname()}"
    return f"error: {name} has ended {how}. {_Farewell.advice}"


def _check_port(identity: Mapping[str, Any]) -> None:
    """Raise Busy in process 0 if another program holds the coordinator's port.

    Without this check, JAX would abort the process by a signal.
    """
    if identity.get("process_id") != 0 or "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        return
    address = identity["coordinator_address"]
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    port = int(address.rpartition(":")[2])
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise exits.Busy(
            f"process 0 cannot listen at {address} on {socket.gethostname()} ({error.strerror}): "
            "another program or an earlier run holds the port; wait until it ends, or choose "
            "another port for all processes"
        ) from error


def _explicit(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the arguments of jax.distributed.initialize that flags and variables set.

    Return None if num_processes is 1 or no argument is set. Raises ValueError if only some
    arguments are set, or if a value is invalid.
    """
    number = lambda name: int(environment[name]) if environment.get(name) else None
    identity = {
        "coordinator_address": _COORDINATOR.value or environment.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": _PROCESSES.value or number("JAX_NUM_PROCESSES"),
        "process_id": number("JAX_PROCESS_ID") if _PROCESS.value is None else _PROCESS.value,
    }
    if identity["num_processes"] == 1 or all(value is None for value in identity.values()):
        return None
    missing = [name for name, value in identity.items() if value is None]
    if missing:
        flag = {"coordinator_address": "--coordinator"}
        names = ", ".join(flag.get(name, f"--{name}") for name in missing)
        raise ValueError(
            f"{names} is missing: set all of --coordinator=HOST:PORT, --num_processes and "
            "--process_id, or all of JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID"
        )
    if identity["process_id"] >= identity["num_processes"]:
        raise ValueError(
            f"process_id is {identity['process_id']}, but with {identity['num_processes']} "
            f"processes it must be from 0 to {identity['num_processes'] - 1}"
        )
    if not re.fullmatch(r".+:\d+", identity["coordinator_address"]):
        raise ValueError(f"coordinator is {identity['coordinator_address']!r}: it must be HOST:PORT")
    return identity | {"cluster_detection_method": "deactivate"}


def _detected(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the arguments of jax.distributed.initialize for the cluster that is detected.

    Return None for a single process.
    """
    if "SLURM_STEP_NODELIST" in environment and int(environment.get("SLURM_NTASKS", 1)) > 1:
        return {"cluster_detection_method": "slurm", "local_device_ids": _slurm_ids(environment)}
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    if "," in hosts or int(environment.get("MEGASCALE_NUM_SLICES", 1)) > 1:
        return {"cluster_detection_method": "gketpu"}
    return None


def _slurm_ids(environment: Mapping[str, str]) -> list[int] | None:
    """Return the ids of all GPUs of this node if Slurm runs one task per node, else None.

    Without these ids, a task's JAX would use only the first GPU of its node.
    """
    alone = re.fullmatch(r"1(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if not alone or "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    return list(range(int(environment.get("SLURM_GPUS_ON_NODE") or 0))) or None


@contextlib.contextmanager
def _deadline(seconds: int, identity: Mapping[str, Any]) -> Iterator[None]:
    """End the process with a message and code 1 if this context lasts longer than `seconds`."""

    def give_up():
        process = f"process {identity.get('process_id', '(with no number yet)')}"
        others = f"all {identity['num_processes']}" if "num_processes" in identity else "all"
        address = identity.get("coordinator_address", "the address that JAX found")
        print(
            f"error: {process} waited {seconds} s for {others} processes to join at {address}: "
            "check that each was started, with the same --num_processes and its own --process_id, "
            "and that the port is open, or wait longer with --join_timeout",
            file=sys.stderr,
        )
        end(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
