"""MeanFlow in both systems: the paper's loss computed with jax.jvp, and sampling."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from diffusion_jax.precache import lookup
from imagen_jax import task
from imagen_jax.settings import read_settings
from sd_jax import sampling
from sd_jax import task as sd_task
from tests.diffusion_jax import training_noise
from tests.imagen_jax import test_task as imagen
from tests.sd_jax import test_task as sd
from tests.sd_jax import tiny

METHOD = "meanflow(omega={omega}, kappa={kappa}, every=1)"
FLOW = {"diffusion__predicts": "flow", "sampler__name": "ddim"}
TRAINED = FLOW | {"diffusion__noise": "logit_normal"}


def network(params, x, time, text, text_mask=None):
    """A network that depends on every input, and on the order of the text."""
    places = jnp.arange(1.0, 1 + text.shape[1])[:, None]
    seen = jnp.sin(time / 3) + (text * places).mean((1, 2))
    return jnp.tanh(params["x"] * x + params["seen"] * seen[:, None, None, None])


PARAMS = {"x": jnp.float32(0.7), "seen": jnp.float32(0.9)}
each = lambda c: c[:, None, None, None]


def velocity(params, z, t, h, text):
    """The mean velocity if the network predicts flow: time is log-SNR, and the last token is h."""
    half = jnp.exp(-np.log(10_000) * jnp.arange(text.shape[-1] // 2) / (text.shape[-1] // 2))
    angles = 1000 * h[:, None] * half
    token = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], 1)[:, None]
    return network(params, z, -2 * jnp.log(t / (1 - t)), jnp.concatenate([text, token], 1))


def papers_loss(params, x0, eps, sigmas, keep, text, empty, omega, kappa):
    t, r = (s / (1 + s) for s in (jnp.maximum(*sigmas), jnp.minimum(*sigmas)))
    z, v = each(1 - t) * x0 + each(t) * eps, eps - x0
    texts, none = jnp.where(keep[:, None, None], text, empty), jnp.zeros_like(t)
    guided = omega * v + (1 - omega - kappa) * velocity(params, z, t, none, empty + 0 * text)
    guided += kappa * velocity(params, z, t, none, text)
    target = jnp.where(each(keep), guided, v)
    u, change = jax.jvp(
        lambda z, t, r: velocity(params, z, t, t - r, texts), (z, t, r), (target, jnp.ones_like(t), jnp.zeros_like(r))
    )
    error = ((u - jax.lax.stop_gradient(target - each(t - r) * change)) ** 2).sum((1, 2, 3))
    return (error / jax.lax.stop_gradient(error + 0.01)).mean()


def check(training_task, frozen, batch, keys, inputs, guidance):
    gradient = jax.jit(jax.value_and_grad(training_task.loss, has_aux=True))
    (loss, metrics), grads = gradient(PARAMS, frozen, batch, keys)
    expected, expected_grads = jax.jit(jax.value_and_grad(papers_loss))(PARAMS, *inputs, *guidance)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, grad in expected_grads.items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-3)
    assert metrics["level_count"].sum() == 4


@pytest.mark.parametrize("guidance", [(1.0, 0.0), (0.4, 0.8)])
def test_imagens_meanflow_loss_matches_the_paper(guidance):
    omega, kappa = guidance
    s = imagen.settings(**TRAINED, diffusion__method=METHOD.format(omega=omega, kappa=kappa))
    encoder = lookup.open_encoder(s.text)
    batch, keys = imagen.a_batch(encoder), training_noise.keys_of(4)
    training_task = task.make_task(imagen.with_network(s, network), encoder)
    eps = training_noise.normal(keys, 0, 8 * 8 * 3).reshape(4, 8, 8, 3)
    sigmas, keep = two_levels(keys), training_noise.has_text(keys, 0.5)
    assert 0 < keep.sum() < 4
    inputs = batch["image"] / 127.5 - 1, eps, sigmas, keep, encoder.encode((), batch)[0], 0.0
    check(training_task, {"text": ()}, batch, keys, inputs, guidance)


def two_levels(keys):
    """Return the noise levels at both ends of each image's interval of time."""
    numbers = training_noise.SIGMA, training_noise.SECOND_SIGMA
    return [jnp.exp(training_noise.normal(keys, number, 1)[:, 0]) for number in numbers]


