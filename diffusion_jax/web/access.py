"""Control access to the web page: check hosts, origins and the token, and set safe headers."""

import hmac
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from absl import logging
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from diffusion_jax.web.jobs import Full

SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Headers of every response, including errors."""
_TOKEN = "token"
_LENGTHS = {b"transfer-encoding", b"content-length"}
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/\s]+)(?::\d*)?")
Answer = Callable[[Request], Awaitable[Response]]


def with_headers(application: Any, root: str = "") -> Any:
    """Return an ASGI application that adds SAFE to every response, even to Starlette's errors.

    If the path of a request begins with `root`, this part is removed.
    """
    safe = [(name.lower().encode(), value.encode()) for name, value in SAFE.items()]
    names = {name for name, _ in safe}

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if root and scope.get("path", "").startswith(f"{root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(root)}
        lengths = {name for name, _ in scope.get("headers", ())} & _LENGTHS

        async def send_safely(message: Any) -> None:
            if message["type"] == "http.response.start":
                others = [(k, v) for k, v in message["headers"] if k.lower() not in names]
                message = {**message, "headers": [*others, *safe]}
            await send(message)

        if lengths == _LENGTHS:  # A proxy may take the rest of the body for another request.
            refusal = _error(400, "a request has transfer-encoding or content-length, not both")
            refusal.headers["connection"] = "close"
            return await refusal(scope, receive, send_safely)
        await application(scope, receive, send_safely)

    return answer


def guarded(answer: Answer, hosts: Sequence[str], token: str, root: str = "") -> Answer:
    """Return a handler that passes permitted requests to `answer` and refuses others.

    Refusals and errors become a response with one line of JSON. Requests from pages of other sites
    are refused. If `hosts` is not empty, only requests for these host names are permitted. If
    `token` is not empty, requests must carry it as a cookie or in the URL. `root` is the page's
    path behind a proxy.
    """

    async def checked(request: Request) -> Response:
        if refusal := _refusal(request, hosts):
            return refusal
        cookie = f"{_TOKEN}_{request.scope['server'][1]}"  # Browsers send a cookie to all ports.
        in_query = request.query_params.get(_TOKEN, "")
        if token and in_query and hmac.compare_digest(in_query.encode(), token.encode()):
            welcome = RedirectResponse(f"{root}{request.url.path}", 303)
            # With "strict", browsers would not send the cookie after a click on another site.
            welcome.set_cookie(cookie, token, httponly=True, samesite="lax")
            return welcome
        in_cookie = request.cookies.get(cookie, "")
        if token and not hmac.compare_digest(in_cookie.encode(), token.encode()):
            return _error(403, "the token is missing or wrong: open the address that the command printed")
        try:
            return await answer(request)
        except LookupError:
            return _error(404, "there is no such job, picture or model on this server")
        except Full as error:
            return _error(429, str(error))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            return _error(400, str(error))
        except Exception as error:  # A bug in this server. The page expects errors as JSON.
            logging.exception("a request failed")
            return _error(500, f"{type(error).__name__}: {error}")

    return checked


def _refusal(request: Request, hosts: Sequence[str]) -> Response | None:
    """Return an error response to a request for another host or from another site, else None."""
    host = request.headers.get("host", "")
    match = _HOST.fullmatch(host)
    if match is None or (hosts and match[1].lower() not in hosts):
        return _error(421, f"the server does not answer requests for the host {host[:100]!r}")
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return _error(403, f"the server does not answer requests from the site {origin[:100]!r}")
    return None


def _error(code: int, text: str) -> Response:
    return JSONResponse({"error": text}, code)
