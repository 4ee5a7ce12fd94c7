"""Listen for the web page's requests: the socket, and limits on connections without a request."""

import asyncio
import errno
import logging
import resource
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from diffusion_jax import exits
from diffusion_jax.web.access import SAFE

_HEADER_SECONDS = 10.0  # Time limit for the head of a request.
_BODY_SECONDS = 60.0  # Time limit for the body of a request, which may be a picture of 24 MB.
_SHUTDOWN_SECONDS = 3  # Time limit for the responses under way when the server is stopped.
_CONNECTIONS = 256  # The largest number of connections, if file descriptors allow.


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        Busy: The port is in use.
        ValueError: The socket cannot listen there, for example because the host is not an address
            of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise exits.Busy(f"--port={port} on {host} is in use: choose another --port") from error
        raise ValueError(f"--host={host} --port={port}: {reason}") from error


def serve(application: Any, listening: socket.socket, opened: str) -> None:
    """Serve the application until interrupted. Print the line `opened` when the server is ready."""
    config = uvicorn.Config(
        application, log_level="warning", http=Bounded, ws="none", timeout_graceful_shutdown=_SHUTDOWN_SECONDS
    )
    logging.getLogger("uvicorn.error").addFilter(_is_no_cut_off)
    server = uvicorn.Server(config)
    start = server.startup

    async def start_and_print(sockets: Any = None) -> None:
        await start(sockets)
        if server.started:
            print(opened, flush=True)

    server.startup = start_and_print
    server.run(sockets=[listening])


def _is_no_cut_off(record: logging.LogRecord) -> bool:
    """Return False for the records about a response that the end of the server cuts off."""
    cancelled = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cancelled and "graceful shutdown exceeded" not in str(record.msg)


class Bounded(H11Protocol):
    """A connection that is closed if it does not send a request in time.

    The head of a request and its body have time limits. If there are too many connections, one is
    closed. So neither idle connections nor stalled ones make the page unreachable.
    """

    _deadline: asyncio.TimerHandle | None = None
    _awaited = ""  # "head", "body", or "" while a request is being answered.
    _opened = 0.0

    def connection_made(self, transport: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """If there are too many connections, close the oldest one that has sent no whole request.

        If every other connection has sent a request that is being answered, close the oldest of
        them. Browsers open a closed event stream again.
        """
        super().connection_made(transport)
        self._opened = self.loop.time()
        if len(self.connections) > most_connections():
            others = [c for c in self.connections if isinstance(c, Bounded) and c is not self]
            oldest = min(others, key=lambda c: (not c._deadline, c._due()))
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
        """Start the timeout of the head or of the body, and cancel it while answering."""
        answering = self.cycle is not None and not self.cycle.response_complete
        awaited = "head" if not answering else "body" if self.cycle.more_body else ""
        if awaited != self._awaited or not self._deadline:
            self._forget()
            self._awaited = awaited
            if awaited and not self.transport.is_closing():
                seconds = _BODY_SECONDS if awaited == "body" else _HEADER_SECONDS
                self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _due(self) -> float:
        return self._deadline.when() if self._deadline else self._opened

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def most_connections() -> int:
    """Return the largest number of connections, which leaves half of the file descriptors free."""
    return min(_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
