"""The config with which start fine-tunes the model that comes with the project."""

import jax
import pytest

from diffusion_jax import runs, systems
from diffusion_jax.start import finetuned, written
from imagen_jax import start


@pytest.mark.parametrize(("method", "rank"), [(finetuned.LORA, 8), (finetuned.FULL, 0)])
def test_a_fine_tuning_config_suits_the_weights(method, rank):
    new = start.candidates()[0].stages[0]
    candidate = finetuned.candidate(start.SHIPPED, new, method)
    (stage,) = candidate.stages
    config = written.config(stage.base, stage.changes("runs/mine"))
    own = runs.load(start.SHIPPED.workdir)
    ours, theirs = (systems.read(c, "imagen_jax") for c in (config, own))
    assert ours.unet.clone(dtype=theirs.unet.dtype) == theirs.unet
    assert (ours.diffusion, ours.text, ours.sampler) == (
        theirs.diffusion, theirs.text, theirs.sampler
    )  # fmt: skip
    assert ours.lora.rank == rank and ours.unet_weights == start.SHIPPED.workdir
    assert ours.run.batch_size % jax.device_count() == 0 and ours.run.batch_size >= 20
    assert candidate.image_size == theirs.unet.image_size


def test_every_model_that_start_offers_predicts_the_image():
    """EDM's last steps leave what a small network has not learned as grain in the picture."""
    bases = {stage.base for candidate in start.candidates() for stage in candidate.stages}
    for base in bases:
        assert written.config(base, {})["diffusion"]["predicts"] in ("x0", "flow"), base
