"""Stop training by a signal: SIGTERM, Ctrl-C (SIGINT), or SIGHUP after a lost connection."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax
from jax.experimental import multihost_utils

from diffusion_jax import exits

_SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP"}
_received: list[int] = []


@contextlib.contextmanager
def stopping(leave: Callable[[], object] = lambda: None) -> Iterator[Callable[[int], bool]]:
    """Yield should_stop(step), a function that returns whether a signal demands a stop now.

    Before the first call of should_stop, there is nothing to save. So if a signal arrives then,
    `leave` is called, and the process ends at once with exit code 128 + N for signal N, even while
    a library compiles a program. If a signal arrives later, the process does not end, but
    should_stop returns True. A second Ctrl-C calls `leave` and ends the process at once. A signal
    that this process ignores, such as SIGHUP under nohup, stays ignored.

    With several processes, the first signal never ends a process at once. If one process receives
    it, should_stop returns True in all processes at the same step.
    """
    joined = jax.process_count() > 1
    _received.clear()
    # JAX's service listens for SIGTERM, and agrees on a step with the other processes.
    taken = [
        number
        for number in _SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN and not (joined and number == signal.SIGTERM)
    ]
    begun = threading.Event()
    # Python calls its handlers between two operations of the main thread, and so not while a
    # library works. But Python writes the signal's number to a socket at once, and the thread
    # `watch` reads it there.
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def watch() -> None:
        interrupts = 0
        while numbers := reading.recv(1):
            if numbers[0] not in taken:
                continue
            interrupts += numbers[0] == signal.SIGINT
            if interrupts == 2 or not (joined or begun.is_set()):
                with contextlib.suppress(Exception):  # Buckets raise many types.
                    leave()
                when, how = ("before the first step", "starts the run again")
                if begun.is_set():
                    when, how = "a second time", "continues from the last checkpoint"
                name = _SIGNALS[signal.Signals(numbers[0])]
                print(f"stopped by {name} {when}; the same command {how}", file=sys.stderr)
                end(128 + numbers[0])
            if joined:
                os.kill(os.getpid(), signal.SIGTERM)
            if interrupts:
                print("saving a checkpoint; a second Ctrl-C ends at once", file=sys.stderr)

    def should_stop(step: int) -> bool:
        begun.set()
        return multihost_utils.reached_preemption_sync_point(step) if joined else bool(_received)

    watcher = threading.Thread(target=watch, name="stop signals", daemon=True)
    watcher.start()
    note = lambda number, _: _received.append(number)
    before = {number: signal.signal(number, note) for number in taken}
    wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        yield should_stop
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        begun.set()
        writing.close()  # Ends the thread.
        watcher.join()
        reading.close()


def received() -> bool:
    """Return whether this process has received a signal to stop."""
    return bool(_received)


def exit_code() -> int:
    """Return the exit code after a stop: 128 + N for signal N, 143 if another process got it."""
    return 128 + _received[0] if _received else exits.PREEMPTED


def name() -> str:
    """Return the name of the signal that stopped this process: SIGTERM if another one got it."""
    return _SIGNALS[signal.Signals(exit_code() - 128)]


def end(code: int) -> NoReturn:
    """End this process at once, without any cleanup."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
