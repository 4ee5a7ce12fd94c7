"""Build the Candidate that fine-tunes a trained model of this repository on a few pictures."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from diffusion_jax import runs
from diffusion_jax.start import written
from diffusion_jax.start.stages import Candidate, TrainingStage
from diffusion_jax.start.written import Changes

NO, LORA, FULL = "no", "lora", "full"
"""How to train: NO trains a new model, LORA a LoRA for the shipped model, and FULL all weights of
the shipped model."""
# The settings of docs/finetuning.md, which trains on ten pictures in batches of 20: a LoRA for 150
# steps (300 epochs), and all weights for 100 steps (200 epochs).
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    LORA: {
        "lora": {"rank": 8, "targets": "_attn/|text_embed/|text_to_cond"},
        "optimizer.lr": 2e-3,
    },
    FULL: {"optimizer.lr": 3e-4},
}
_BATCH_SIZE = 20
_MAX_EPOCHS = {LORA: 300.0, FULL: 200.0}
_GROUPS = ("unet", "text", "diffusion", "sampler")  # Config groups that must match the weights.


class Shipped(NamedTuple):
    """A trained model that comes with the project."""

    workdir: str
    """The folder that holds the model's weights and config.json."""
    base: str
    """The name of the config in configs/ that trained the model."""

    def exists(self) -> bool:
        """Return whether the model's workdir exists, as it does in a checkout of the repository."""
        return (pathlib.Path(self.workdir) / runs.CONFIG).is_file()


def candidate(shipped: Shipped, new: TrainingStage, method: str) -> Candidate:
    """Return the candidate that fine-tunes a shipped model.

    Args:
        shipped: the model to start from.
        new: the stage that would train a new model. The candidate's stage uses the same command.
        method: LORA or FULL.
    """
    changes, epochs = lambda workdir: _changes(shipped, method), _MAX_EPOCHS[method]
    stage = new._replace(base=shipped.base, share=1.0, changes=changes, max_epochs=epochs)
    return Candidate(runs.load(shipped.workdir)["unet"]["image_size"], 0, [stage])


def _changes(shipped: Shipped, method: str) -> Changes:
    """Return the changes that turn the config shipped.base into a config for fine-tuning.

    They set the values that the shipped model's own config.json has, and the settings for `method`.
    """
    base, own = written.config(shipped.base, {}), runs.load(shipped.workdir)
    values = {
        f"{group}.{field}": value
        for group in _GROUPS
        for field, value in own[group].items()
        if field not in ("weights", "dtype") and _plain(value) != _plain(base[group].get(field))
    }
    devices = jax.device_count()
    batch_size = -(-_BATCH_SIZE // devices) * devices
    values |= {"unet.weights": shipped.workdir, "batch_size": batch_size, "optimizer.warmup": 10}
    values |= {"text.max_tokens": own["text"]["max_tokens"], **_SETTINGS[method]}
    return {name: (_plain(value), "") for name, value in values.items()}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
