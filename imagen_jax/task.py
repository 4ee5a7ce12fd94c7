"""Build the Task of an Imagen model: the functions that training and sampling call."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from diffusion_jax.diffusion import editing, guides, noise, precond, samplers
from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.diffusion.noise import Sigmas
from diffusion_jax.diffusion.objective import Objective
from diffusion_jax.diffusion.precond import Denoiser, Images, Precond
from diffusion_jax.machine.sharding import RULES
from diffusion_jax.task import (
    Measure,
    Task,
    kept_texts,
    loss_by_noise_level,
    normal_like,
    to_range,
    with_span,
)
from diffusion_jax.text import TextEncoder
from imagen_jax import super_resolution
from imagen_jax.conditioning import example_inputs
from imagen_jax.settings import Settings
from imagen_jax.super_resolution import LowRes


def make_task(
    s: Settings, encoder: TextEncoder, guide: Settings | None = None, strength: float = 1.0
) -> Task:
    """Return the Task of an Imagen model: the functions that initialise, train and sample it.

    In training, a super-resolution model shrinks the images of the batch to get its small images.
    In sampling, it reads small images of any size from batch["low_res"], float [B, h, w, 3] in
    about [-1, 1].

    If a batch for sampling has "image", uint8 [B, H, W, 3], the sampler draws over these pictures.
    If it also has "mask", bool [B, H, W], the sampler changes only the pixels where the mask is
    True (see diffusion_jax/diffusion/editing.py).

    Args:
        s: The model's settings.
        encoder: The text encoder. Its weights are the frozen weights of the Task.
        guide: The settings of a second model that guides this one, for autoguidance. If there is
            one, the Task's `sample` expects frozen weights of another form: a dict with the keys
            "text" (the weights of the text encoder) and "guide" (the weights of the second model).
        strength: When the model draws over a picture, the share of the sampling steps that it runs.

    Raises:
        ValueError: The sampling grid is spaced in time, but the noise defines no times.
    """
    unet, objective = s.unet, s.diffusion.objective
    samplers.check_grid(objective.noise, s.sampler)
    factor = s.super_resolution.factor

    # `params` holds the network's weights and, for learned loss weights, a collection of their
    # parameters. unet.apply accepts this additional Flax collection and ignores it.
    def init(key):
        return objective.with_learned(unet.init(key, **example_inputs(unet, s.text.width)))

    def loss(params, frozen, batch, key):
        key_sigma, key_eps, key_drop, key_dropout, key_low = jax.random.split(key, 5)
        x0 = to_range(batch["image"])  # [B, H, W, 3]
        text, mask = encoder.encode(frozen, batch)  # [B, L, D], [B, L]
        kept = kept_texts(key_drop, len(x0), s.text.drop_prob)
        sigma, eps = objective.noise.draw(key_sigma, len(x0)), normal_like(key_eps, x0)
        eps = objective.shifted(jax.random.fold_in(key_eps, 1), eps)
        low_res = training_low_res(key_low, x0) if factor > 1 else LowRes()

        # A denoiser's loss calls network(x, time). MeanFlow's loss also passes the span h, which
        # images keep their text, and `rows`, the part of the batch that x holds. With other
        # `params`, the same function is the network whose weights get no gradient.
        def network(x, time, h=None, kept=kept, rows=slice(None), params=params) -> Any:
            # A dropped text becomes zeros and keeps its mask, as in NeMo.
            kept_text = text[rows] * kept[:, None, None]
            inputs = (*with_span(kept_text, mask[rows], h), *low_res.rows(rows))
            rngs = {"dropout": key_dropout}
            return unet.apply(params, x, time, *inputs, train=True, rngs=rngs)

        counts = batch.get("counts")
        if objective.mean_flow:
            frozen_network = functools.partial(network, params=jax.lax.stop_gradient(params))
            sigmas = sigma, objective.noise.draw(jax.random.fold_in(key_sigma, 1), len(x0))
            minimised, losses = objective.mean_flow_loss(
                network, frozen_network, x0, eps, sigmas, kept, counts
            )
            sigma = jnp.maximum(*sigmas)
        else:
            minimised, losses = objective.loss(params, network, x0, eps, sigma, counts)
        return minimised, loss_by_noise_level(losses, sigma)

    def training_low_res(key, x0):
        small = super_resolution.shrink(x0, factor)
        if not unet.noise_aug:
            return LowRes(small)
        key_sigma, key_eps = jax.random.split(key)
        sigma, eps = objective.noise.draw(key_sigma, len(x0)), normal_like(key_eps, small)
        return super_resolution.with_noise(small, sigma, eps, objective.scalings)

    def errors(params, frozen, batch, keys, sigma):
        x0, low_res = to_range(batch["image"]), LowRes()
        text, mask = encoder.encode(frozen, batch)
        if factor > 1:  # Use the same small images as in sampling.
            keys, low_keys = super_resolution.own_keys(keys, len(x0[0]))
            low_res = sampling_low_res(super_resolution.shrink(x0, factor), low_keys)

        def network(x, time) -> Any:
            h = jnp.zeros_like(time) if objective.mean_flow else None
            return unet.apply(params, x, time, *with_span(text, mask, h), *low_res)

        eps = samplers.initial_noise(keys, x0[0].shape, 1)
        return objective.errors(network, x0, eps, sigma)

    def sampling_low_res(small, keys):
        aug_sigma = s.super_resolution.aug_sigma if unet.noise_aug else None
        return super_resolution.sampling_inputs(small, aug_sigma, keys, objective.scalings)

    measure = Measure(functools.partial(noise.quantiles, objective.noise), errors)
    begin = _make_begin(s, encoder, objective, sampling_low_res, guide, strength)
    sample = samplers.make_sample(begin, s.sampler)
    return Task(init, loss, sample, encoder.frozen, RULES, measure, begin)


def example(s: Settings, encoder: TextEncoder) -> tuple[Task, dict[str, np.ndarray]]:
    """Return a Task and a batch of one black image, to trace a training step without any data.

    The batch holds no text. The caller must add the arrays that `encoder.tokenize` returns.
    """
    side = s.unet.image_size
    return make_task(s, encoder), {"image": np.zeros((1, side, side, 3), np.uint8)}


def _make_begin(
    s: Settings,
    encoder: TextEncoder,
    objective: Objective,
    make_low_res: Callable[[Images, Key[Array, "B"]], LowRes],
    guide: Settings | None,
    strength: float,
) -> samplers.Begin:
    unet, factor = s.unet, s.super_resolution.factor
    threshold = s.sampler.limit
    prompt = s.sampler.negative_prompt
    negative_tokens = encoder.tokenize([prompt]) if prompt else {}

    def negative(frozen, text, mask):
        """Encode the negative prompt for each image. If it is "", return zeros and `mask`."""
        if not prompt:
            return jnp.zeros_like(text), mask
        rows = {k: jnp.asarray(v).repeat(len(text), 0) for k, v in negative_tokens.items()}
        return encoder.encode(frozen, rows)

    def begin(params, frozen, batch, keys, guidance):
        text_weights = frozen["text"] if guide else frozen
        text, mask = encoder.encode(text_weights, batch)
        sides = s.sampler.height or unet.image_size, s.sampler.width or unet.image_size
        shape, low_res = (*sides, 3), LowRes()
        if factor > 1:
            small = batch["low_res"]  # [B, h, w, 3]
            shape = (factor * small.shape[1], factor * small.shape[2], 3)
            keys, low_keys = super_resolution.own_keys(keys, shape[0])
            low_res = make_low_res(small, low_keys)
        conditions = {
            guides.COND: lambda: (text, mask, *low_res),
            guides.NEGATIVE: lambda: (*negative(text_weights, text, mask), *low_res),
            guides.EMPTY: lambda: (jnp.zeros_like(text), mask, *low_res),
        }
        sigmas, time = samplers.sampling_grid(objective.noise, s.sampler)  # [steps + 1]
        on_grid = objective.precond(time)
        guide_of = guide and _denoiser_of(guide, frozen["guide"], sigmas)
        denoise = guidance_module.make_denoiser(
            s.sampler, guides.Model(on_grid, sigmas), guidance,
            _denoiser_of(s, params, sigmas, on_grid), conditions, guide_of,
        )  # fmt: skip
        denoise = threshold(denoise)
        x = samplers.initial_noise(keys, shape, sigmas[0])
        step_noise = samplers.gaussian_noise(keys, shape)
        finish = lambda x: samplers.in_own_coordinates(x, sigmas[-1])
        start = samplers.Start(denoise, x, sigmas, step_noise, finish)
        if "image" not in batch:
            return start
        eps, pixel_mask = samplers.initial_noise(keys, shape, 1), batch.get("mask")
        redrawn = None if pixel_mask is None else pixel_mask[..., None]  # [B, H, W, 1]
        image = to_range(batch["image"])
        return start._replace(wrap=lambda f: editing.wrap(f, image, eps, strength, redrawn))

    return begin


def _denoiser_of(
    s: Settings, params: Any, sigmas: Sigmas, scalings: Precond | None = None
) -> Callable[[Any], Denoiser]:
    """Return a function that maps a condition to the model's denoiser D(x, sigma).

    A condition is a tuple: the text embeddings, their mask, and the two fields of a LowRes.
    `sigmas` is the sampling grid. `scalings` is the preconditioner; by default, the one used in
    training.
    """
    objective = s.diffusion.objective
    scalings, span = scalings or objective.scalings, objective.span(sigmas)

    def denoiser_of(inputs):
        text, mask, *low_res = inputs

        def denoise(x, sigma):
            context = with_span(text, mask, span and span(sigma))
            network: Any = lambda x, time: s.unet.apply(params, x, time, *context, *low_res)
            return precond.denoiser(network, scalings)(x, sigma)

        return denoise

    return denoiser_of
