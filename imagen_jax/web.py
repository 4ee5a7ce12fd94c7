"""Serve a web page to draw with Imagen models, compare them, and watch them train.

    python -m imagen_jax.web --workdir=runs/quickstart [--workdir=runs/other ...] [--port=8765]

The command prints the address of the page. Only this machine can reach the page, unless --host
names another address; then the page needs the token that is printed with the address. Pictures
appear while they are drawn. Each has a link, and the command that draws it again. A grid of
pictures compares the values of two settings. The page also shows the sweeps and training curves of
the runs. The command needs the extra [web]: pip install starlette uvicorn.

For a cascade, separate its stages by commas: --workdir=runs/base64,runs/sr256.
"""

from diffusion_jax.web.web_command import command
from imagen_jax.cascade import KIND

if __name__ == "__main__":
    command(KIND)
