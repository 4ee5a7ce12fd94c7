"""Serve a web page to draw with Stable Diffusion models, compare them, and watch them train.

    python -m sd_jax.web --workdir=runs/sd_quickstart [--workdir=runs/other ...] [--port=8765]

The command prints the address of the page. Only this machine can reach the page, unless --host
names another address; then the page needs the token that is printed with the address. Images appear
while they are drawn. Each has a link, and the command that draws it again. A grid of images
compares the values of two settings. The page also shows the sweeps and training curves of the runs.
A --workdir may also be a diffusers directory. The command needs the extra [web]: pip install
starlette uvicorn.
"""

from collections.abc import Sequence

from diffusion_jax.draw.model import Model
from diffusion_jax.draw.options import Values
from diffusion_jax.web.web_command import command
from sd_jax import drawing


def open_model(stages: Sequence[str], values: Values) -> Model:
    """Open the model in the workdir `stages[0]`, to draw with the given option values.

    Raises:
        ValueError: `stages` has several workdirs, but Stable Diffusion has no cascades.
    """
    if len(stages) > 1:
        raise ValueError(
            f"--workdir={','.join(stages)} does not exist, and Stable Diffusion has no cascades of "
            "several models: repeat --workdir for each model"
        )
    return drawing.load(stages[0], **values)


if __name__ == "__main__":
    command("sd_jax", open_model, drawing.OPTIONS)
