"""Several processes watch over each other, so that each survivor says who died, and where.

Process 0 keeps a connection to every other. Each sends a sign of life every few seconds; a
connection that closes without a farewell is a death, and process 0 tells all. Without it the others
end too, within seconds, but by a traceback of Gloo or NCCL, or by a signal.
"""

import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from diffusion_jax.machine import exits

_BEAT = 2.0  # Seconds between signs of life.
_SLOW = 8.0  # Seconds without one after which a process is named as silent.
_GONE = 60.0  # And as dead, well before JAX ends all by a signal (100 s).
_GRACE = 2.0  # Seconds that a process has to end by itself when another has.


class Peers:
    """This process's connections to the others."""

    def __init__(self, process: int, hosts: Sequence[str], advice: Callable[[], str]) -> None:
        """`advice` says, when a process has died, how to go on."""
        self._process, self._hosts, self._advice = process, hosts, advice
        self._selector = selectors.DefaultSelector()
        self._others: dict[int, socket.socket] = {}
        self._heard: dict[int, float] = {}
        self._silent: dict[int, float] = {}
        self._buffers: dict[socket.socket, bytes] = {}
        self._left: set[int] = set()
        self._ended = threading.Event()
        self._lost = threading.Event()
        self._lock = threading.Lock()

    def listen(self) -> str:
        """Opens process 0's door; the address and the password of it, for `connect` of all."""
        self._server = socket.create_server(("", 0), backlog=1024)
        self._token = secrets.token_hex(8)
        return json.dumps([_address(), self._server.getsockname()[1], self._token])

    def connect(self, door: str, hosts: Sequence[str]) -> None:
        """Joins all, and starts the thread; `hosts` are further names of process 0's."""
        address, port, token = json.loads(door)
        if self._process:
            connection = _first([*hosts, address], port)
            connection.sendall(_line({"process": self._process, "token": token}))
            self._add(0, connection)
        else:
            deadline = time.monotonic() + 60
            while len(self._others) < len(self._hosts) - 1:
                self._server.settimeout(max(0.1, deadline - time.monotonic()))
                connection, _ = self._server.accept()
                said = _hello(connection)
                if said.get("token") == self._token:
                    self._add(int(said["process"]), connection)
            self._server.close()
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def silent(self) -> str:
        """The processes that have given no sign for some time, for a message; "" for none."""
        return ", ".join(
            f"{self._name(number)} was last heard {age:.0f} s ago"
            for number, age in sorted(self._silent.items())
        )

    def wait_for_a_death(self, seconds: float) -> None:
        """Does not return if another process is found dead within so many seconds."""
        if self._lost.wait(seconds):
            time.sleep(60)  # The thread ends the process.

    def leave(self, failure: str = "", code: int = 0) -> None:
        """Says farewell: what this process ends with, or nothing if all end."""
        self._ended.set()
        self._tell({"farewell": failure, "code": code})

    def _add(self, number: int, connection: socket.socket) -> None:
        connection.settimeout(5)
        self._others[number], self._heard[number] = connection, time.monotonic()
        self._buffers[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ, number)

    def _watch(self) -> None:
        due = 0.0
        while not self._ended.is_set():
            if time.monotonic() >= due:
                due = time.monotonic() + _BEAT
                self._tell({} if self._process else {"silent": self._silent})
                self._look()
            for key, _ in self._selector.select(_BEAT / 4):
                self._hear(key.data, self._others[key.data])

    def _look(self) -> None:
        """Notes who is silent: process 0 knows it of all, and tells the others."""
        now = time.monotonic()
        ages = {n: now - t for n, t in self._heard.items() if now - t > _SLOW}
        self._silent = ages if not self._process else {**self._silent, **ages}
        for number, age in ages.items():
            if age > _GONE and number not in self._left:
                self._death(number, f"it gave no sign for {age:.0f} s")

    def _hear(self, number: int, connection: socket.socket) -> None:
        try:
            some = connection.recv(65536)
        except OSError:
            some = b""
        *lines, rest = (self._buffers[connection] + some).split(b"\n")
        self._buffers[connection] = rest[-65536:]
        self._heard[number] = time.monotonic() if some else self._heard[number]
        for line in lines:
            self._take(number, json.loads(line))
        if not some:
            self._selector.unregister(connection)
            if number not in self._left:
                age = time.monotonic() - self._heard[number]
                self._death(number, f"it was last heard {age:.1f} s ago")

    def _take(self, number: int, said: dict[str, Any]) -> None:
        if "silent" in said:
            self._silent = {int(n): age for n, age in said["silent"].items()
                            if int(n) != self._process}  # fmt: skip
        if "dead" in said:
            self._end(int(said["dead"]), said["how"], said["code"])
        if "farewell" in said:
            self._left.add(number)
            if said["farewell"]:
                self._death(number, said["farewell"], said["code"])

    def _death(self, number: int, how: str, code: int = 1) -> None:
        self._tell({"dead": number, "how": how, "code": code})
        self._end(number, how, code)

    def _end(self, number: int, how: str, code: int) -> None:
        """Says who died, and ends this process."""
        if self._ended.is_set():
            return
        self._lost.set()
        if code in (exits.REFUSED, exits.BUSY):  # This process may be about to say it better.
            time.sleep(_GRACE)
        print(
            f"error: {self._name(number)} has ended ({how}), and so does "
            f"{self._name(self._process)}. {self._advice()}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        time.sleep(_GRACE)
        os._exit(code or 1)

    def _name(self, number: int) -> str:
        return f"process {number} on {self._hosts[number]}"

    def _tell(self, said: dict[str, Any]) -> None:
        """To all: what has no reader any more is found out by the reading."""
        with self._lock:
            for connection in list(self._others.values()):
                try:
                    connection.sendall(_line(said))
                except OSError:
                    continue


def start(
    process: int, hosts: Sequence[str], gather: Callable[[str], list[str]], known: Sequence[str],
    advice: Callable[[], str],
) -> Peers | None:  # fmt: skip
    """Peers that watch, or None with a warning where they cannot reach each other.

    `gather` is distributed.gather_text, `known` are names by which process 0 has been reached.
    """
    peers = Peers(process, hosts, advice)
    door = gather("" if process else peers.listen())[0]
    try:
        peers.connect(door, known)
    except OSError as error:
        logging.warning("no watch over the other processes: %s at %s", error, door)
        peers.leave()  # Those that did connect take the end of it for no death.
        return None
    return peers


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _hello(connection: socket.socket) -> dict[str, Any]:
    connection.settimeout(5)
    try:
        said = json.loads(connection.recv(4096).partition(b"\n")[0])
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _first(hosts: Sequence[str], port: int) -> socket.socket:
    """A connection to the first of these names that answers; OSError if none does."""
    for host in hosts[:-1]:
        try:
            return socket.create_connection((host, port), timeout=10)
        except OSError:
            continue
    return socket.create_connection((hosts[-1], port), timeout=10)


def _address() -> str:
    """This machine's address as others see it; nothing is sent to find out."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # An address for documentation, which no one has.
            return probe.getsockname()[0]
    except OSError:
        return socket.gethostname()
