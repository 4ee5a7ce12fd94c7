"""Write a run's metrics and images to Weights & Biases. Only this module imports wandb."""

import contextlib
import importlib.util
import os
import pathlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt8

from diffusion_jax import files

ID = "wandb_id"
"""Name of the file in a workdir that stores the id of its W&B run.

When training resumes in this workdir, it adds its metrics to the W&B run with this id."""


class WandbWriter:
    """A writer for one run at Weights & Biases."""

    def __init__(self, run: Any, image: Any) -> None:
        self._run, self._image = run, image

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step, keyed by name."""
        self._run.log(dict(scalars), step=step)

    def write_images(self, step: int, images: Mapping[str, UInt8[np.ndarray, "N H W 3"]]) -> None:
        """Write the images of a step, keyed by name."""
        pictures = {name: [self._image(one) for one in batch] for name, batch in images.items()}
        self._run.log(pictures, step=step)


def check(project: str) -> None:
    """Raise ValueError if `project`, the value of log.wandb, is set, but wandb is missing."""
    if project and importlib.util.find_spec("wandb") is None:
        raise ValueError(f'log.wandb is {project!r}, but wandb is not installed: pip install -e ".[wandb]"')


@contextlib.contextmanager
def writing(
    project: str, workdir: str | os.PathLike[str], folder: pathlib.Path, config: Mapping[str, Any]
) -> Iterator[WandbWriter]:
    """Yield a writer for a workdir's W&B run, and finish the run at the end.

    The W&B run has the name of the workdir. The user must have logged in with `wandb login` or set
    WANDB_API_KEY. With WANDB_MODE=offline, the files stay in the subfolder wandb of `folder`, and
    `wandb sync` uploads them later. If a resumed run repeats steps, Weights & Biases ignores the
    repetitions.

    Args:
        project: The name of the project at Weights & Biases.
        workdir: The run's workdir. Its file `wandb_id` (the constant ID) stores the id of the W&B
            run.
        folder: A local folder, in which wandb creates its subfolder wandb.
        config: The run's config.
    """
    import wandb  # pyright: ignore[reportMissingImports]

    path = files.path(workdir) / ID
    if not path.exists():
        files.write_whole(path, uuid.uuid4().hex)
    run = wandb.init(
        project=project,
        name=files.path(workdir).name,
        id=path.read_text(),
        resume="allow",
        dir=str(folder),
        config=dict(config),
    )
    try:
        yield WandbWriter(run, wandb.Image)
    finally:
        run.finish()
