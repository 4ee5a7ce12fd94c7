"""Imagen's task: loss and samples against the papers' formulas, and invalid configs."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base64_500m
from diffusion_jax.diffusion import grids, noise, samplers
from diffusion_jax.precache import lookup
from imagen_jax import task
from imagen_jax.conditioning import example_inputs
from imagen_jax.settings import read_settings
from tests import written_runs
from tests.changes import change
from tests.diffusion_jax import training_noise
from tests.imagen_jax.cases import ONE_LEVEL

CAPTIONS = ["a red seven on gray paper", "a blue", "one", "a white four on black paper"]


def settings(**changes):
    """Return settings of a tiny model. diffusion__noise="cosine" sets config.diffusion.noise."""
    c = base64_500m.get_config()
    c.unet.update(ONE_LEVEL, patch=2, attention_resolutions=(4,), dtype="float32")
    c.text.update(encoder="hashed", width=32, max_tokens=6, drop_prob=0.5)
    c.sampler.update(name="dpmpp_2m", steps=16, sigma_min=0.02, sigma_max=40.0, threshold="none")
    c.data.update(source="diffusion_jax.examples.digits", text="txt")
    c.prompts = ("a red seven on gray paper",)
    return read_settings(change(c, changes).to_dict())


@pytest.fixture(scope="module")
def network():
    """Return (apply, params) of the tiny UNet, compiled once, with random parameters."""
    s = settings()
    init = lambda key: s.unet.init(key, **example_inputs(s.unet, s.text.width))
    return jax.jit(s.unet.apply), written_runs.random_params(init)


def with_network(s, apply):
    """Return the settings with another function in place of the UNet."""
    return s._replace(unet=types.SimpleNamespace(image_size=s.unet.image_size, noise_aug=False, apply=apply))


def a_batch(encoder, size=8):
    images = np.random.default_rng(1).integers(0, 256, (len(CAPTIONS), size, size, 3), np.uint8)
    return {"image": jnp.asarray(images), **encoder.tokenize(CAPTIONS)}


def log_snr(schedule, t):
    """Return log-SNR in float64: Nichol & Dhariwal's cosine, or the limit of linear betas."""
    if schedule == "linear":
        return -np.log(np.expm1(1e-4 + 10 * t**2))
    return -np.log(np.maximum(np.cos((t + 0.008) / 1.008 * np.pi / 2) ** -2 - 1, 1e-5))


def papers_loss(s, f, x0, eps, sigma):
    """Return the loss per pixel in the paper's form. f maps the network's input and time to F."""
    s_data, column = s.diffusion.sigma_data, sigma[:, None, None, None]
    if s.diffusion.predicts == "edm":
        x, total = x0 + column * eps, column**2 + s_data**2
        out = f(x / np.sqrt(total), np.log(sigma) / 4)
        denoised = s_data**2 / total * x + column * s_data / np.sqrt(total) * out
        return total / (column * s_data) ** 2 * (denoised - x0) ** 2
    alpha = 1 / np.sqrt(1 + column**2)  # Variance preserving: z = alpha x0 + (1 - alpha^2)^.5 eps
    noise = np.sqrt(1 - alpha**2)
    out = f(alpha * x0 + noise * eps, -2 * np.log(sigma))
    target = {"eps": eps, "x0": x0, "v": alpha * eps - noise * x0}[s.diffusion.predicts]
    error = np.abs(out - target)
    huber = np.where(error < 1, error**2 / 2, error - 1 / 2)
    return {"l2": error**2, "l1": error, "huber": huber}[s.diffusion.distance]


