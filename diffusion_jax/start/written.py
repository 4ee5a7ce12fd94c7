"""A config as a short file on top of one of configs/, a line and its reason for each change."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from diffusion_jax import systems

Changes = Mapping[str, tuple[Any, str]]
"""Values by their fields, such as unet.dtype, each with a comment or ""."""


def source(base: str, changes: Changes, about: str) -> str:
    """The text of a config file: its docstring, and what it changes of configs/BASE.py."""
    lines = [f"    c.{field} = {_literal(value)}" for field, (value, _) in changes.items()]
    notes = [f"  # {note}" if note else "" for _, note in changes.values()]
    body = "\n".join(line + note for line, note in zip(lines, notes, strict=True))
    # What is told of the data may hold whatever ends a docstring.
    about = about.replace("\\", "/").replace('"""', "'''")
    return textwrap.dedent('''\
        """{about}
        """

        from ml_collections import ConfigDict

        from configs import {base}


        def get_config() -> ConfigDict:
            c = {base}.get_config()
        {body}
            return c
        ''').format(about=about, base=base, body=body)  # fmt: skip


def config(base: str, changes: Changes) -> dict[str, Any]:
    """What such a file says, with the defaults of what it omits; ValueError without configs/."""
    names: dict[str, Any] = {}
    try:
        exec(source(base, changes, ""), names)  # As training reads it.
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: start from the folder of a checkout, which has it") from error
    return systems.complete(names["get_config"]().to_dict())


def _literal(value: Any) -> str:
    """As Python's formatters write it: double quotes, texts a line each."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return "(\n" + "".join(f"        {_literal(text)},\n" for text in value) + "    )"
    return f"{value:_}" if isinstance(value, int) and abs(value) >= 10_000 else repr(value)
