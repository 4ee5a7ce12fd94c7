"""A page to draw with Imagen models, compare them, and watch them train.

    python -m imagen_jax.web --workdir=runs/quickstart [--workdir=runs/other ...] [--port=8765]

opens at the address that it prints, on this machine alone unless --host says otherwise: then it
asks for the token that it prints too. Pictures appear while they are drawn, each with a link and
the command that draws it again; two choices make a grid; sweeps and training are read from
the runs. It needs the extra [web]: pip install starlette uvicorn.
A cascade is --workdir=runs/base64,runs/sr256, its stages with commas between them.
"""

from diffusion_jax.web.command import command
from imagen_jax.cascade import Choice
from imagen_jax.notebook import load

if __name__ == "__main__":
    command("imagen_jax", lambda stages, choices: load(*stages, **choices), Choice)
