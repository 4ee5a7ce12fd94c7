"""Autoguidance: a run guides a flow model, in place of its negative prompt."""

import numpy as np
import pytest

import imagen_jax
from tests.imagen_jax.weights.test_initial import config, write


@pytest.mark.slow
def test_a_model_guided_by_itself_draws_as_without_guidance_and_by_another_run_differently(tmp_path):
    """D + (scale - 1) (D - D_guide), as in the paper (Karras et al. 2024, equation 3)."""
    flow, other = tmp_path / "flow", tmp_path / "other"
    noise = "logit_normal(mean=0.2, shift=2)"
    write(flow, config(diffusion__predicts="flow", diffusion__noise=noise, sampler__name="dpmpp_2m_sde(strength=0.5)"))
    write(other, config(unet__head_dim=16), seed=1)
    model = imagen_jax.load(flow, steps=4, guidance=1.0)
    plain = model.draw("a red seven", seeds=3).images.astype(int)

    def guided(guide, guiding):
        loaded = imagen_jax.load(flow, steps=4, guidance=3.0, guide=f"{guide}@0", guiding=guiding)
        (stage,) = loaded.card()["stages"]
        assert (stage["guide"], stage["guiding"]) == (f"{guide}@0", guiding)
        return loaded.draw("a red seven", seeds=3).images

    np.testing.assert_allclose(guided(flow, "cfg"), plain, atol=1)
    assert np.abs(guided(other, "apg(eta=0.5,norm=5)+rescale(0.7)") - plain).max() > 5
