"""The loss, the held-out errors and the sampler of a model, written once for all systems.

A system supplies a System: its network, what the network denoises, and the network's inputs.
`make_task` turns it into a Task. A Condition holds the network's inputs besides x and time as named
arrays, such as the text, its mask and a low-resolution image. A further input of the network is one
more name in it.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key, PRNGKeyArray

from diffusion_jax.config.picture_fields import Field
from diffusion_jax.devices.sharding import RULES
from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.diffusion import guidance_kinds, noise, samplers
from diffusion_jax.diffusion.groups import Diffusion, Sampler
from diffusion_jax.diffusion.objective import Conditions, Net, Noised
from diffusion_jax.diffusion.onestep import SamplerFunction
from diffusion_jax.diffusion.precond import Denoiser, Images, Sigma
from diffusion_jax.nn import ops, picture_fields
from diffusion_jax.task import LABELS, LEVELS, Batch, Frozen, Measure, Metrics, Params, Task

Keys = Key[Array, "B"]
Condition = Mapping[str, Array]
"""Inputs of the network: its arguments by name, with one row per image."""
# What training draws from an image's key, each from a key of its own. The noise itself is draw 0,
# and training never asks samplers.gaussian_noise for the noise of later steps.
_SIGMA, _KEPT, _OFFSET, _SECOND_SIGMA, _TARGET, _INPUTS, _FIELDS = range(1, 8)


class System(abc.ABC):
    """What a system supplies. Batches are those of Task."""

    unet: Any
    """The network, a Flax module. It is called as unet.apply(params, x, time, **condition)."""
    fields: Sequence[Field] = ()
    """Named numbers of each image, such as an aesthetic score, which are also inputs of the network
    (nn/picture_fields.py)."""
    field_values: Mapping[str, float] = {}
    """Numbers that sampling uses for fields that its batch does not hold, keyed by Field.key."""
    field_drop_prob: float = 0.0
    """The probability with which training drops each field."""
    unit_start: bool = False
    """Whether sampling starts from noise of level sqrt(1 + sigma^2) instead of sigma."""

    @abc.abstractmethod
    def example(self) -> Mapping[str, Any]:
        """Return the arguments of unet.init: x, time and a condition, for one image."""

    @abc.abstractmethod
    def target(self, frozen: Frozen, batch: Batch, keys: Keys) -> Images:
        """Return x0: what the network denoises, pixels or latents."""

    @abc.abstractmethod
    def text(self, frozen: Frozen, batch: Batch) -> Condition:
        """Return the condition that the texts of the batch give."""

    @abc.abstractmethod
    def dropped(self, frozen: Frozen, condition: Condition) -> Condition:
        """Return the condition that training uses in place of dropped texts."""

    @abc.abstractmethod
    def conditions(self, frozen: Frozen, batch: Batch) -> Mapping[str, Callable[[], Condition]]:
        """Return, for sampling, functions that compute the conditions under each name.

        The names are those of guidance_kinds.py: COND, NEGATIVE and EMPTY. The last two hold only
        what differs from COND.
        """

    @abc.abstractmethod
    def sample_shape(self, batch: Batch) -> tuple[int, int, int]:
        """Return the shape [H, W, C] in which the sampler draws an image."""

    @abc.abstractmethod
    def editor(self, frozen: Frozen, batch: Batch, keys: Keys) -> Callable[[SamplerFunction], SamplerFunction]:
        """Return a function that adapts the sampler to the batch's "image"."""

    def decode(self, frozen: Frozen, batch: Mapping[str, Any], x0: Images) -> Images:
        """Return images in about [-1, 1]."""
        return x0

    def training_inputs(self, frozen: Frozen, batch: Batch, x0: Images, keys: Keys) -> Condition:
        """Return the inputs that training adds to those of the text."""
        return {}

    def sampling_inputs(self, frozen: Frozen, batch: Batch, keys: Keys, x0: Images | None) -> tuple[Keys, Condition]:
        """Return the keys for the image's noise, and the inputs added to those of the text.

        The held-out loss passes x0; sampling passes None.
        """
        return keys, {}

    def wrap_denoiser(self, frozen: Frozen, denoise: Denoiser) -> Denoiser:
        """Return the denoiser that the sampler calls: with a threshold or previews."""
        return denoise

    def constrain(self, params: Params) -> Params:
        """Project the updated parameters; training goes on with the result."""
        return params