@pytest.mark.parametrize(
    ("precond", "noise", "distance"),
    [
        ("edm", "lognormal", "l2"),
        ("eps", "cosine", "l1"),
        ("eps", "cosine", "l2"),
        ("x0", "linear", "l2"),
        ("v", "cosine", "huber"),
    ],
)
def test_the_loss_matches_the_papers_formulas(network, precond, noise, distance):
    apply, params = network
    s = settings(diffusion__predicts=precond, diffusion__noise=noise, diffusion__distance=distance)
    encoder = lookup.open_encoder(s.text)
    batch, keys = a_batch(encoder), training_noise.keys_of(4)
    tiny = task.make_task(with_network(s, apply), encoder)
    actual, metrics = tiny.loss(params, {"text": ()}, batch, keys)

    if noise == "lognormal":
        normal = np.float64(training_noise.normal(keys, training_noise.SIGMA, 1)[:, 0])
        sigma = np.exp(s.diffusion.p_mean + s.diffusion.p_std * normal)
    else:
        uniform = lambda key: jax.random.uniform(key, (1,))[0]
        time = training_noise.draw(keys, training_noise.SIGMA, uniform)
        sigma = np.exp(-log_snr(noise, np.float64(time)) / 2)
    eps = np.float64(training_noise.normal(keys, 0, 8 * 8 * 3)).reshape(4, 8, 8, 3)
    x0 = np.float64(batch["image"]) * 2 / 255 - 1
    keep = np.asarray(training_noise.has_text(keys, 0.5))[:, None, None]
    assert 0 < keep.sum() < 4
    text, mask = encoder.encode((), batch)

    def f(x, time):
        inputs = jnp.asarray(x, jnp.float32), jnp.asarray(time, jnp.float32)
        return np.float64(apply(params, *inputs, text * keep, mask))

    expected = papers_loss(s, f, x0, eps, sigma)
    # Float32 against float64. EDM's form subtracts D from x0, which loses a digit or two.
    np.testing.assert_allclose(actual, expected.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["level_loss"].sum(), 4 * expected.mean(), rtol=1e-4)
    assert metrics["level_count"].sum() == 4


def test_a_dropped_text_keeps_its_mask():
    s = settings(text__drop_prob=0.999999)
    encoder = lookup.open_encoder(s.text)
    batch, seen = a_batch(encoder), []

    def record(params, x, time, text, text_mask):
        seen.append((text, text_mask))
        return x

    imagen_task = task.make_task(with_network(s, record), encoder)
    imagen_task.loss(None, {"text": ()}, batch, training_noise.keys_of(4))
    ((text, mask),) = seen
    assert not text.any()
    np.testing.assert_array_equal(mask, batch["text_mask"])


SIGMA_OF_TIME = {
    "edm": lambda t: jnp.exp(4 * t),
    "scaled_linear": lambda t: noise.sigma_at(noise.ldm_log_alphas(), t),
}  # The others: log-SNR.


def knows_the_answer(s):
    """Return a network whose denoiser always returns the grey level `grey` of the text."""
    kind = s.diffusion.predicts if s.diffusion.predicts == "edm" else s.diffusion.noise
    scalings = s.diffusion.objective.scalings
    sigma_of = SIGMA_OF_TIME.get(kind, lambda t: jnp.exp(-t / 2))

    def apply(params, x, time, text, text_mask):
        c_skip, c_out, c_in, _ = (c[:, None, None, None] for c in scalings(sigma_of(time)))
        level = grey(text, text_mask)[:, None, None, None]
        return (level - c_skip * (x / c_in)) / c_out

    return apply


def grey(text, mask):
    """Return 0.02 per word, plus 0.3 if the text is not dropped (zeroed)."""
    return 0.02 * mask.sum(1) + 0.3 * jnp.square(text).max((1, 2))


def draw(s, scale):
    encoder = lookup.open_encoder(s.text)
    tiny = task.make_task(with_network(s, knows_the_answer(s)), encoder)
    keys = jax.vmap(jax.random.key)(jnp.arange(4))
    return tiny.sample(None, {"text": ()}, encoder.tokenize(CAPTIONS), keys, scale)


WORDS = np.array([6, 2, 1, 6])
SCALES = np.array([1.0, 2.0, 0.0, 1.5])


