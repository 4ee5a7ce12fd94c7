"""A page to draw with Stable Diffusion models, compare them, and watch them train.

    python -m sd_jax.web --workdir=runs/sd_quickstart [--workdir=runs/other ...] [--port=8765]

opens at the address that it prints, on this machine alone unless --host says otherwise: then it
asks for the token that it prints too. Pictures appear while they are drawn, each with a link and
the command that draws it again; two choices make a grid; sweeps and training are read from
the runs. It needs the extra [web]: pip install starlette uvicorn.
A --workdir may also be a diffusers directory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_jax.draw.loaded import Loaded
from diffusion_jax.web.command import command
from sd_jax.drawing import Choice
from sd_jax.notebook import load


def open_model(stages: Sequence[str], choices: Mapping[str, Any]) -> Loaded:
    """A model as chosen; ValueError for several in a row."""
    if len(stages) > 1:
        raise ValueError(
            f"--workdir={','.join(stages)}: there is no such path, and no model here has several "
            "stages: repeat --workdir for further models"
        )
    return load(stages[0], **choices)


if __name__ == "__main__":
    command("sd_jax", open_model, Choice)
