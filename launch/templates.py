"""The texts beside the commands, NAME.jinja: a manifest, a script, a page."""

import pathlib
from typing import Any

import jinja2


def fill(name: str, **values: Any) -> str:
    """A template of this folder with these values, of which none may be missing."""
    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    text = (pathlib.Path(__file__).parent / f"{name}.jinja").read_text()
    return environment.from_string(text).render(values)
