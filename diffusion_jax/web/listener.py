"""Listen for the web page's requests: the socket, and limits on connections without a request."""

import asyncio
import errno
import resource
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from diffusion_jax import exits
from diffusion_jax.web.access import SAFE

_HEADER_SECONDS = 10.0  # Time limit for the head of a request.
_CONNECTIONS = 256  # The largest number of connections, if file descriptors allow.


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        Busy: The port is in use.
        ValueError: The socket cannot listen there, for example because the host is not an address
            of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise exits.Busy(f"--port={port} on {host} is in use: choose another --port") from error
        raise ValueError(f"--host={host} --port={port}: {reason}") from error


def serve(application: Any, listening: socket.socket, opened: str) -> None:
    """Serve the application until interrupted. Print the line `opened` when the server is ready."""
    config = uvicorn.Config(application, log_level="warning", http=Bounded, ws="none")
    server = uvicorn.Server(config)
    start = server.startup

    async def start_and_print(sockets: Any = None) -> None:
        await start(sockets)
        if server.started:
            print(opened, flush=True)

    server.startup = start_and_print
    server.run(sockets=[listening])


class Bounded(H11Protocol):
    """A connection that is closed if it does not send the head of a request in time.

    If there are too many connections, the one that has been without a request for longest is
    closed. So idle connections cannot make the page unreachable.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """If there are too many connections, close the oldest one that has sent no request.

        If every other connection has sent a request that is being answered, close the new one.
        """
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            owing = {
                c._deadline.when(): c
                for c in self.connections
                if isinstance(c, Bounded) and c._deadline
            }
            oldest = owing[min(owing)] if owing else self
            oldest.transport.abort()
            self.connections.discard(oldest)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request, with the headers that all responses have."""
        lines = [f"{name}: {value}" for name, value in {**SAFE, "Connection": "close"}.items()]
        head = "\r\n".join(["HTTP/1.1 400 Bad Request", "Content-Type: text/plain", *lines])
        self.transport.write(f"{head}\r\n\r\n{msg}".encode())
        self.transport.close()

    def _watch(self) -> None:
        """Start the timeout while waiting for a request, and cancel it while answering one."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(_HEADER_SECONDS, self.transport.abort)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def most_connections() -> int:
    """Return the largest number of connections, which leaves half of the file descriptors free."""
    return min(_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
