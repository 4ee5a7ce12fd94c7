"""Keep user names, passwords and signatures in URLs out of everything that is shown or written.

`hide` removes them where a URL enters the program, and remembers them. Requests to the server send
them again. So configs, records of settings, names of records and messages never hold them.
"""

import functools
import re
from typing import Any, TypeVar

T = TypeVar("T")
_NO_END = r"(?!::|,[a-zA-Z][\w+.-]*://)"  # "::TEXT" or another URL may follow a URL.
_URL = re.compile(
    r"(?P<scheme>\b[a-zA-Z][\w+.-]*://)(?P<user>[^\s/?#@\"']*@)?"
    rf"(?P<address>(?:\[[^\]\s]*\])?(?:{_NO_END}[^\s?#\"'])*)"  # A host in brackets is IPv6.
    rf"(?P<query>\?(?:{_NO_END}[^\s\"'])*(?<![:,.;)]))?"
)
_BEFORE = " "  # A URL after a space is part of a text such as a prompt, and is never opened.
_GLOB = re.compile(r"[{*]")
_secrets: dict[str, tuple[str, str]] = {}  # Maps the start of an address to (user@, ?query).


def without(text: str) -> str:
    """Return a text without the user names and passwords of its URLs, and queries of web pages."""
    return _URL.sub(lambda match: _address(match), text)


def hide(value: T) -> T:
    """Return a value without the secrets of its URLs, which are sent with later requests.

    The value is a string, or holds strings, as a config does.
    """
    if isinstance(value, str):
        return _URL.sub(_hidden, value)  # pyright: ignore[reportReturnType]
    return _mapped(hide, value)


def reveal(value: T) -> T:
    """Return a value with the secrets that `hide` has removed from its URLs."""
    if isinstance(value, str):
        return _URL.sub(_revealed, value)  # pyright: ignore[reportReturnType]
    return _mapped(reveal, value)


def _mapped(function: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: function(part) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    return type(value)(map(function, value)) if isinstance(value, list | tuple) else value


def _address(match: re.Match[str]) -> str:
    query = "" if match["scheme"].lower().startswith("http") else match["query"] or ""
    return match["scheme"] + match["address"] + query


def _hidden(match: re.Match[str]) -> str:
    address = _address(match)
    if match.string[: match.start()].endswith(_BEFORE) or address == match[0]:
        return match[0]
    if address.lower().startswith("http"):
        _secrets[_GLOB.split(address)[0]] = match["user"] or "", match["query"] or ""
        _send()
    return address


def _revealed(match: re.Match[str]) -> str:
    starts = [start for start in _secrets if match[0].startswith(start)]
    if not starts or match[0] != _address(match):
        return match[0]
    user, query = _secrets[max(starts, key=len)]
    return f"{match['scheme']}{user}{match['address']}{query}"


@functools.cache
def _send() -> None:
    """Make fsspec send the secrets with each request to a web server."""
    import fsspec
    from fsspec.implementations.http import HTTPFileSystem

    class WithSecrets(HTTPFileSystem):
        def encode_url(self, url: str) -> Any:
            return super().encode_url(reveal(url))

    for scheme in ("http", "https"):
        fsspec.register_implementation(scheme, WithSecrets, clobber=True)
