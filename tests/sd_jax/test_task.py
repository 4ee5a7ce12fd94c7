"""The loss of a config against LDM's formulas, samples against closed forms, and errors."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.devices import sharding
from diffusion_jax.diffusion import samplers
from diffusion_jax.diffusion.samplers import SAMPLERS
from diffusion_jax.precache import lookup
from sd_jax import sampling, task
from sd_jax.vae import VAE
from tests import written_runs
from tests.diffusion_jax import training_noise
from tests.sd_jax import tiny
from tests.sd_jax.test_sampling import SWAYED

CAPTIONS = ["a red seven on gray paper", "a blue", "one", "a white four on black paper"]
# LDM's table: square roots of the betas are evenly spaced.
ABAR = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)


@functools.cache
def vae_params():
    return jax.tree.map(jnp.asarray, tiny.vae_params())


@functools.cache
def a_task(**changes):
    s = tiny.settings(**changes)
    return task.make_task(s, lookup.open_encoder(s.text), vae_params())


def plain_network(params, x, time, text):
    """Replaces the UNet: it depends on every input, and on the order of the text."""
    places = jnp.arange(1.0, 1 + text.shape[1])[:, None]
    seen = jnp.sin(time / 100) + (text * places).mean((1, 2))
    return jnp.tanh(x + seen[:, None, None, None])


def with_network(s, apply):
    """Return settings with the function `apply` instead of the UNet."""
    return s._replace(unet=types.SimpleNamespace(in_channels=4, channel_mult=(1,), apply=apply))


def moments():
    return jnp.asarray(np.random.default_rng(1).normal(size=(4, 4, 4, 8)), jnp.float32)


class PlainVAE(VAE):
    """A VAE whose images are three times its latents, and whose moments are means of pixels."""

    def setup(self):
        """The VAE has no layers."""

    def encode(self, images):
        means = images.reshape(-1, 4, 2, 4, 2, 3).mean((2, 4))
        return jnp.tile(means, 3)[..., :8]

    def decode(self, z):
        return 3 * z


def posterior_noise(keys):
    """Return the noise with which a training step samples latents, [B, 4, 4, 4]."""
    of_target = training_noise.draw(keys, training_noise.TARGET, lambda key: key)
    return training_noise.normal(of_target, 1, 64).reshape(4, 4, 4, 4)


def ldm_loss(s, batch, keys, f):
    """Compute each image's loss in float64 like LDM. f maps x_t, t and text to the prediction."""
    mean, log_variance = np.split(np.float64(batch["moments"]), 2, axis=-1)
    x0 = s.latents.scale * (mean + np.exp(log_variance / 2) * np.float64(posterior_noise(keys)))
    eps = np.float64(training_noise.normal(keys, 0, 64)).reshape(4, 4, 4, 4)
    if s.diffusion.offset_noise:
        shift = np.float64(training_noise.normal(keys, training_noise.OFFSET, 1, 1, 4))
        eps = eps + s.diffusion.offset_noise * shift
    step = lambda key: jax.random.randint(key, (1,), 0, 1000)[0]
    t = np.asarray(training_noise.draw(keys, training_noise.SIGMA, step))
    a = np.sqrt(ABAR[t])[:, None, None, None]
    b = np.sqrt(1 - a**2)
    keep = np.asarray(training_noise.has_text(keys, s.text.drop_prob))
    assert 0 < keep.sum() < 4
    target = eps if s.diffusion.predicts == "eps" else a * eps - b * x0
    snr = (a**2 / b**2)[:, 0, 0, 0]
    weight = np.ones(4)
    if s.diffusion.weight != "none":
        gamma = np.minimum(snr, 5)
        weight = gamma / snr if s.diffusion.predicts == "eps" else gamma / (snr + 1)
    loss = ((f(a * x0 + b * eps, t, keep) - target) ** 2).mean((1, 2, 3))
    return weight * loss, loss


