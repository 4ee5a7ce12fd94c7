"""The loss and the sampler that all systems share, with a network that returns its inputs."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax import model
from diffusion_jax.config import picture_fields, settings
from diffusion_jax.diffusion import guidance_kinds
from imagen_jax.settings import Diffusion, Sampler
from tests.diffusion_jax import training_noise

DIFFUSION = settings.read(Diffusion, {"predicts": "x0"}, "diffusion")
SAMPLER = settings.read(Sampler, {"name": "ddim", "steps": 2, "threshold": "none"}, "sampler")


def show(params, x, time, text, score):
    """Return the mean of the text and the score in place of a prediction."""
    level = text.mean((1, 2)) + score
    return jnp.broadcast_to(level[:, None, None, None], x.shape)


class Texts(model.System):
    """A system of 4x4 pixels, whose network reads the text of the batch."""

    def __init__(self, network, **attributes):
        self.unet = types.SimpleNamespace(apply=network)
        vars(self).update(attributes)

    def example(self):
        return {}

    def target(self, frozen, batch, keys):
        return batch["image"]

    def text(self, frozen, batch):
        return {"text": batch["text"]}

    def dropped(self, frozen, condition):
        return {**condition, "text": jnp.zeros_like(condition["text"])}

    def conditions(self, frozen, batch):
        return {
            guidance_kinds.COND: lambda: self.text(frozen, batch),
            guidance_kinds.NEGATIVE: lambda: {"text": jnp.zeros_like(batch["text"])},
        }

    def sample_shape(self, batch):
        return 4, 4, 3

    def editor(self, frozen, batch, keys):
        return lambda sampler: sampler


class Scored(Texts):
    """Its network also reads a number per image, its "score"."""

    def text(self, frozen, batch):
        return {"text": batch["text"], "score": batch["score"]}


def a_task(drop_prob=0.0, network=show, diffusion=DIFFUSION):
    return model.make_task(Scored(network), diffusion, SAMPLER, drop_prob, {"text": ()})


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


def test_a_mask_weights_the_loss_of_each_pixel_as_kohyas_scripts_do():
    """loss = (loss * mask).mean(): the mean over all pixels, of which black ones have no gradient.

    The network's output is its parameters, so the target of each image is 0 + its noise-free x0.
    """
    batch, keys = a_batch(4), training_noise.keys_of(4)
    network = lambda params, x, time, text, score: params
    loss = lambda params, batch: a_task(network=network).loss(params, {}, batch, keys)[0]
    rng = np.random.default_rng(1)
    params = jnp.asarray(rng.normal(size=(4, 4, 4, 3)), jnp.float32)
    mask = rng.choice([0, 51, 255], (4, 4, 4)).astype(np.uint8)
    value, gradient = jax.value_and_grad(loss)(params, {**batch, "loss_mask": jnp.asarray(mask)})
    share = mask[..., None] / 255
    np.testing.assert_allclose(value, (np.float64(params) ** 2 * share).mean(), rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * params * share / params.size, atol=1e-7)
    assert not np.asarray(gradient)[mask == 0].any()
    white = {**batch, "loss_mask": jnp.full((4, 4, 4), 255, jnp.uint8)}
    np.testing.assert_allclose(loss(params, white), loss(params, batch), rtol=1e-6)


def test_losses_are_summed_and_counted_by_ranges_of_sigma():
    # An edge belongs to the range below it.
    sigma = jnp.array([0.01, 0.1, 0.11, 0.5, 2.0, 3.5, 80.0])
    loss = jnp.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    metrics = model.loss_by_noise_level(loss, sigma)
    np.testing.assert_array_equal(metrics["level_loss"], [3, 4, 8, 16, 96])
    np.testing.assert_array_equal(metrics["level_count"], [2, 1, 1, 1, 2])


def test_a_loss_that_is_not_finite_affects_only_its_range_of_sigma():
    metrics = model.loss_by_noise_level(jnp.array([jnp.nan, 2.0]), jnp.array([0.2, 5.0]))
    np.testing.assert_array_equal(metrics["level_loss"], [0, np.nan, 0, 0, 2])


def a_scored_task(network, drop_prob=0.0, field_drop_prob=0.0, **values):
    """The model of 4x4 pixels with the fields "score", from 0 to 10, and "year"."""
    named = picture_fields.read(("score=0..10", "year=1900..2000"))
    fields = {"fields": named, "field_values": values, "field_drop_prob": field_drop_prob}
    return model.make_task(Texts(network, **fields), DIFFUSION, SAMPLER, drop_prob, {"text": ()})


def scored(size):
    batch = a_batch(size)
    batch.pop("score")
    year = jnp.full(size, 1950.0)
    return batch | {"field_score": jnp.linspace(0, 10, size), "field_year": year}


def test_each_field_is_dropped_by_itself_and_with_the_text():
    seen, size = [], 4000
    network = lambda params, x, time, text, **fields: seen.append((text, fields)) or x
    keys = training_noise.keys_of(size)
    a_scored_task(network, 0.2, 0.1).loss({}, {}, scored(size), keys)
    ((text, inputs),) = seen
    kept = {name: np.asarray(x[:, 1]) == 1 for name, x in inputs.items()}
    has_text = np.asarray(text).any((1, 2))
    within = lambda share, p: abs(share - p) < 4 * (p * (1 - p) / size) ** 0.5
    for name in ("field_score", "field_year"):
        assert not kept[name][~has_text].any()
        assert within(1 - kept[name].mean(), 1 - 0.8 * 0.9)
    both = kept["field_score"] & kept["field_year"]
    assert within(both.mean(), 0.8 * 0.9 * 0.9)  # Independent of each other.
    shares = np.linspace(0, 1, size)[kept["field_score"]]
    np.testing.assert_allclose(inputs["field_score"][kept["field_score"], 0], shares, atol=1e-6)
    assert not np.asarray(inputs["field_score"])[~kept["field_score"]].any()


def test_a_dropped_field_depends_on_the_key_of_its_own_image_alone():
    seen, keys = [], training_noise.keys_of(6)
    network = lambda params, x, time, text, **fields: seen.append(fields) or x
    task, batch = a_scored_task(network, 0.0, 0.5), scored(6)
    task.loss({}, {}, batch, keys)
    task.loss({}, {}, {name: x[1::2] for name, x in batch.items()}, keys[1::2])
    for name in seen[0]:
        np.testing.assert_array_equal(seen[0][name][1::2], seen[1][name])


def test_guidance_leads_away_from_unknown_fields():
    """The network shows 1 + the scaled score if it is known, and 0 if not."""
    show = lambda params, x, time, text, field_score, field_year: jnp.broadcast_to(
        field_score.sum(1)[:, None, None, None], x.shape
    )
    task, batch = a_scored_task(show), scored(4)
    keys = training_noise.keys_of(4)
    guided = task.sample({}, {}, batch, keys, jnp.full(4, 3.0))
    np.testing.assert_allclose(guided[:, 0, 0, 0], 3 * (1 + np.linspace(0, 1, 4)), rtol=1e-4)
    errors, _ = task.measure.errors({}, {}, batch, keys, jnp.full(4, 0.5))
    np.testing.assert_allclose(errors, (1 + np.linspace(0, 1, 4)) ** 2, rtol=1e-5)


def test_sampling_uses_the_given_numbers_of_fields_that_the_batch_lacks():
    show = lambda params, x, time, text, field_score, field_year: jnp.broadcast_to(
        (field_score[:, 0] + 10 * field_year[:, 1])[:, None, None, None], x.shape
    )
    texts = {"text": a_batch(3)["text"]}
    draw = lambda task, batch: task.sample({}, {}, batch, training_noise.keys_of(3), None)[0, 0, 0]
    task = a_scored_task(show, field_score=7.0)
    np.testing.assert_allclose(draw(task, texts), 0.7, rtol=1e-5)
    own = texts | {"field_score": jnp.full(3, 2.0), "field_year": jnp.full(3, 1990.0)}
    np.testing.assert_allclose(draw(task, own), 10.2, rtol=1e-5)
    unknown = texts | {"field_score": jnp.full(3, jnp.nan)}
    np.testing.assert_allclose(draw(task, unknown), 0, atol=1e-6)


def test_the_held_out_loss_of_mean_flow_leaves_out_the_guidance_that_it_has_learned():
    """The toy network solves equation 20 of the paper for its own velocities v."""
    omega, kappa, high = 1.75, 0.25, 0.6

    def network(params, x, time, text, score):
        del score
        true, empty = 0.3 * x + 0.1, -0.2 * x
        guided = (omega * true + (1 - omega - kappa) * empty) / (1 - kappa)
        guided = model.where(sigma / (1 + sigma) <= high, guided, true)
        return model.where(text[:, :-1].any((1, 2)), guided, empty)  # The last token is the span.

    changes = {"noise": "logit_normal", "predicts": "flow"}
    with_guidance = f"meanflow(omega={omega}, kappa={kappa}, high={high})"
    batch, sigma = a_batch(4), jnp.array([0.1, 1.0, 1.6, 9.0])

    def errors(network, method):
        diffusion = settings.read(Diffusion, {**changes, "method": method}, "diffusion")
        measure = a_task(network=network, diffusion=diffusion).measure
        return measure.errors({}, {}, batch, training_noise.keys_of(4), sigma)

    true = lambda params, x, time, text, score: 0.3 * x + 0.1
    # The tolerance covers the rounding of the two combinations.
    np.testing.assert_allclose(errors(network, with_guidance), errors(true, "denoise"), rtol=1e-5)
