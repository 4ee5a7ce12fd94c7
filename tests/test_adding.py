"""An example of each extension in docs/design.md can be added in one place."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from diffusion_jax.diffusion import grids, groups, guidance, noise, precond, samplers
from diffusion_jax.diffusion.objective import Denoise
from diffusion_jax.text import hashed
from imagen_jax import settings as imagen_settings
from imagen_jax import task as imagen
from imagen_jax.unet import UNet
from sd_jax import sampling
from sd_jax import task as sd
from sd_jax import unet as sd_unet
from tests import written_runs
from tests.changes import change
from tests.imagen_jax.cases import ONE_LEVEL
from tests.sd_jax import tiny

CAPTIONS = ["a red seven", "a blue three"]


def toy(x, time, text, scale):
    """A network in place of a UNet, which depends on all inputs and on one parameter."""
    shift = 0.1 * jnp.sin(time) + text.mean((1, 2))
    return jnp.tanh(scale * x + shift[:, None, None, None])


class Toy(UNet):
    """A network that compiles in milliseconds."""

    @nn.compact
    def __call__(self, x, time, text, text_mask, low_res=None, low_res_time=None, *, train=False):
        return toy(x, time, text, self.param("scale", nn.initializers.ones, ()))


class SDToy(sd_unet.UNet):
    """A network of latents that compiles in milliseconds."""

    @nn.compact
    def __call__(self, x, time, text):
        return toy(x, time, text, self.param("scale", nn.initializers.ones, ()))


def with_toy(s, kind):
    """Return the settings with a toy of the fields of their network."""
    names = [f.name for f in dataclasses.fields(s.unet) if f.name not in ("parent", "name")]
    return s._replace(unet=kind(**{name: getattr(s.unet, name) for name in names}))


def imagen_model(**changes):
    """Return (task, batch) of a tiny model. sampler__name="x" sets config.sampler.name."""
    c = quickstart.get_config()
    c.unet.update(ONE_LEVEL)
    c.text.update(width=32, max_tokens=6)
    s = with_toy(imagen_settings.read_settings(change(c, changes).to_dict()), Toy)
    encoder = hashed.encoder(32, 6)
    return imagen.make_task(s, encoder), encoder.tokenize(CAPTIONS)


def sd_model(**changes):
    """Return (task, batch) of a tiny Stable Diffusion."""
    s, encoder = with_toy(tiny.settings(**changes), SDToy), hashed.encoder(24, 6)
    batch = sampling.prompts(encoder, CAPTIONS, "ugly")
    return sd.make_task(s, encoder, jax.tree.map(jnp.asarray, tiny.vae_params())), batch


MODELS = {"imagen": imagen_model, "sd": sd_model}


def train_and_sample(task, batch):
    """Return loss and gradient norm of a training step, images, and counts by noise level."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
    params = written_runs.random_params(task.init)

    @jax.jit
    def step(params, frozen, batch, keys):
        (loss, metrics), grads = jax.value_and_grad(task.loss, has_aux=True)(params, frozen, batch, keys)
        norm = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
        params = jax.tree.map(lambda p, g: p - 1e-4 * g, params, grads)
        return loss, norm, metrics["level_count"], params

    loss, norm, counts, params = step(
        params, task.frozen, {"image": pixels, **batch}, jax.random.split(jax.random.key(0), 2)
    )
    keys = jax.random.split(jax.random.key(1), 2)
    images = jax.jit(task.sample)(params, task.frozen, batch, keys, jnp.full(2, 2.0))
    return float(loss), float(norm), np.asarray(images), np.asarray(counts)