@pytest.mark.parametrize(
    "changes",
    [
        {"predicts": "eps"},
        {"predicts": "v"},
        {"predicts": "eps", "offset_noise": 0.1, "weight": "min_snr(5)"},
        {"predicts": "v", "weight": "min_snr(5)"},
    ],
    ids=str,
)
@pytest.mark.parametrize("drop_to", ["empty", "zeros"])
def test_the_loss_matches_ldms_formulas(changes, drop_to):
    changes = {f"diffusion__{name}": value for name, value in changes.items()}
    s = tiny.settings(conditioning__drop_to=drop_to, conditioning__pad_to=8, **changes)
    hashed = lookup.open_encoder(s.text)
    encode = lambda frozen, batch: (
        # Hashed words map the empty prompt to zeros. Here it is a vector of ones.
        hashed.encode(frozen, batch)[0] + ~jnp.asarray(batch["text_mask"])[..., None],
        jnp.asarray(batch["text_mask"]),
    )
    encoder = hashed._replace(encode=encode)
    batch, keys = {"moments": moments(), **encoder.tokenize(CAPTIONS)}, training_noise.keys_of(4)
    sd_task = task.make_task(with_network(s, plain_network), encoder, vae_params())
    actual, metrics = jax.jit(sd_task.loss)((), {"text": (), "vae": None}, batch, keys)

    text = np.array(encode((), encoder.tokenize(CAPTIONS))[0])
    empty = np.array(encode((), encoder.tokenize([""]))[0]) if drop_to == "empty" else 0

    def f(x, t, keep):
        seen = np.where(keep[:, None, None], text, empty)
        seen = np.concatenate([seen, np.zeros((4, 2, 24))], axis=1)  # NeMo's padding.
        return np.float64(plain_network((), *(jnp.asarray(a, jnp.float32) for a in (x, t, seen))))

    weighted, plain = ldm_loss(s, batch, keys, f)
    # Float32 against float64. Computing time from sigma has errors of up to 1e-3 of a step.
    np.testing.assert_allclose(actual, weighted.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["level_loss"].sum(), plain.sum(), rtol=1e-4)


def test_images_are_encoded_in_the_training_step_with_new_noise_each_time():
    s = with_network(tiny.settings(), plain_network)._replace(vae=PlainVAE(**tiny.VAE_FIELDS))
    encoder, frozen = lookup.open_encoder(s.text), {"text": (), "vae": {}}
    sd_task = task.make_task(s, encoder, vae_params())
    images = np.random.default_rng(1).integers(0, 256, (4, 8, 8, 3), np.uint8)
    words = encoder.tokenize(CAPTIONS)
    loss = jax.jit(lambda batch, keys: sd_task.loss((), frozen, batch, keys)[0])
    keys = [training_noise.keys_of(4, seed) for seed in range(2)]
    stored = s.vae.encode(jnp.asarray(images, jnp.float32) / 127.5 - 1)
    online = [loss({"image": images, **words}, each) for each in keys]
    cached = [loss({"moments": stored, **words}, each) for each in keys]
    np.testing.assert_allclose(online, cached, rtol=1e-5)
    assert online[0] != online[1]

    many = training_noise.keys_of(4096)
    sample = sampling.posterior_sample(many, jnp.tile(stored[:1], (4096, 1, 1, 1)))
    mean, log_variance = np.split(np.asarray(stored[0]), 2, axis=-1)
    # The mean of 4096 samples has an error of std / 64. The bound for 64 numbers is five of these.
    np.testing.assert_allclose((sample.mean(0) - mean) / np.exp(log_variance / 2), 0, atol=5 / 64)
    np.testing.assert_allclose(sample.std(0), np.exp(log_variance / 2), rtol=0.08)


def test_an_inpainting_model_is_trained_with_masks_of_its_pictures():
    """The network sees the latents' means where its mask is 0, and gray elsewhere."""
    s = tiny.settings(unet__in_channels=9)._replace(vae=PlainVAE(**tiny.VAE_FIELDS))
    seen = []
    apply = lambda params, x, time, text, picture: seen.append(picture) or x
    s = s._replace(unet=types.SimpleNamespace(in_channels=9, channel_mult=(1,), apply=apply))
    encoder, frozen = lookup.open_encoder(s.text), {"text": (), "vae": {}}
    images = np.random.default_rng(1).integers(0, 256, (64, 8, 8, 3), np.uint8)
    batch = {"image": images, **encoder.tokenize(16 * CAPTIONS)}
    task.make_task(s, encoder, vae_params()).loss((), frozen, batch, training_noise.keys_of(64))
    (picture,) = map(np.asarray, seen)
    assert picture.shape == (64, 4, 4, 5)
    mask, latents = picture[..., 0], picture[..., 1:]
    assert set(np.unique(mask)) == {0, 1} and 8 <= mask.all((1, 2)).sum() <= 36
    assert len({each.tobytes() for each in mask}) > 20
    whole = s.latents.scale * np.asarray(s.vae.encode(jnp.asarray(images / 127.5 - 1)))[..., :4]
    kept = np.isclose(latents, whole, atol=1e-6).all(-1)
    assert kept[mask == 1].mean() < 0.02 and kept[mask == 0].mean() > 0.5
    assert not latents[mask.all((1, 2))].any()


