"""The models that `start` offers, and the configs with which it fine-tunes the shipped one."""

import jax
import pytest

from diffusion_jax import runs, systems
from diffusion_jax.start.changes import full_config
from imagen_jax import start


@pytest.mark.parametrize(("method", "rank"), [("lora", 8), ("full", 0)])
def test_a_fine_tuning_config_matches_the_shipped_weights(method, rank):
    candidate = start.fine_tuned(method)
    (stage,) = candidate.stages
    config = full_config(stage.base, stage.changes("runs/mine"))
    own = runs.load(start.TRAINED)
    ours, theirs = (systems.read(c, "imagen_jax") for c in (config, own))
    assert ours.unet.clone(dtype=theirs.unet.dtype) == theirs.unet
    assert (ours.diffusion, ours.text, ours.sampler) == (theirs.diffusion, theirs.text, theirs.sampler)
    assert ours.lora.rank == rank and ours.unet_weights == start.TRAINED
    assert ours.run.batch_size % jax.device_count() == 0 and ours.run.batch_size >= 20
    assert candidate.image_size == theirs.unet.image_size


def test_every_model_offered_by_start_predicts_x0_or_flow():
    """With EDM's prediction, the errors of a small network remain visible as grain."""
    bases = {stage.base for candidate in start.candidates() for stage in candidate.stages}
    for base in bases:
        assert full_config(base, {})["diffusion"]["predicts"] in ("x0", "flow"), base
