"""The page's command, whole, for every system: flags -> models -> a server."""

import ipaddress
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import uvicorn
from absl import app, flags, logging

from diffusion_jax import cli
from diffusion_jax.draw import choice_flags
from diffusion_jax.draw.loaded import Loaded
from diffusion_jax.draw.model import Choice
from diffusion_jax.machine import files
from diffusion_jax.web import results, server

flags.disclaim_key_flags()  # They belong to the command that calls `command`: --help shows them.
_LOCAL = ("127.0.0.1", "localhost", "[::1]")


def command(
    package: str, load: Callable[[Sequence[str], Mapping[str, Any]], Loaded], kind: type[Choice]
) -> None:
    """Runs `python -m PACKAGE.web --workdir=FOLDER`; the caller's is its --help.

    `load` opens the stages of a model as chosen. What it raises of ValueError and OSError is one
    message and exit code 2.
    """
    workdir = flags.DEFINE_multi_string(
        "workdir", None, "The folder of a run; commas join the stages of a cascade; repeated for "
        "further models.", required=True,
    )  # fmt: skip
    port = flags.DEFINE_integer("port", 8765, "Where to listen.", lower_bound=0, upper_bound=65535)
    host = flags.DEFINE_string(
        "host", "127.0.0.1", "The address to listen at; any but this machine's own needs the token "
        "that is printed.",
    )  # fmt: skip
    holders = choice_flags.define(kind)

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
        cli.start(alone=True)
        said = lambda record: "callback failed" not in str(record.msg)
        logging.get_absl_handler().addFilter(said)
        with cli.bad_input():
            workdirs = results.named([stages_of(text) for text in workdir.value])
            choices = choice_flags.values(holders)
            models = {name: load(stages, choices) for name, stages in workdirs.items()}
        token = "" if is_local(host.value) else secrets.token_urlsafe(24)
        site = server.Site(package, models, workdirs)
        hosts = (*_LOCAL, in_address(host.value)) if is_local(host.value) else ()
        listen(server.app(site, hosts, token), host.value, port.value, token)

    cli.run(main)


def stages_of(text: str) -> list[str]:
    """The folders that a --workdir names: one whose own name has commas, or several."""
    return [text] if files.path(text).exists() else text.split(",")


def in_address(host: str) -> str:
    """A host as it stands in an address: of IPv6 between brackets."""
    return f"[{host}]" if ":" in host else host


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(application: Any, host: str, port: int, token: str) -> None:
    """Serves until it is told to end; says where, once it listens."""
    config = uvicorn.Config(application, host=host, port=port, log_level="warning")
    listener = uvicorn.Server(config)
    start = listener.startup

    async def say(sockets: Any = None) -> None:
        await start(sockets)
        if listener.started:
            real = listener.servers[0].sockets[0].getsockname()[1]
            ending = f"?token={token}" if token else ""
            print(f"open http://{in_address(host)}:{real}/{ending}", flush=True)

    listener.startup = say
    listener.run()
