"""The page's socket: errors of addresses, and connections that never send a request."""

import contextlib
import signal
import socket
import sys
import threading
import time

import pytest
import uvicorn

from diffusion_jax import exits
from diffusion_jax.web import access, listener
from tests import processes
from tests.imagen_jax import commands


async def hello(scope, receive, send):
    """The smallest application. /stream never ends, and /read waits for the body."""
    if scope["type"] == "http":
        if scope["path"] == "/read":
            while (await receive()).get("more_body"):
                pass
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})


@pytest.fixture
def address(monkeypatch):
    """Start a server that allows 20 connections and one second for the head of a request."""
    monkeypatch.setattr(listener, "_HEADER_SECONDS", 1.0)
    monkeypatch.setattr(listener, "_CONNECTIONS", 20)
    listening = listener.bind("127.0.0.1", 0)
    application = access.with_headers(hello)
    config = uvicorn.Config(application, http=listener.Bounded, ws="none", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()
    server.should_exit = True
    thread.join()


def get(address, request=b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"):
    """Send a request and return the response."""
    with socket.create_connection(address, 30) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(4096), b"")).decode()


HEAD_PART, BODY_PART = b"GET / HTTP/1.1\r\nHost:", b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n["
STREAM = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("sent", [HEAD_PART, BODY_PART, STREAM], ids=["no head", "no body", "a stream"])
def test_unfinished_requests_and_open_streams_do_not_make_the_page_unreachable(address, sent):
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(socket.create_connection(address, 30))
            with contextlib.suppress(OSError):  # The oldest ones have been closed.
                client.sendall(sent)
                if sent == STREAM:
                    client.recv(1)
        assert "\r\nhello\r\n" in get(address)


@pytest.mark.parametrize("sent", [HEAD_PART, BODY_PART], ids=["no head", "no body"])
def test_a_connection_that_does_not_send_its_request_is_closed(address, sent, monkeypatch):
    monkeypatch.setattr(listener, "_BODY_SECONDS", 0.6)
    start = time.monotonic()
    with socket.create_connection(address, 30) as client:
        client.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
        assert time.monotonic() - start > 0.5


def test_a_malformed_request_gets_the_security_headers(address):
    response = get(address, b"\x00\x01\r\n\r\n")
    assert response.startswith("HTTP/1.1 400 ")
    assert all(f"\r\n{name}: {value}\r\n" in response for name, value in access.SAFE.items())


def test_a_port_in_use_is_an_error_that_suggests_another():
    with listener.bind("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with pytest.raises(exits.Busy, match=rf"--port={port} on 127.0.0.1 is in use: choose"):
            listener.bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["nosuch.invalid", "192.0.2.1", "a" * 300, ""])
def test_an_unknown_host_is_an_error_that_names_it(host):
    with pytest.raises(ValueError, match=f"--host={host} --port=0: "):
        listener.bind(host, 0)


def test_a_request_with_two_lengths_is_an_error_that_closes_its_connection(address):
    head, another = b"POST / HTTP/1.1\r\nHost: x\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    both = b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n"
    response = get(address, head + both + another)
    assert response.startswith("HTTP/1.1 400 ") and "hello" not in response


def serve(port, errors):
    sys.stderr = errors.open("w")
    listener.serve(hello, listener.bind("127.0.0.1", port), "opened")


def test_sigterm_ends_a_server_with_an_open_stream_without_a_word(tmp_path):
    port = processes.free_port()
    process = commands.fork(serve, port, tmp_path / "errors")
    deadline = time.monotonic() + processes.PATIENCE
    while True:
        assert time.monotonic() < deadline and process.is_alive()
        with contextlib.suppress(OSError):
            client = socket.create_connection(("127.0.0.1", port), 30)
            break
    with client:
        client.sendall(STREAM)
        assert client.recv(1)
        process.terminate()
        process.join(processes.PATIENCE)
    assert process.exitcode == -signal.SIGTERM
    assert (tmp_path / "errors").read_text() == ""