@pytest.mark.parametrize(
    ("sampler", "precond", "noise"),
    [
        ("heun", "edm", "lognormal"),
        ("ddpm", "eps", "cosine"),
        ("ddim", "v", "linear"),
        ("dpmpp_2m", "x0", "cosine"),
        ("plms", "v", "linear"),
        ("euler", "edm", "lognormal"),
    ],
)
def test_every_sampler_reaches_the_prediction_extrapolated_by_guidance(sampler, precond, noise):
    s = settings(
        sampler__name=sampler, diffusion__predicts=precond, diffusion__noise=noise, sampler__threshold="static"
    )
    images = np.asarray(draw(s, jnp.asarray(SCALES, jnp.float32)))
    assert images.shape == (4, 8, 8, 3)
    expected = 0.02 * WORDS + SCALES * 0.3  # Unconditional + scale * (conditional - unconditional).
    # DDPM returns alpha(0) x0 with alpha(0) = 0.99992, and the last posterior keeps noise of
    # sigma(0)^2 / sigma(1 / 16) = 1.4e-3: five standard deviations.
    atol = 7e-3 if sampler == "ddpm" else 1e-5
    np.testing.assert_allclose(images, np.broadcast_to(expected[:, None, None, None], images.shape), atol=atol)


def test_drawing_over_a_picture_applies_strength_and_mask():
    """The network always predicts a grey level, so new pixels are grey."""
    s = settings(sampler__name="ddim", sampler__steps=4)
    encoder = lookup.open_encoder(s.text)
    keys = jax.vmap(jax.random.key)(jnp.arange(4))
    batch = a_batch(encoder) | {"mask": jnp.zeros((4, 8, 8), bool).at[:, :3].set(True)}
    images = np.asarray(batch["image"]) / 127.5 - 1

    def drawn(strength, *names):
        s_tiny = with_network(s, knows_the_answer(s))
        sampler_inputs = task.make_sampler_inputs(s_tiny, encoder, strength=strength)
        used = {k: v for k, v in batch.items() if k not in ("image", "mask") or k in names}
        sample = samplers.make_sample(sampler_inputs, s.sampler)
        return np.asarray(sample(None, {"text": ()}, used, keys, None))

    plain = drawn(1.0)
    np.testing.assert_array_equal(drawn(1.0, "image"), plain)
    np.testing.assert_allclose(drawn(0.0, "image"), images, atol=1e-6)
    np.testing.assert_allclose(drawn(0.5, "image"), plain, atol=1e-5)
    over = drawn(0.5, "image", "mask")
    np.testing.assert_allclose(over[:, 3:], images[:, 3:], atol=1e-6)
    np.testing.assert_allclose(over[:, :3], plain[:, :3], atol=1e-5)


def test_sampling_on_a_noise_table_ends_at_the_noise_of_time_0():
    """With a constant D, every step moves towards it, and the last step ends at sigma(0)."""
    s = settings(sampler__name="euler", diffusion__predicts="v", diffusion__noise="scaled_linear")
    first, last = noise.sigma_at(noise.ldm_log_alphas(), jnp.array([999.0, 0.0]))
    keys = jax.vmap(jax.random.key)(jnp.arange(4))
    x = samplers.initial_noise(keys, (8, 8, 3), first)
    answer = 0.02 * WORDS[:, None, None, None] + 0.3
    expected = (answer + last / first * (x - answer)) / np.sqrt(1 + last**2)
    np.testing.assert_allclose(draw(s, None), expected, atol=1e-4)


def test_samples_without_guidance_or_outside_its_interval_are_conditional():
    conditional = 0.02 * WORDS + 0.3
    images = draw(settings(), None)
    np.testing.assert_allclose(images[:, 0, 0, 0], conditional, atol=1e-5)
    # The interval is below sigma_min.
    images = draw(settings(sampler__guidance_high=0.01), jnp.full(4, 3.0))
    np.testing.assert_allclose(images[:, 0, 0, 0], conditional, atol=1e-5)


@pytest.mark.parametrize(("threshold", "factor"), [("none", 1), ("static", 0), ("dynamic", 0)])
def test_thresholds_keep_guided_samples_within_the_range(threshold, factor):
    guided = 0.02 * WORDS + 10 * 0.3  # From 3 to 3.1, outside [-1, 1].
    images = draw(settings(sampler__threshold=threshold), jnp.full(4, 10.0))
    expected = guided if factor else np.ones(4)
    np.testing.assert_allclose(images[:, 0, 0, 0], expected, rtol=1e-5)


