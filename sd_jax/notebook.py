"""Draw with Stable Diffusion models in a notebook.

    import sd_jax

    model = sd_jax.load("runs/sd_quickstart")
    model.draw(["a red seven on gray paper"], guidance=3, steps=20, sampler="dpmpp_2m")

The path may also be a diffusers directory or a single checkpoint file.
"""

import os
from collections.abc import Sequence
from typing import Any

from diffusion_jax.draw.loaded import Inputs, Loaded, System
from diffusion_jax.draw.model import Model
from sd_jax import drawing, sampling
from sd_jax.drawing import NO_FACTS, File


def load(path: str | os.PathLike[str], *, file: File = NO_FACTS, **values: Any) -> Loaded:
    """Open a training run, a diffusers directory or a single checkpoint file, to draw with it.

    Args:
        path: The run's workdir, the directory or the file.
        file: Settings that a directory or a file may lack, such as what the UNet predicts.
        **values: Options for drawing, such as steps=20: the keys of drawing.OPTIONS, which are also
            the flags of sd_jax.sample.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: A value does not fit the model.
    """
    model = drawing.load(path, *drawing.choose(**values), file=file)
    card = lambda models: drawing.card(models[0])
    return Loaded(
        [model], [values], System(drawing.OPTIONS, _draw, _tokenize, card, any_shape=True)
    )


def _draw(
    models: Sequence[Model], prompts: Sequence[str], seeds: Sequence[int], inputs: Inputs
) -> Any:
    if inputs.low_res is not None:
        raise ValueError(
            "low_res is given, but Stable Diffusion has no stage that enlarges pictures: leave it "
            "out, and draw over the picture (image=...) at a larger height and width"
        )
    height, width = models[0].settings.output_shape
    over = inputs.over.at((width, height), len(prompts)) if inputs.over else {}
    batches = drawing.draw_batches(models[0], prompts, seeds, pictures=over)
    return ([images] for images in batches)


def _tokenize(model: Model, prompts: Sequence[str]) -> Any:
    return sampling.prompts(model.encoder, prompts, model.settings.sampler.negative_prompt)