def test_a_mask_of_pixels_is_averaged_over_the_area_of_each_latent():
    """As interpolate(mask, mode="area") in kohya's scripts. The network's output is `params`."""
    s = with_network(tiny.settings(), lambda params, x, time, text: params)
    encoder = lookup.open_encoder(s.text)
    sd_task = task.make_task(s, encoder, None)
    batch, keys = {"moments": moments(), **encoder.tokenize(CAPTIONS)}, training_noise.keys_of(4)
    mask = np.random.default_rng(2).choice([0, 255], (4, 8, 8), p=[0.7, 0.3]).astype(np.uint8)
    params = jnp.asarray(np.random.default_rng(3).normal(size=(4, 4, 4, 4)), jnp.float32)
    loss = lambda params: sd_task.loss(params, {"text": ()}, {**batch, "loss_mask": jnp.asarray(mask)}, keys)[0]
    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    share = mask.reshape(4, 4, 2, 4, 2).mean((2, 4))[..., None] / 255
    eps = np.float64(training_noise.normal(keys, 0, 64)).reshape(4, 4, 4, 4)
    np.testing.assert_allclose(value, (share * (params - eps) ** 2).mean(), rtol=1e-5)
    assert 0 < (share == 0).mean() < 1
    np.testing.assert_array_equal(np.asarray(gradient).any(-1, keepdims=True), share > 0)


def test_the_mean_loss_of_micro_batches_equals_the_loss_of_the_whole_batch():
    s = tiny.settings(diffusion__offset_noise=0.1)
    s = with_network(s, plain_network)
    encoder = lookup.open_encoder(s.text)
    loss = jax.jit(task.make_task(s, encoder, None).loss)
    batch = {"moments": moments(), **encoder.tokenize(CAPTIONS)}
    keys = training_noise.keys_of(4)
    micro = [loss((), {"text": ()}, {k: v[i::2] for k, v in batch.items()}, keys[i::2])[0] for i in range(2)]
    whole = loss((), {"text": ()}, batch, keys)[0]
    assert abs(micro[0] - micro[1]) > 1e-3  # Their latents and noise differ.
    np.testing.assert_allclose(np.mean(micro), whole, rtol=1e-5)


def knows_the_answer(s, answer):
    """Replaces the UNet: eps or v for a distribution with one point, the mean of the text."""

    def apply(params, x, time, text):
        x0 = answer * text.mean((1, 2))[:, None, None, None]
        a = jnp.sqrt(jnp.interp(time, jnp.arange(1000.0), jnp.asarray(ABAR, jnp.float32)))
        a = a[:, None, None, None]
        eps = (x - a * x0) / jnp.sqrt(1 - a**2)
        return eps if s.diffusion.predicts == "eps" else (eps - x * jnp.sqrt(1 - a**2)) / a

    return apply


@pytest.mark.parametrize(("steps", "predicts"), [(7, "v"), (1, "eps")])
@pytest.mark.parametrize("name", ["ddim", *sorted(SWAYED)])  # test_sampling.py tests the others.
def test_every_sampler_ends_at_the_point_of_a_one_point_distribution(name, steps, predicts):
    """With one data point, D is that point. Guidance moves it along the difference of texts."""
    s = tiny.settings(sampler__name=name, sampler__steps=steps, diffusion__predicts=predicts, sampler__height=16)
    encoder = lookup.open_encoder(s.text)
    s = with_network(s, knows_the_answer(s, 2.0))._replace(vae=PlainVAE(**tiny.VAE_FIELDS))
    sd_task = task.make_task(s, encoder, vae_params())
    frozen = {"text": (), "vae": {}}
    batch = sampling.prompts(encoder, ["a red seven", "a blue three"], "ugly")
    keys = jax.random.split(jax.random.key(0), 2)
    text = lambda words: np.asarray(encoder.encode((), encoder.tokenize(words))[0]).mean((1, 2))
    cond, negative = text(["a red seven", "a blue three"]), text(["ugly", "ugly"])
    scale = np.array([1.0, 3.0], np.float32)
    images = jax.jit(sd_task.sample)({}, frozen, batch, keys, scale)
    assert images.shape == (2, 8, 4, 4)
    x0 = 2 * (negative + scale * (cond - negative))
    # At the last time, abar is 0.99915, so LDM's samplers leave some noise.
    mean = np.asarray(images).mean((1, 2, 3)) * s.latents.scale / 3
    # With leading times, a single step starts at time 1, as in LDM, where noise is almost 0.
    tolerance = 3 if steps == 1 and SAMPLERS[name].grid == "ldm" else 0.02
    np.testing.assert_allclose(mean, ABAR[0] ** 0.5 * x0, atol=tolerance)


