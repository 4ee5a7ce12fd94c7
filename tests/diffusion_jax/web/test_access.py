"""Access to the page: hosts, origins, security headers and control characters."""

import json

import pytest

from diffusion_jax.web import access, server
from tests.diffusion_jax.web.test_server import HOSTS, JSON, Slow, a_picture, ask, post


@pytest.fixture
def app():
    slow = Slow()
    yield server.app(server.Site("imagen_jax", {"slow": slow}, {"slow": ["runs/no"]}), HOSTS)
    slow.go.release(1000)  # Otherwise an unfinished job fails, and logs this, during a later test.


OTHER_HOSTS = [f"127.0.0.1{end}" for end in ("]", ":80@evil", ":8765:1", ":x", " evil", "/evil")]


@pytest.mark.parametrize("host", [*OTHER_HOSTS, "[127.0.0.1", "[::1]evil.com", "evil", ""])
def test_malformed_and_unknown_hosts_are_errors(app, host):
    status, headers, content = ask(app, "/", host=host)
    assert status == 421 and repr(host) in json.loads(content)["error"]
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8765", "127.0.0.1:"])
def test_requests_with_the_pages_own_host_are_allowed(app, host):
    assert ask(app, "/", host=host)[0] == 200


@pytest.mark.parametrize("origin", ["http://127.0.0.1:9", "null", "", "https://evil.example"])
def test_only_requests_from_the_pages_own_origin_are_allowed(app, origin):
    ask_from = lambda origin: post(app, [a_picture()], headers=(JSON, ("origin", origin)))[0]
    assert (ask_from("http://127.0.0.1:8765"), ask_from(origin)) == (200, 403)


@pytest.mark.parametrize(("path", "status"), [("/none", 404), ("/api/draw", 405), ("/api/jobs/none", 404), ("/", 200)])
def test_every_response_has_the_security_headers(app, path, status):
    got, headers, _ = ask(app, path)
    assert got == status
    assert {name: headers[name.lower()] for name in access.SAFE} == access.SAFE


def test_control_characters_of_a_prompt_are_escaped_in_the_command(app):
    _, content = post(app, [a_picture(prompt="a'\x1b[31m\\ \n\u202e")])
    command = content["pictures"][0]["command"]
    assert r"$'--prompt=a\'\x1b[31m\\ \x0a\U0000202e'" in command and command.isprintable()
