"""Write a short config file that changes fields of a config in configs/, with comments."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from diffusion_jax import systems

Changes = Mapping[str, tuple[Any, str]]
"""Maps config fields, such as unet.dtype, to (new value, comment). The comment may be "".

A group that the base config lacks is a single entry, whose value is a dict of the group's fields.
"""


def source(base: str, changes: Changes, about: str) -> str:
    """Return the source of a config file that loads configs/{base}.py and changes some fields.

    `changes` holds the changed fields. `about` becomes the docstring of the file.
    """
    lines = [f"    c.{field} = {_literal(value)}" for field, (value, _) in changes.items()]
    notes = [f"  # {note}" if note else "" for _, note in changes.values()]
    body = "\n".join(line + note for line, note in zip(lines, notes, strict=True))
    # `about` contains the path of the data, which may contain """ or a backslash.
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
    """Return the complete config: configs/BASE.py, `changes`, and defaults for all other fields.

    Raises ValueError if configs/ cannot be imported.
    """
    names: dict[str, Any] = {}
    try:
        exec(source(base, changes, ""), names)  # The same text that training will read.
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{error}: run this command from the root of a checkout of this repository"
        ) from error
    return systems.complete(names["get_config"]().to_dict())


def _literal(value: Any) -> str:
    """Format a value as Python source in this project's style.

    Strings get double quotes, a tuple of strings gets one line per string, and large integers get
    underscores.
    """
    if isinstance(value, dict):
        return f"dict({', '.join(f'{name}={_literal(each)}' for name, each in value.items())})"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return "(\n" + "".join(f"        {_literal(text)},\n" for text in value) + "    )"
    return f"{value:_}" if isinstance(value, int) and abs(value) >= 10_000 else repr(value)
