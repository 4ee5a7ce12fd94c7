"""The loss and the sampler that all systems share, with a network that returns its inputs."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax import model
from diffusion_jax.config import settings
from diffusion_jax.diffusion import guides
from imagen_jax.settings import Diffusion, Sampler
from tests.diffusion_jax import training_noise

DIFFUSION = settings.read(Diffusion, {"predicts": "x0"}, "diffusion")
SAMPLER = settings.read(Sampler, {"name": "ddim", "steps": 2, "threshold": "none"}, "sampler")


def show(params, x, time, text, score):
    """Return the mean of the text and the score in place of a prediction."""
    level = text.mean((1, 2)) + score
    return jnp.broadcast_to(level[:, None, None, None], x.shape)


def a_task(drop_prob=0.0, network=show):
    """Return a Task for 4x4 pixels, whose network also reads a number per image, its "score"."""
    score = lambda batch: {"score": batch["score"]}
    text = lambda frozen, batch: {"text": batch["text"], **score(batch)}
    dropped = lambda frozen, condition: {
        "text": jnp.zeros_like(condition["text"]), "score": condition["score"]
    }  # fmt: skip
    system = model.System(
        unet=types.SimpleNamespace(apply=network),
        example=dict,
        target=lambda frozen, batch, keys: batch["image"],
        text=text,
        dropped=dropped,
        prompts=lambda frozen, batch: {
            guides.COND: lambda: text(frozen, batch),
            guides.NEGATIVE: lambda: {"text": jnp.zeros_like(batch["text"])},
        },
        canvas=lambda batch: (4, 4, 3),
        decode=lambda frozen, batch, x: x,
        edited=lambda frozen, batch, keys: lambda sampler: sampler,
    )
    return model.make_task(system, DIFFUSION, SAMPLER, drop_prob, {"text": ()})


def a_batch(size):
    rng = np.random.default_rng(0)
    return {
        "image": jnp.zeros((size, 4, 4, 3)),
        "text": jnp.asarray(rng.normal(size=(size, 2, 8)), jnp.float32),
        "score": jnp.asarray(rng.normal(size=size), jnp.float32),
    }


def test_texts_are_dropped_with_the_configured_probability():
    seen = []
    network = lambda params, x, time, text, score: seen.append(text) or x
    for drop_prob in (0.1, 0.0):
        a_task(drop_prob, network).loss({}, {}, a_batch(1000), training_noise.keys_of(1000))
    dropped = [1 - np.asarray(text).any((1, 2)).mean() for text in seen]
    assert abs(dropped[0] - 0.1) < 4 * (0.1 * 0.9 / 1000) ** 0.5  # Four standard errors.
    assert dropped[1] == 0


def test_the_noise_of_an_image_depends_only_on_its_key():
    seen = []
    network = lambda params, x, time, text, score: seen.append((x, time, text)) or x
    batch, keys = a_batch(6), training_noise.keys_of(6)
    a_task(0.5, network).loss({}, {}, batch, keys)
    a_task(0.5, network).loss({}, {}, {k: v[1::2] for k, v in batch.items()}, keys[1::2])
    for whole, part in zip(*seen, strict=True):
        np.testing.assert_array_equal(whole[1::2], part)
    assert len(np.unique(seen[0][1])) == 6


def test_an_extra_network_input_is_used_in_training_measuring_and_sampling():
    task, batch, keys = a_task(), a_batch(4), training_noise.keys_of(4)
    level = np.asarray(batch["text"].mean((1, 2)) + batch["score"])
    loss, _ = task.loss({}, {}, batch, keys)
    assert loss == pytest.approx((level**2).mean(), rel=1e-5)
    errors, _ = task.measure.errors({}, {}, batch, keys, jnp.full(4, 0.5))
    np.testing.assert_allclose(errors, level**2, rtol=1e-5)
    drawn = task.sample({}, {}, batch, keys, None)
    np.testing.assert_allclose(drawn[:, 0, 0, 0], level, rtol=1e-5)
    guided = task.sample({}, {}, batch, keys, jnp.full(4, 3.0))
    expected = 3 * batch["text"].mean((1, 2)) + batch["score"]
    np.testing.assert_allclose(guided[:, 0, 0, 0], expected, rtol=1e-4, atol=1e-5)


def test_losses_are_summed_and_counted_by_ranges_of_sigma():
    sigma = jnp.array(
        [0.01, 0.1, 0.11, 0.5, 2.0, 3.5, 80.0]
    )  # An edge belongs to the range below it.
    loss = jnp.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    metrics = model.loss_by_noise_level(loss, sigma)
    np.testing.assert_array_equal(metrics["level_loss"], [3, 4, 8, 16, 96])
    np.testing.assert_array_equal(metrics["level_count"], [2, 1, 1, 1, 2])


def test_a_loss_that_is_not_finite_affects_only_its_range_of_sigma():
    metrics = model.loss_by_noise_level(jnp.array([jnp.nan, 2.0]), jnp.array([0.2, 5.0]))
    np.testing.assert_array_equal(metrics["level_loss"], [0, np.nan, 0, 0, 2])
