"""Templates of the launchers' manifests and scripts, and of a page: NAME.jinja in this folder."""

import pathlib
from typing import Any

import jinja2


def fill(name: str, **values: Any) -> str:
    """Render a template of this folder. Raises an error if a value is missing."""
    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    text = (pathlib.Path(__file__).parent / f"{name}.jinja").read_text()
    return environment.from_string(text).render(values)
