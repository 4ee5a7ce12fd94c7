"""How processes that are told of one another meet: who they are is compared before JAX starts.

JAX takes other numbers of processes in silence, and ends by a signal where two have one number or
another program holds the port. So process 0 listens on the coordinator's port first; each other one
says its number and how many it was told of, and all get the same answer. Then JAX has the port.
"""

import json
import os
import socket
import time
from collections.abc import Iterator

from diffusion_jax.machine.exits import Busy

_HELLO = "processes of one training"
_LINE = 4096  # Bytes that a process may say.
_PATIENCE = 10.0  # Seconds for a line that has begun to be due.
_FOREIGN = 5.0  # Seconds after which who answers something else is taken for another program.


def meet(address: str, process: int, count: int) -> None:
    """Returns when `count` different processes have met at HOST:PORT, which may take for ever.

    ValueError, the same in all of them, if they were told different numbers or two have one; Busy
    if another program holds the port, or an earlier run.
    """
    host, _, port = address.rpartition(":")
    if process:
        _visit(host.strip("[]"), int(port), process, count)
    else:
        _receive(host, int(port), count)


def _receive(host: str, port: int, count: int) -> None:
    """Process 0's part."""
    guests: dict[int, tuple[socket.socket, str]] = {0: (socket.socket(), _here())}
    error = ""
    with _listener(host, port) as listener:
        while len(guests) < count and not error:
            guest, _ = listener.accept()
            said = next(_lines(guest), None)
            if said is None or said.get("hello") != _HELLO:
                guest.close()  # A stranger, who may knock as he likes.
                continue
            number, who = said.get("process"), str(said.get("where"))
            number = number if isinstance(number, int) else -1
            if said.get("count") != count:
                error = (
                    f"process {number} ({who}) was told of {said.get('count')} processes, and "
                    f"process 0 ({_here()}) of {count}: start all with the same --num_processes"
                )
            elif not 0 < number < count or number in guests:
                other = guests[number][1] if number in guests else "nobody"
                error = (
                    f"two processes have the number {number} ({other}, and {who}): give each a "
                    f"--process_id of its own, from 0 to {count - 1}"
                )
                number = -1
            guests[number] = guest, who
    for guest, _ in guests.values():
        _answer(guest, error)
    if error:
        raise ValueError(error)


def _answer(guest: socket.socket, error: str) -> None:
    with guest:
        try:
            guest.sendall(json.dumps({"hello": _HELLO, "error": error}).encode() + b"\n")
            guest.recv(1)  # Who closes last has the port for itself at once.
        except OSError:  # Gone by now, or process 0 itself.
            return


def _visit(host: str, port: int, process: int, count: int) -> None:
    """The part of the others."""
    said = {"hello": _HELLO, "process": process, "count": count, "where": _here()}
    foreign = None
    while True:
        try:
            with socket.create_connection((host, port), timeout=_PATIENCE) as door:
                door.sendall(json.dumps(said).encode() + b"\n")
                answer = next(_lines(door, patience=None), None)
        except OSError:  # Process 0 has not started, its name is not known yet.
            time.sleep(0.2)
            continue
        if answer is not None and answer.get("hello") == _HELLO:
            if answer.get("error"):
                raise ValueError(answer["error"])
            return
        foreign = foreign or time.monotonic()
        if time.monotonic() - foreign > _FOREIGN:
            raise Busy(
                f"at {host}:{port} nobody waits for process {process}: another program holds the "
                "port, or the run has begun without this process (two with one --process_id?)"
            )
        time.sleep(0.5)


def _listener(host: str, port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        raise Busy(
            f"process 0 cannot listen at {host}:{port} on {socket.gethostname()} ({error.strerror}"
            "): another program holds the port, or an earlier run has not ended; choose another "
            "port for all processes"
        ) from error


def _lines(connection: socket.socket, patience: float | None = _PATIENCE) -> Iterator[dict]:
    """What the other side says: one line of JSON, or nothing where it says anything else."""
    connection.settimeout(patience)
    heard = b""
    while b"\n" not in heard and len(heard) < _LINE:
        try:
            some = connection.recv(_LINE)
        except OSError:
            return
        if not some:
            return
        heard += some
        if not heard.startswith(b"{"):
            return
    try:
        said = json.loads(heard.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return
    if isinstance(said, dict):
        yield said


def _here() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"