def test_sampling_levels_are_karras_or_follow_the_noise_schedule():
    def levels(s):
        return np.asarray(samplers.sampling_grid(s.diffusion.objective.noise, s.sampler).sigmas)

    karras = levels(settings(sampler__steps=5, sampler__rho=3.0))
    np.testing.assert_array_equal(karras, grids.karras_sigmas(5, 0.02, 40.0, 3.0))
    ancestral = levels(settings(diffusion__noise="linear", sampler__name="ddpm", sampler__steps=4))
    np.testing.assert_allclose(ancestral, np.exp(-log_snr("linear", np.linspace(1, 0, 5)) / 2), rtol=1e-5)
    others = levels(settings(diffusion__noise="linear", sampler__name="ddim", sampler__steps=4))
    np.testing.assert_array_equal(others, [*ancestral[:-1], 0])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("unet__embed_dim", 48, "unet.embed_dim * 1 is 48: it must be a multiple of 32"),
        ("unet__attention_resolutions", (3,), "unet.attention_resolutions holds 3, but no level"),
        ("unet__low_res", True, "factor is 1, but unet.low_res is True: a model with a factor above 1"),
        ("data__resize", 7, "data.resize is 7: set it to 0, or to a multiple of 1 that is at"),
        ("data__resize", 17, "data.resize is 17: for this model it must be a multiple of"),
        ("sampler__height", 7, "sampler.height is 7: for this model it must be a multiple of"),
        ("sampler__name", "huen", "sampler.name is 'huen': did you mean 'heun'?"),
        ("sampler__sigma_min", 40.0, "sampler.sigma_max is 40.0: it must be above sampler.sigma_m"),
        ("text__encoder", "hash", "text.encoder is 'hash': did you mean 'hashed'?"),
        ("text__drop_prob", 10.0, "text.drop_prob is 10.0: it must be from 0 to 1"),
        ("optimizer__schedule", "cos", "optimizer.schedule is 'cos': did you mean 'cosine'?"),
        ("batch_size", -8, "batch_size is -8: it must be above 0"),
        ("text__encoder", "precomputed", "'precomputed': name the encoder that computed"),
        ("unet__dtype", "int8", "unet.dtype is 'int8': choose from float32"),
        ("prompts", (), 'prompts is empty: give texts to draw during training, such as --config.prompts="('),
    ],
)
def test_invalid_config_values_are_errors(field, value, message):
    with pytest.raises(ValueError) as error:
        settings(**{field: value})
    assert message in str(error.value)


def test_a_text_encoder_that_cannot_use_stored_embeddings_is_an_error():
    with pytest.raises(
        ValueError, match=r"data.text is 'npy', but text.encoder is 'hashed', .*: set data.text to txt,"
    ):
        settings(data__source="folder", data__text="npy")


@pytest.mark.parametrize("text", ["json:caption", "jsonl:text", "parquet:caption", "raw.txt"])
def test_a_text_encoder_accepts_captions_in_every_format(text):
    assert not settings(data__source="folder", data__text=text).data.embedded


@pytest.mark.parametrize(
    ("data", "embedded"),
    [
        ({"source": "folder", "text": "t5.npz"}, True),
        ({"source": "arrayrecord", "text": "safetensors"}, True),
        ({"source": "synthetic", "text": "npy"}, True),
        ({"source": "my_package.my_source", "text": "npy"}, True),
        ({"source": "arrow", "text": "npy"}, False),
        ({"source": "tfds", "text": "npy"}, False),
        ({"source": "mixture", "mixture": ((1, "folder", "a", "npy"),)}, True),
        ({"source": "mixture", "mixture": ((1, "folder", "a", "txt"),), "text": "npy"}, False),
    ],
)
def test_data_text_determines_whether_embeddings_are_stored_with_images(data, embedded):
    changes = {f"data__{name}": value for name, value in data.items()}
    assert settings(text__encoder="t5", **changes).data.embedded == embedded


def test_a_store_together_with_embeddings_in_the_data_is_an_error():
    with pytest.raises(ValueError, match=r"text\.store is 'a', but data.text is 'npy', which"):
        settings(text__encoder="t5", text__store="a", data__source="folder", data__text="npy")
