"""A tiny but complete system, for fast tests of the loop, drawing and commands.

EDM with two dense layers on 8x8 pixels, shifted by the mean of the projected text.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp

from diffusion_jax.data import pipeline
from diffusion_jax.devices import sharding
from diffusion_jax.diffusion import grids, guidance, noise, onestep, precond, samplers
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.model import loss_by_noise_level
from diffusion_jax.task import Measure, Task, to_range
from diffusion_jax.text import hashed
from tests.diffusion_jax import training_noise

SIZE, WIDTH, TOKENS, HIDDEN = 8, 32, 6, 384
RULES = [(r"kernel$", sharding.FSDP), (r"bias$", sharding.P())]
EDM = precond.edm()


def encode(frozen, batch):
    """Encode hashed words as sinusoids, which compile faster than random signs."""
    waves = batch["text_ids"][..., None] * jnp.arange(1, WIDTH + 1, dtype=jnp.uint32)
    return jnp.sin(waves / 2.0**31 * jnp.pi) * 2**0.5, jnp.asarray(batch["text_mask"])


ENCODER = hashed.encoder(WIDTH, TOKENS)._replace(encode=encode)


def classifier_free(denoise_both, scale):
    """Guide a denoiser whose even rows see the text and whose odd rows do not."""
    conditions = {guidance.COND: (), guidance.NEGATIVE: ()}
    branches = guidance.conditional(lambda condition: denoise_both, conditions)
    return guidance.guided(branches, scale, guidance.outward())


def task(encoder=ENCODER):
    """Return the Task, whose sampler adds new noise in each of four steps."""
    shape = (SIZE, SIZE, 3)
    projection = jax.random.normal(jax.random.key(7), (encoder.width, encoder.width))
    frozen = {"text": encoder.frozen, "projection": {"kernel": projection / encoder.width**0.5}}

    def pooled(frozen, batch):
        text, mask = encoder.encode(frozen["text"], batch)
        return (text * mask[..., None]).mean(1) @ frozen["projection"]["kernel"]

    def loss(params, frozen, batch, keys):
        x0 = batch["image"].astype(jnp.float32) / 127.5 - 1
        draw = lambda key: noise.draw_lognormal(-1.2, 1.2)(key, 1)[0]
        sigma = training_noise.draw(keys, training_noise.SIGMA, draw)
        eps = samplers.initial_noise(keys, shape, 1)
        each = precond.loss(network(params, pooled(frozen, batch)), EDM, x0, eps, sigma)
        return each.mean(), loss_by_noise_level(each, sigma)

    def sample(params, frozen, batch, keys, scale):
        text = pooled(frozen, batch)
        if scale is not None:
            text = text.repeat(2, axis=0).at[1::2].set(0)
        denoise = precond.denoiser(network(params, text), EDM)
        if scale is not None:
            denoise = classifier_free(denoise, scale)
        sigmas = grids.karras_sigmas(4, 0.1, 3.0)
        x = samplers.initial_noise(keys, shape, sigmas[0])
        return onestep.ddim(denoise, x, sigmas, samplers.gaussian_noise(keys, shape), eta=1.0)

    def errors(params, frozen, batch, keys, sigma):
        x0 = to_range(batch["image"])
        net, eps = network(params, pooled(frozen, batch)), samplers.initial_noise(keys, shape, 1)
        each = precond.loss(net, EDM, x0, eps, sigma)
        return each, each / 2

    measure = Measure(functools.partial(noise.quantiles, noise.lognormal()), errors)
    return Task(lambda key: init(key, encoder.width), loss, sample, frozen, RULES, measure)


def batches(run, pictures=None, **options):
    """Open the batches of a run on these pictures, or on digits."""
    options = {"batch_size": run.batch_size, "seed": run.seed, **options}
    return pipeline.make_batches(pictures or digits.Digits(SIZE), ENCODER.tokenize, **options)


def init(key, width=WIDTH):
    """Return random parameters, including biases."""
    pixels = SIZE * SIZE * 3
    shapes = {
        "pixels": {"kernel": (pixels, HIDDEN), "bias": (HIDDEN,)},
        "text": {"kernel": (width, HIDDEN)},
        "time": {"bias": (HIDDEN,)},
        "out": {"kernel": (HIDDEN, pixels), "bias": (pixels,)},
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    ends = list(itertools.accumulate(map(math.prod, leaves)))
    parts = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])
    values = [part.reshape(shape) / shape[0] ** 0.5 for part, shape in zip(parts, leaves, strict=True)]
    return tree.unflatten(values)


def network(params, text):
    """Return the function F(x, time) for a given text."""

    def apply(x, time):
        h = x.reshape(len(x), -1) @ params["pixels"]["kernel"] + params["pixels"]["bias"]
        h = h + text @ params["text"]["kernel"] + time[:, None] * params["time"]["bias"]
        y = jax.nn.silu(h) @ params["out"]["kernel"] + params["out"]["bias"]
        return y.reshape(x.shape)

    return apply
