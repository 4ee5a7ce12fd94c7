"""Several processes of one command, which JAX joins through a local port.

Every wait has a time limit. A hang is a failure that prints the output of all processes.
"""

import contextlib
import random
import socket
import time

import jax

from diffusion_jax.logs import run_log
from tests.imagen_jax import commands

PATIENCE = 240  # Seconds, on a busy machine.


def run_all(count, function, *arguments, devices):
    """Run function(number, *arguments) in `count` joined processes, and return their exit codes."""
    where = {"coordinator_address": f"127.0.0.1:{free_port()}", "num_processes": count}
    processes = [
        commands.fork(_joined, {**where, "process_id": i}, function, *arguments, devices=devices) for i in range(count)
    ]
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
    return [process.exitcode for process in processes]


def _joined(who, function, *arguments):
    jax.distributed.initialize(**who)
    function(who["process_id"], *arguments)
    # All leave together, because ending early would break another's connection.
    jax.distributed.shutdown()


class Group:
    """The processes of one command. PROCESS in its arguments is replaced by each one's number."""

    def __init__(self, folder, count, name, *arguments, only=None, devices=1, before=None):
        port = free_port()
        folder.mkdir(exist_ok=True)
        self.outputs = [(folder / f"{i}.out", folder / f"{i}.err") for i in range(count)]
        joined = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}"]
        joined += ["--process_id=PROCESS"]
        self.processes = [
            commands.start(
                name,
                *(argument.replace("PROCESS", str(i)) for argument in (*arguments, *joined)),
                devices=devices,
                outputs=self.outputs[i],
                before=before,
            )
            for i in range(count)
            if only in (None, i)
        ]

    def end(self, of=None):
        """Wait until all (or the first few) have ended, and return their exit codes."""
        deadline = time.monotonic() + PATIENCE
        for process in self.processes[:of]:
            process.join(max(0, deadline - time.monotonic()))
        hung = [process for process in self.processes[:of] if process.is_alive()]
        for process in self.processes if hung else ():
            process.kill()
        assert not hung, self.printed()
        return [process.exitcode for process in self.processes[:of]]

    def printed(self):
        texts = (path.read_text() for pair in self.outputs for path in pair if path.exists())
        return "\n".join(texts)

    def wait_for(self, condition):
        """Wait until `condition` is true for the processes' output."""
        deadline = time.monotonic() + PATIENCE
        while not condition(self.printed()):
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.01)

    def wait_for_step(self, workdir, step):
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if last_step(workdir) >= step:
                return
            assert all(process.is_alive() for process in self.processes), self.printed()
            time.sleep(0.01)
        raise AssertionError(self.printed())


def free_port():
    """Return a free port below Linux's automatic range, which no other connection will get."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            return port


def last_step(workdir):
    """Return the last step in the metrics, or 0."""
    path = workdir / run_log.METRICS
    lines = run_log.read_metrics(path) if path.exists() else []
    return lines[-1]["step"] if lines else 0