class SecondNetwork(NamedTuple):
    """A second network that guides the first one. frozen["guide"] holds its parameters."""

    unet: Any
    diffusion: Diffusion
    """The `diffusion` group of its config."""


def make_task(system: System, diffusion: Diffusion, sampler: Sampler, drop_prob: float, frozen: Frozen) -> Task:
    """Return a model's Task.

    Args:
        system: What the system supplies.
        diffusion: The config's `diffusion` group.
        sampler: The config's `sampler` group.
        drop_prob: The probability with which training drops a text.
        frozen: The frozen weights: a dict with the text encoder's at "text".

    Raises:
        ValueError: The sampling grid is spaced in time, but the noise defines no times.
    """
    objective, net = diffusion.objective, _net(system.unet)
    method = objective.method

    # `params` holds the network's weights and, for learned loss weights, a collection of their
    # parameters. unet.apply accepts this additional Flax collection and ignores it.
    def init(key: PRNGKeyArray) -> Params:
        example = {**system.example(), **picture_fields.example(system.fields)}
        return objective.with_learned(system.unet.init(key, **example))

    def loss(params, frozen, batch, keys):
        x0 = system.target(frozen, batch, _stream(keys, _TARGET))
        eps = samplers.initial_noise(keys, x0[0].shape, 1)
        eps = objective.shifted(_stream(keys, _OFFSET), eps)
        draw = lambda key: objective.noise.draw(key, 1)[0]
        sigma = lambda i: jax.vmap(draw)(_stream(keys, (_SIGMA, _SECOND_SIGMA)[i]))  # [B]
        keep = lambda key: jax.random.bernoulli(key, 1 - drop_prob)  # Text dropout.
        kept = jax.vmap(keep)(_stream(keys, _KEPT))  # [B]
        added = system.training_inputs(frozen, batch, x0, _stream(keys, _INPUTS))
        numbers = picture_fields.condition(system.fields, batch)
        numbers = picture_fields.dropped(numbers, _stream(keys, _FIELDS), system.field_drop_prob)
        text = system.text(frozen, batch)
        empty = {**system.dropped(frozen, text), **picture_fields.unknown(numbers)}
        text = {**text, **numbers}
        mixed = {name: where(kept, text[name], empty[name]) for name in text}
        conditions = Conditions(*({**c, **added} for c in (mixed, text, empty)))
        weights, mask = batch.get("loss_weight"), batch.get("loss_mask")
        noised = Noised(x0, eps, sigma, conditions, kept, weights, mask)
        minimised, losses, levels = method.loss(objective, net, params, noised)
        return minimised, loss_by_noise_level(losses, levels)

    def errors(params, frozen, batch, keys, sigma):
        x0 = system.target(frozen, batch, keys)
        noise_keys, added = system.sampling_inputs(frozen, batch, keys, x0)
        eps = samplers.initial_noise(noise_keys, x0[0].shape, 1)
        numbers = picture_fields.condition(system.fields, batch)
        text = system.text(frozen, batch)
        empty = lambda: {**system.dropped(frozen, text), **picture_fields.unknown(numbers), **added}
        network = method.measured(net, params, {**text, **numbers, **added}, empty, sigma)
        return objective.errors(network, x0, eps, sigma)

    levels = lambda n: noise.quantiles(objective.noise, n)
    sampler_inputs = make_sampler_inputs(system, diffusion, sampler)
    sample = samplers.make_sample(sampler_inputs, sampler)
    measure, constrain = Measure(levels, errors), system.constrain
    return Task(init, loss, sample, frozen, RULES, measure, sampler_inputs, constrain)


