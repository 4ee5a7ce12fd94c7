"""Define the command that serves a system's web page: read flags, load models, start a server."""

import ipaddress
import re
import secrets
import sys
from logging import LogRecord

from absl import flags, logging

from diffusion_jax import cli, exits, files
from diffusion_jax.devices import stop_signals
from diffusion_jax.draw import option_flags, options
from diffusion_jax.draw.kind import Kind
from diffusion_jax.web import about, results

flags.disclaim_key_flags()  # --help lists them with the command that calls `command`.
_LOCAL = ("127.0.0.1", "localhost", "[::1]")


def command(kind: Kind) -> None:
    """Run the command `python -m PACKAGE.web`: define flags, load models and serve the page.

    --help prints the docstring of the main module, which calls this function. For each picture, the
    page shows the command `python -m PACKAGE.sample ...` that draws the picture again.
    """
    workdir = flags.DEFINE_multi_string(
        "workdir",
        None,
        "The workdir of a run; commas separate the stages of a cascade. Repeat the flag for further models.",
        required=True,
    )
    port = flags.DEFINE_integer("port", 8765, "The port to listen on.", lower_bound=0, upper_bound=65535)
    host = flags.DEFINE_string(
        "host",
        "127.0.0.1",
        "The address to listen on. An address that other machines can reach needs a token, which is printed.",
    )
    root_path = flags.DEFINE_string(
        "root_path",
        "",
        "The path of the page behind a proxy, such as /draw; by default, the page is at the top of its host.",
    )
    holders = option_flags.define(kind.options)

    def main() -> None:
        cli.start(alone=True)
        logging.get_absl_handler().addFilter(_is_no_cancellation)
        with cli.bad_input():
            from diffusion_jax.web import listener, server  # They need the extra [web].

            root = root_of(root_path.value)
            listening = listener.bind(host.value, port.value)
            workdirs = results.named([stages_of(text) for text in workdir.value])
            values = option_flags.values(kind.options, holders)
            of = lambda name: kind.open(workdirs[name], options.by_stage(values, len(workdirs[name])))
            models = {name: of(name) for name, s in workdirs.items() if not about.untrained(s)}
        token = "" if is_local(host.value) else secrets.token_urlsafe(24)
        site = server.Site(kind.package, models, workdirs, of, root)
        hosts = (*_LOCAL, in_address(host.value)) if is_local(host.value) else ()
        query = f"?token={token}" if token else ""
        address = f"http://{in_address(host.value)}:{listening.getsockname()[1]}{root}/{query}"
        try:
            listener.serve(server.app(site, hosts, token), listening, f"open {address}")
        except KeyboardInterrupt:  # If the queue's thread compiles, Python's own end would abort.
            print("stopped by Ctrl-C", file=sys.stderr)
            stop_signals.end(exits.INTERRUPTED)

    cli.run(main)


def stages_of(text: str) -> list[str]:
    """Split a value of --workdir at commas into the workdirs of a cascade's stages.

    If the whole text is an existing path, it is not split, even if it contains commas.
    """
    return [text] if files.path(text).exists() else text.split(",")


def root_of(path: str) -> str:
    """Return the value of --root_path without a slash at its end. Raises ValueError if invalid."""
    if not re.fullmatch(r"(/[\w.~-]+)*/?", path, re.ASCII):
        raise ValueError(f"--root_path={path}: write a path such as /draw")
    return path.rstrip("/")


def in_address(host: str) -> str:
    """Return a host name in the form for URLs, with brackets around IPv6 addresses."""
    return f"[{host}]" if ":" in host else host


def is_local(host: str) -> bool:
    """Return whether a server at this address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_no_cancellation(record: LogRecord) -> bool:
    """Return False for the record that JAX logs when a drawing is cancelled, else True."""
    return "callback failed" not in str(record.msg)
