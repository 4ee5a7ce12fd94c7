"""Rendering of this folder's templates: the manifest for GKE and the script for Slurm."""

import pathlib
from typing import Any


def fill(name: str, **values: Any) -> str:
    """Render the template NAME.jinja in this folder with these values.

    Raises jinja2.UndefinedError if the template uses a name that is not in `values`.
    """
    import jinja2

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    text = (pathlib.Path(__file__).parent / f"{name}.jinja").read_text()
    return environment.from_string(text).render(values)
