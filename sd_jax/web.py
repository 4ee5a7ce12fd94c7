"""Serve a web page to draw with Stable Diffusion models, compare them, and watch them train.

    python -m sd_jax.web --workdir=runs/sd_quickstart [--workdir=runs/other ...] [--port=8765]

The command prints the address of the page. Only this machine can reach the page, unless --host
names another address; then the page needs the token that is printed with the address. Images appear
while they are drawn. Each has a link, and the command that draws it again. A grid of images
compares the values of two settings. The page also shows the sweeps and training curves of the runs.
A --workdir may also be a diffusers directory. The command needs the extra [web]: pip install
starlette uvicorn.
"""

from diffusion_jax.web.web_command import command
from sd_jax.drawing import KIND

if __name__ == "__main__":
    command(KIND)
