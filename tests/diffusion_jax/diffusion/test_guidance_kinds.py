"""Kinds of guidance against diffusers' guiders, on predictions of v.

`guiders.npz` was written by `of_diffusers` with diffusers 0.42 and kornia 0.9. If diffusers is
installed, its guiders run here too. FrequencyDecoupledGuidance also needs kornia.
"""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.diffusion import guidance, guidance_kinds, precond
from sd_jax.settings import Sampler

SAVED = dict(np.load(pathlib.Path(__file__).parents[2] / "fixtures" / "guiders.npz"))
SCALE = 7.5
LEVELS = jnp.array([9.0, 3.0, 0.5, 0.0])
V = precond.velocity(lambda sigma: 1000 * sigma / (1 + sigma))
# Guiding here, and the class and arguments in diffusers. `low` of fdg is (4.25 - 1) / (7.5 - 1).
KINDS = {
    "cfg_zero": ("ClassifierFreeZeroStarGuidance", {"guidance_scale": SCALE}),
    "cfg_zero(zero=2)": ("ClassifierFreeZeroStarGuidance", {"guidance_scale": SCALE, "zero_init_steps": 2}),
    "tcfg": ("TangentialClassifierFreeGuidance", {"guidance_scale": SCALE}),
    "fdg(low=0.5)": ("FrequencyDecoupledGuidance", {"guidance_scales": [SCALE, 4.25]}),
}
STEPS = 3


def of_diffusers(guiding):
    """Return the guided predictions of all steps, [steps, B, H, W, C]."""
    torch, guiders = pytest.importorskip("torch"), pytest.importorskip("diffusers.guiders")
    name, arguments = KINDS[guiding]
    if name.startswith("Frequency"):
        pytest.importorskip("kornia")
    guider, guided = getattr(guiders, name)(**arguments), []
    cond, uncond = (torch.from_numpy(SAVED[k].transpose(0, 3, 1, 2)) for k in ("cond", "uncond"))
    for step in range(STEPS):
        guider.set_state(step, STEPS, torch.tensor(0))
        guided.append(guider.forward(cond, uncond).pred.numpy().transpose(0, 2, 3, 1))
    return np.stack(guided)


def settings(guiding):
    return Sampler(guiding=guiding)


def ours(guiding, step):
    """Return this project's guided prediction of a step, from the same predictions."""
    model = guidance_kinds.GuidedModel(V, LEVELS)
    x, sigma = jnp.asarray(SAVED["x"]), jnp.full(len(SAVED["x"]), LEVELS[step])
    c_skip, c_out, *_ = (c[:, None, None, None] for c in V(sigma))
    d = {"cond": c_skip * x + c_out * SAVED["cond"], "negative": c_skip * x + c_out * SAVED["uncond"]}
    guided = guidance.make(settings(guiding), model).combine(d, x, sigma, SCALE)
    return (guided - c_skip * x) / c_out


def close(actual, expected):
    """Compares up to 1e-5 of the largest guided prediction, because both compute in float32."""
    np.testing.assert_allclose(actual, expected, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("guiding", KINDS)
def test_guided_predictions_match_those_saved_from_diffusers(guiding):
    for step in range(STEPS):
        close(ours(guiding, step), SAVED[guiding][step])


@pytest.mark.parametrize("guiding", KINDS)
def test_guided_predictions_match_the_installed_diffusers(guiding):
    expected = of_diffusers(guiding)
    np.testing.assert_allclose(SAVED[guiding], expected, atol=1e-5)
    for step in range(STEPS):
        close(ours(guiding, step), expected[step])


@pytest.mark.parametrize("guiding", [kind.__name__ for kind in guidance.PLAIN_AT_1])
def test_kinds_listed_as_plain_at_1_equal_the_conditional_model_at_guidance_1(guiding):
    x = jnp.asarray(SAVED["x"])
    d = {"cond": x, "negative": jnp.asarray(SAVED["uncond"])}
    guide = guidance.make(settings(guiding), guidance_kinds.GuidedModel(V, LEVELS))
    np.testing.assert_allclose(guide.combine(d, x, jnp.full(len(x), 0.5), 1.0), x, atol=2e-6)


@pytest.mark.parametrize("name", ["apg", "cfg_zero", "tcfg", "fdg"])
def test_perp_neg_is_rejected_before_kinds_that_use_the_negative_text(name):
    model = guidance_kinds.GuidedModel(V, LEVELS)
    guidance.make(settings(f"{name}+perp_neg"), model)
    with pytest.raises(ValueError, match=rf"which perp_neg leads away: write {name}\+perp_neg"):
        guidance.make(settings(f"perp_neg+{name}"), model)


def test_low_frequencies_keeps_a_constant_and_removes_a_checkerboard():
    constant, alternating = jnp.ones((1, 7, 6, 1)), jnp.array([1.0, -1.0])
    np.testing.assert_allclose(guidance_kinds.low_frequencies(constant), constant, rtol=1e-6)
    board = alternating[jnp.indices((8, 8)).sum(0) % 2][None, ..., None]
    np.testing.assert_allclose(guidance_kinds.low_frequencies(board), 0, atol=1e-6)