@pytest.mark.parametrize("drop_to", ["empty", "zeros"])
def test_stable_diffusions_meanflow_loss_matches_the_paper(drop_to):
    method = METHOD.format(omega=2, kappa=0.0)
    s = tiny.settings(**TRAINED, conditioning__drop_to=drop_to, diffusion__method=method)
    hashed = lookup.open_encoder(s.text)
    encode = lambda frozen, batch: (hashed.encode(frozen, batch)[0] + ~jnp.asarray(batch["text_mask"])[..., None], None)
    encoder = hashed._replace(encode=encode)
    batch = {"moments": sd.moments(), **encoder.tokenize(sd.CAPTIONS)}
    keys = training_noise.keys_of(4)
    training_task = sd_task.make_task(sd.with_network(s, network), encoder, sd.vae_params())
    mean, log_variance = jnp.split(sd.moments(), 2, axis=-1)
    x0 = s.latents.scale * (mean + jnp.exp(log_variance / 2) * sd.posterior_noise(keys))
    eps = training_noise.normal(keys, 0, 64).reshape(4, 4, 4, 4)
    sigmas, keep = two_levels(keys), training_noise.has_text(keys, s.text.drop_prob)
    assert 0 < keep.sum() < 4
    empty = encode((), encoder.tokenize([""]))[0] if drop_to == "empty" else 0.0
    inputs = x0, eps, sigmas, keep, encode((), batch)[0], empty
    check(training_task, {"text": (), "vae": None}, batch, keys, inputs, (2.0, 0.0))


@pytest.mark.parametrize("steps", [1, 2])
def test_each_sampling_step_follows_the_mean_velocity(steps):
    steps_to_1 = {"sampler__steps": steps, "sampler__grid": "karras", "sampler__sigma_min": 1.0}
    s = imagen.settings(**FLOW, **steps_to_1, diffusion__method=METHOD.format(omega=2, kappa=0.0))
    encoder = lookup.open_encoder(s.text)
    batch = encoder.tokenize(imagen.CAPTIONS)
    keys = jax.vmap(jax.random.key)(jnp.arange(4))
    training_task = task.make_task(imagen.with_network(s, network), encoder)
    start = training_task.sampler_inputs(PARAMS, {"text": ()}, batch, keys, None)
    times = start.sigmas / (1 + start.sigmas)
    z, text = start.x / (1 + start.sigmas[0]), encoder.encode((), batch)[0]
    assert len(times) == steps + 1 and times[-1] == 0
    for t, r in itertools.pairwise(times):
        z -= (t - r) * velocity(PARAMS, z, jnp.full(4, t), jnp.full(4, t - r), text)
    drawn = training_task.sample(PARAMS, {"text": ()}, batch, keys, None)
    np.testing.assert_allclose(drawn, z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampler", ["heun", "ddim(eta=0.5)", "euler_ancestral", "dpmpp_2m"])
def test_meanflow_rejects_samplers_other_than_deterministic_ddim_steps(sampler):
    """For example, Heun averages two mean velocities, which is not a mean velocity."""
    message = f"sampler.name is {sampler!r}, but a model trained with diffusion.method=meanflow"
    with pytest.raises(ValueError, match=re.escape(message)):
        imagen.settings(diffusion__predicts="flow", diffusion__method="meanflow", sampler__name=sampler)


def test_stable_diffusion_samples_along_the_mean_velocity():
    one_step = {"sampler__steps": 1, "sampler__grid": "karras", "sampler__sigma_max": 40.0}
    s = tiny.settings(**FLOW, **one_step, diffusion__noise="lognormal", diffusion__method="meanflow")
    s = sd.with_network(s, network)._replace(vae=sd.PlainVAE(**tiny.VAE_FIELDS))
    encoder = lookup.open_encoder(s.text)
    batch = sampling.prompts(encoder, sd.CAPTIONS, "")
    keys = jax.vmap(jax.random.key)(jnp.arange(4))
    frozen = {"text": (), "vae": {}}
    training_task = sd_task.make_task(s, encoder, sd.vae_params())
    start = sampling.make_sampler_inputs(s.pipeline, encoder)(PARAMS, frozen, batch, keys, None)
    t = start.sigmas[0] / (1 + start.sigmas[0])
    z, text = start.x / (1 + start.sigmas[0]), sampling.attended(s.pipeline, encoder, frozen, batch)
    assert start.sigmas[1] == 0
    z -= t * velocity(PARAMS, z, jnp.full(4, t), jnp.full(4, t), text)
    drawn = training_task.sample(PARAMS, frozen, batch, keys, None)
    np.testing.assert_allclose(drawn, 3 * z / s.latents.scale, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("read", [imagen.settings, tiny.settings])
def test_the_weight_min_snr_needs_its_limit(read):
    message = r"diffusion.weight is 'min_snr', but min_snr needs a value of gamma: .*, or none"
    with pytest.raises(ValueError, match=message):
        read(diffusion__weight="min_snr")


def test_loss_settings_that_meanflow_ignores_are_errors():
    c = quickstart.get_config()
    c.diffusion.method = "meanflow"
    with pytest.raises(ValueError, match=r"whose own loss ignores .*: set them to l2 and none"):
        read_settings(c.to_dict())
    c.diffusion.update(weight="none", method="meanflow(omega=-1)")
    with pytest.raises(ValueError, match="omega"):
        read_settings(c.to_dict())