@pytest.mark.parametrize("system", MODELS)
def test_a_sampler_a_guidance_and_a_threshold_are_added_in_one_place_each(system, monkeypatch):
    calls = []

    def last_guess(denoise, x, sigmas, draws, *, steps, share=0.0):
        """A sampler that returns D at the first level."""
        calls.append((len(sigmas), steps, share))
        return denoise(x, jnp.full(len(x), sigmas[0])) + sigmas[-1] * draws(0)

    def halved(guide, model, *, by=2.0):
        """Divide the guidance scale."""
        combine = lambda d, x, sigma, scale: guide.combine(d, x, sigma, scale / by)
        scales.append(by)
        return guide._replace(combine=combine)

    scales = []
    monkeypatch.setitem(guidance.GUIDANCE, "halved", halved)
    method = samplers.Method(last_guess)
    monkeypatch.setitem(samplers.SAMPLERS, "last_guess", method)
    model = MODELS[system](
        sampler__name="last_guess(share=0.5)", sampler__steps=3, sampler__guiding="halved(by=4)+rescale"
    )
    loss, norm, images, _ = train_and_sample(*model)
    assert np.isfinite([loss, norm]).all() and norm > 0
    assert images.shape == (2, 8, 8, 3) and np.isfinite(images).all()
    assert calls == [(4, 3, 0.5)] and scales == [4]


LEVELS = jnp.array([9.0, 3.0, 1.0])


def three_levels(*, middle=3.0, low=0.1):
    """A noise with three levels in training, and no special grid."""
    levels = jnp.array([9.0, middle, low])
    pick = lambda key, batch: jax.random.choice(key, levels, (batch,))
    return noise.Noise(pick, precond.log_snr)


@pytest.mark.parametrize("grid", ["", "exponential", "three_levels"])
def test_a_noise_and_a_grid_are_added_in_one_place_each(monkeypatch, grid):
    """Sampling uses the grid of the config."""
    monkeypatch.setitem(grids.GRIDS, "three_levels", lambda noise, s, *_: (LEVELS, None))
    monkeypatch.setitem(noise.NOISES, "three_levels", three_levels)
    model = imagen_model(
        diffusion__noise="three_levels(low=1.0)",
        diffusion__predicts="v",
        sampler__name="heun",
        sampler__steps=3,
        sampler__grid=grid,
    )
    loss, norm, images, counts = train_and_sample(*model)
    assert np.isfinite([loss, norm]).all() and np.isfinite(images).all()
    # Losses are reported in five ranges of sigma. 1, 3 and 9 are in the last three.
    assert counts[:2].sum() == 0 and counts[2:].sum() == 2


def test_stable_diffusion_uses_a_replaced_noise(monkeypatch):
    monkeypatch.setitem(noise.NOISES, "scaled_linear", three_levels)
    sizes = {"sampler__sigma_min": 1.0, "sampler__sigma_max": 9.0}
    task, batch = sd_model(sampler__name="ddim", sampler__steps=3, **sizes)
    loss, norm, images, _ = train_and_sample(task, batch)
    assert np.isfinite([loss, norm]).all() and np.isfinite(images).all()


@pytest.mark.parametrize("system", MODELS)
def test_a_training_method_is_added_in_one_place(system, monkeypatch):
    """It has `factor` times the loss of a denoiser, and draws pictures that are half as bright."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Scaled(Denoise):
        factor: float = 1.0

        def loss(self, objective, net, params, noised):
            loss, losses, sigma = super().loss(objective, net, params, noised)
            return self.factor * loss, losses, sigma

        def denoiser(self, net, params, scalings, sigmas):
            of = super().denoiser(net, params, scalings, sigmas)
            return lambda condition: lambda x, sigma: of(condition)(x, sigma) / 2

    monkeypatch.setitem(groups.METHODS, "scaled", Scaled)
    one_step = {"sampler__name": "ddim", "sampler__steps": 1, "sampler__end": "zero"}
    one_step |= {"sampler__threshold": "none"} if system == "imagen" else {}
    plain = train_and_sample(*MODELS[system](**one_step))
    ours = train_and_sample(*MODELS[system](diffusion__method="scaled(factor=3)", **one_step))
    assert ours[0] == pytest.approx(3 * plain[0], rel=1e-6)
    if system == "imagen":  # The VAE of Stable Diffusion is not linear.
        # The step of training before it, 1e-4 times the gradient, differs.
        np.testing.assert_allclose(ours[2], plain[2] / 2, atol=1e-3)