def make_sampler_inputs(
    system: System, diffusion: Diffusion, sampler: Sampler, guiding: SecondNetwork | None = None
) -> samplers.InputsFunction:
    """Return a Task's `sampler_inputs`, the function that prepares the sampler's arguments.

    The arguments are those of `make_task`. For autoguidance, `guiding` is the second network.
    """
    objective = diffusion.objective
    sigmas, time = samplers.sampling_grid(objective.noise, sampler)  # [steps + 1]
    scalings = objective.make_precond(time)

    def sampler_inputs(params, frozen, batch, keys, guidance):
        shape = system.sample_shape(batch)
        noise_keys, added = system.sampling_inputs(frozen, batch, keys, None)
        replaced = dict(system.conditions(frozen, batch))
        numbers = picture_fields.condition(system.fields, batch, system.field_values)
        unknown = picture_fields.unknown(numbers)
        given = {**replaced.pop(guidance_kinds.COND)(), **numbers, **added}
        # The other conditions replace some of the inputs: the text, and all fields.
        conditions = {name: lambda own=own: {**given, **own(), **unknown} for name, own in replaced.items()}
        conditions = {guidance_kinds.COND: lambda: given, **conditions}
        guide_of = None
        if guiding:
            second, net = guiding.diffusion.objective, _net(guiding.unet)
            guide_of = second.method.denoiser(net, frozen["guide"], second.scalings, sigmas)
        denoise = guidance_module.make_denoiser(
            sampler,
            guidance_kinds.GuidedModel(scalings, sigmas),
            guidance,
            objective.method.denoiser(_net(system.unet), params, scalings, sigmas),
            conditions,
            guide_of,
        )
        first = jnp.sqrt(1 + sigmas[0] ** 2) if system.unit_start else sigmas[0]
        x = samplers.initial_noise(noise_keys, shape, first)
        draws = samplers.gaussian_noise(noise_keys, shape)

        def finish(x):
            return system.decode(frozen, batch, samplers.to_variance_preserving(x, sigmas[-1]))

        inputs = samplers.SamplerInputs(system.wrap_denoiser(frozen, denoise), x, sigmas, draws, finish)
        if "image" not in batch:
            return inputs
        return inputs._replace(wrap=system.editor(frozen, batch, noise_keys))

    return sampler_inputs


def _net(unet: Any) -> Net:
    """Return a function that binds a network's parameters, condition and MeanFlow's span h."""

    def net(params, condition, h=None):
        condition = with_span(condition, h)
        return lambda x, time: unet.apply(params, x, time, **condition)

    return net


def with_span(condition: Condition, h: Sigma | None) -> Condition:
    """Append a token that encodes MeanFlow's span h to the text and its mask.

    Args:
        condition: It holds "text", float [B, L, D], and may hold "text_mask", bool [B, L].
        h: The span of each image, in [0, 1]. It is the length of the time interval over which the
            network predicts the mean velocity (diffusion/meanflow.py). None appends nothing.
    """
    if h is None:
        return condition
    text = condition["text"]
    token = ops.sinusoid(1000 * h, text.shape[-1])[:, None].astype(text.dtype)  # [B, 1, D]
    longer = {"text": jnp.concatenate([text, token], axis=1)}
    if "text_mask" in condition:
        padding = ((0, 0), (0, 1))
        longer["text_mask"] = jnp.pad(condition["text_mask"], padding, constant_values=True)
    return {**condition, **longer}


def where(rows: Array, yes: Array, no: Array) -> Array:
    """Return the rows of `yes` where `rows`, bool [B], is True, and those of `no` elsewhere."""
    return jnp.where(rows.reshape(-1, *(1,) * (yes.ndim - 1)), yes, no)


def loss_by_noise_level(loss: Float[Array, "B"], sigma: Sigma) -> Metrics:
    """Return the sum ("level_loss") and number ("level_count") of the losses in each sigma range.

    LEVELS holds the edges of the five ranges. Both arrays have shape [5].
    """
    sigma, loss = checkpoint_name(sigma, LABELS[0]), checkpoint_name(loss, LABELS[1])
    level = jnp.searchsorted(jnp.array(LEVELS), sigma)  # [B]
    inside = level == jnp.arange(len(LEVELS) + 1)[:, None]  # [levels, B]
    # Not inside * loss: a non-finite loss would spoil the sums of all ranges.
    level_loss = jnp.where(inside, loss, 0).sum(1)
    return {"level_loss": level_loss, "level_count": inside.sum(1).astype(loss.dtype)}


def _stream(keys: Keys, number: int) -> Keys:
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)