def test_guidance_1_of_a_real_network_matches_the_conditional_model():
    sd_task, s = a_task(), tiny.settings()
    params = written_runs.random_params(sd_task.init)
    encoder, frozen = lookup.open_encoder(s.text), {"text": (), "vae": vae_params()}
    batch = sampling.prompts(encoder, CAPTIONS, "ugly")
    keys = jax.random.split(jax.random.key(0), 4)
    sample = jax.jit(sd_task.sample)
    plain = sample(params, frozen, batch, keys, None)
    assert plain.shape == (4, 8, 8, 3)
    guided = [sample(params, frozen, batch, keys, np.full(4, n, np.float32)) for n in (1, 3)]
    # Guided batches have twice the rows, so sums may have another order.
    np.testing.assert_allclose(guided[0], plain, atol=1e-5)
    assert np.abs(guided[1] - plain).max() > 1e-3


def test_ddim_starts_with_standard_normal_noise_and_takes_ldms_steps():
    """Compares whole steps in LDM's coordinates, with a network that predicts 0."""
    s = with_network(tiny.settings(sampler__steps=2), lambda params, x, t, text: 0 * x)
    s = s._replace(vae=PlainVAE(**tiny.VAE_FIELDS))
    encoder = lookup.open_encoder(s.text)
    batch, keys = sampling.prompts(encoder, ["one"], ""), jax.random.split(jax.random.key(0), 1)
    sd_task = task.make_task(s, encoder, vae_params())
    images = jax.jit(sd_task.sample)({}, {"text": (), "vae": {}}, batch, keys, None)
    x = samplers.initial_noise(keys, (4, 4, 4), 1.0)
    # eps is 0, so x0 = x / sqrt(abar) at times 501 and 1, and at the first time of the table.
    z = x * np.sqrt(ABAR[0] / ABAR[501])
    np.testing.assert_allclose(images, 3 * z / s.latents.scale, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler__steps": 1001}, "sampler.steps is 1001: it must be from 1 to 1000"),
        ({"sampler__height": 9}, "sampler.height is 9: it must be a multiple of 2, because"),
        ({"latents__image_size": 13}, "latents.image_size is 13: it must be a multiple of"),
        ({"conditioning__pad_to": 5}, "conditioning.pad_to is 5: it must be 0, or at least"),
        ({"text__encoder": "precomputed"}, "text.encoder is 'precomputed': name the encoder"),
        ({"vae__weights": ""}, "vae.weights is empty: name a diffusers directory"),
        (
            {"data__source": "moments", "data__loss_mask": "alpha"},
            "'alpha', but stored moments have no masks: set it to",
        ),
        ({"data__source": "webdataset", "data__loss_mask": "file"}, "'webdataset': only a folder has files"),
        ({"unet__in_channels": 8}, "is 8, as in InstructPix2Pix, which cannot be trained: set it"),
        ({"unet__in_channels": 9, "data__source": "moments"}, "an inpainting model (unet.in_channels 9) also encodes"),
        ({"vae__latent_channels": 8}, "unet.out_channels are (8, 4, 4): set them to the same"),
        (
            {"data__source": "moments", "vae__weights": "", "sample_every": 5},
            "but drawing during training needs the VAE",
        ),
        ({"data__source": "webdataset", "data__text": "npy"}, "data.text is 'npy', but Stable Diff"),
        ({"sample_every": 1, "prompts": ()}, "prompts is empty: give texts to draw during training"),
        ({"unet__head_dim": 7}, "unet.head_dim 7 does not divide the width 32"),
        ({"optimizer__schedule": "linear"}, "optimizer.schedule is 'linear': choose from constant"),
    ],
    ids=str,
)
def test_inconsistent_settings_are_errors_that_name_the_fields(changes, message):
    with pytest.raises(ValueError) as error:
        tiny.settings(**changes)
    assert message in str(error.value)


def test_frozen_weights_are_sharded_and_separate_from_the_parameters():
    sd_task = a_task()
    assert sd_task.frozen.keys() == {"text", "vae"}
    mesh = sharding.make_mesh(2, 4, 1)
    shardings = sharding.shardings(sd_task.frozen, mesh, sd_task.rules, fsdp_min_size=1)
    split = [not p.is_fully_replicated for p in jax.tree.leaves(shardings)]
    assert 0 < sum(split) < len(split)
    names = jax.tree.leaves_with_path(jax.eval_shape(sd_task.init, jax.random.key(0)))
    assert not any("encoder" in jax.tree_util.keystr(path) for path, _ in names)
