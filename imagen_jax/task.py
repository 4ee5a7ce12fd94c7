"""A model of Imagen, base or super-resolution, as a Task: what its config means."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, UInt8

from diffusion_jax import (
    guidance,
    loop,
    noise,
    precond,
    samplers,
    settings,
    sharding,
    train_state,
)
from diffusion_jax.data import pipeline
from diffusion_jax.precond import Denoiser, Precond
from diffusion_jax.settings import Data, Evaluation, MeshShape, Optimizer, Run
from diffusion_jax.task import Task, loss_by_noise_level
from diffusion_jax.text import TextEncoder, registry
from diffusion_jax.text.registry import Text
from imagen_jax import efficient_unet, super_resolution
from imagen_jax import unet as unet_module
from imagen_jax.conditioning import example_inputs
from imagen_jax.efficient_unet import EfficientUNet
from imagen_jax.super_resolution import LowRes
from imagen_jax.unet import UNet


class Diffusion(NamedTuple):
    """What the network predicts, at which noise levels it is trained, and by which distance."""

    precond: str
    sigma_data: float
    noise: str
    p_mean: float
    p_std: float
    distance: str


class SuperResolution(NamedTuple):
    """`factor` large pixels a small one, 1 for base models; the small image's noise in sampling.

    Models without unet.noise_aug see the small image as it is.
    """

    factor: int
    aug_sigma: float


class Sampler(NamedTuple):
    """How images are drawn. A DDPM model's levels come from its schedule, not from `sigma_*`."""

    name: str
    steps: int
    sigma_min: float
    sigma_max: float
    rho: float
    churn: float
    eta: float
    guidance: float
    guidance_low: float
    guidance_high: float
    threshold: str


class Settings(NamedTuple):
    """A whole config, checked."""

    run: Run
    unet: UNet | EfficientUNet
    text: Text
    diffusion: Diffusion
    super_resolution: SuperResolution
    sampler: Sampler
    optimizer: Optimizer
    mesh: MeshShape
    evaluation: Evaluation
    data: Data

    @property
    def output_size(self) -> int:
        """The side of what the model draws: 1024 also where it is trained on crops of 256."""
        return self.data.resize or self.unet.image_size

    @property
    def input_size(self) -> int:
        """The side of the small image that a super-resolution model enlarges."""
        return self.output_size // self.super_resolution.factor


RULES: sharding.Rules = [
    (r"conv1/kernel$", sharding.OUTPUTS),  # Of residual blocks, between which lies a group norm.
    (r"conv2/kernel$", sharding.INPUTS),
    (r"(kernel|null_token|embedding)$", sharding.FSDP),
    (r"(bias|scale|frequencies)$", sharding.P()),
]

# The network, and the check of its fields next to the width of the text.
_UNETS: Mapping[str, tuple[type, Callable[[Any, int], None]]] = {
    "unet": (UNet, lambda unet, text_width: unet_module.check(unet)),
    "efficient": (EfficientUNet, efficient_unet.check),
}
_SCHEDULES = {"cosine": noise.cosine_log_snr, "linear": noise.linear_log_snr}
_PRECONDS: Mapping[str, Callable[[Diffusion], Precond]] = {
    "edm": lambda d: precond.edm(d.sigma_data),
    "eps": lambda d: precond.epsilon(precond.log_snr),
    "x0": lambda d: precond.x0(precond.log_snr),
    "v": lambda d: precond.velocity(precond.log_snr),
}
_NOISES: Mapping[str, Callable[[Diffusion], noise.DrawSigma]] = {
    "lognormal": lambda d: noise.lognormal(d.p_mean, d.p_std),
    "cosine": lambda d: noise.uniform_time(noise.cosine_log_snr),
    "linear": lambda d: noise.uniform_time(noise.linear_log_snr),
}
_DISTANCES = {"l2": precond.l2, "l1": precond.l1, "huber": precond.huber}
_THRESHOLDS = {
    "dynamic": guidance.dynamic_threshold,
    "static": guidance.static_threshold,
    "none": lambda denoise: denoise,
}
_SAMPLERS: Mapping[str, Callable[[Sampler], samplers.Sampler]] = {
    "heun": lambda s: functools.partial(samplers.heun, churn=s.churn),
    "ddim": lambda s: functools.partial(samplers.ddim, eta=s.eta),
    "ddpm": lambda s: samplers.ddpm,
    "dpmpp_2m": lambda s: samplers.dpmpp_2m,
}


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Checks a config, all of it, in milliseconds; ValueError that says what to change."""
    kinds = {"text": Text, "diffusion": Diffusion, "super_resolution": SuperResolution,
             "sampler": Sampler, "optimizer": Optimizer, "mesh": MeshShape,
             "evaluation": Evaluation, "data": Data}  # fmt: skip
    settings.check_groups(config, ("unet", *kinds))
    groups = {name: settings.read(kind, config[name], name) for name, kind in kinds.items()}
    run = settings.read(Run, config, "")
    unet = _read_unet(config["unet"], groups["text"].width)
    all_settings = Settings(run=run, unet=unet, **groups)
    check(all_settings)
    return all_settings


def text_encoder(text: Text) -> TextEncoder:
    """What a config's `text` group trains with; weights are opened and checked, not read."""
    return registry.open_encoder(text)


def make_task(s: Settings, encoder: TextEncoder) -> Task:
    """Init, loss and sampler of a model, with `encoder`'s weights as its frozen ones.

    A super-resolution model makes its small images from the large ones in training. Its sampler
    takes them as batch["low_res"], float [B, h, w, 3] in about [-1, 1], of any size.
    """
    unet, scalings = s.unet, _PRECONDS[s.diffusion.precond](s.diffusion)
    draw_sigma, distance = _NOISES[s.diffusion.noise](s.diffusion), _DISTANCES[s.diffusion.distance]
    factor, aug_sigma = s.super_resolution
    aug_sigma = aug_sigma if unet.noise_aug else None

    def init(key):
        return unet.init(key, **example_inputs(unet, s.text.width))

    def loss(params, frozen, batch, key):
        key_sigma, key_eps, key_drop, key_dropout, key_low = jax.random.split(key, 5)
        x0 = to_unit_range(batch["image"])
        text, mask = encoder.encode(frozen, batch)
        text = drop_text(key_drop, text, s.text.drop_prob)
        sigma = draw_sigma(key_sigma, len(x0))
        # Drawn flat: a 4-D draw of the same numbers compiles several times slower on CPUs.
        eps = jax.random.normal(key_eps, (len(x0), x0[0].size)).reshape(x0.shape)
        low_res = training_low_res(key_low, x0) if factor > 1 else LowRes()

        def network(x, time) -> Any:
            rngs = {"dropout": key_dropout}
            return unet.apply(params, x, time, text, mask, *low_res, train=True, rngs=rngs)

        per_image = precond.loss(network, scalings, x0, eps, sigma, distance)
        return per_image.mean(), loss_by_noise_level(per_image, sigma)

    def training_low_res(key, x0):
        small = super_resolution.shrink(x0, factor)
        if not unet.noise_aug:
            return LowRes(small)
        key_sigma, key_eps = jax.random.split(key)
        eps = jax.random.normal(key_eps, (len(small), small[0].size)).reshape(small.shape)
        return super_resolution.with_noise(small, draw_sigma(key_sigma, len(x0)), eps, scalings)

    def sample(params, frozen, batch, keys, scale):
        text, mask = encoder.encode(frozen, batch)
        if scale is not None:  # Rows 2i with the text, 2i + 1 with zeros and the same mask.
            text, mask = text.repeat(2, axis=0), mask.repeat(2, axis=0)
            text = text.at[1::2].set(0)
        shape, low_res = (unet.image_size, unet.image_size, 3), LowRes()
        if factor > 1:
            small = batch["low_res"]
            shape = (factor * small.shape[1], factor * small.shape[2], 3)
            keys, low_keys = super_resolution.own_keys(keys, shape[0])
            low_res = super_resolution.sampling_inputs(small, aug_sigma, low_keys, scalings)
            low_res = jax.tree.map(lambda row: row.repeat(len(text) // len(row), axis=0), low_res)

        def network(x, time) -> Any:
            return unet.apply(params, x, time, text, mask, *low_res)

        denoise = _guided(precond.denoiser(network, scalings), scale, s.sampler)
        sigmas = sampling_sigmas(s.diffusion, s.sampler)
        x = samplers.initial_noise(keys, shape, sigmas[0])
        draws = samplers.gaussian_noise(keys, shape)
        return _SAMPLERS[s.sampler.name](s.sampler)(denoise, x, sigmas, draws)

    return Task(init, loss, sample, encoder.frozen, RULES)


def to_unit_range(images: UInt8[ArrayLike, "B H W C"]) -> Float[Array, "B H W C"]:
    """0 ... 255 to [-1, 1]."""
    return jnp.asarray(images, jnp.float32) / 127.5 - 1


def drop_text(key: jax.Array, text: Float[Array, "B L D"], prob: float) -> Float[Array, "B L D"]:
    """Zeroes each text with this probability. The mask stays: so NeMo trains without text."""
    keep = jax.random.bernoulli(key, 1 - prob, (len(text), 1, 1))
    return text * keep


def sampling_sigmas(diffusion: Diffusion, sampler: Sampler) -> Float[Array, "{sampler.steps}+1"]:
    """Karras' levels for EDM noise; a schedule's own, at even times, for a DDPM model."""
    if diffusion.noise == "lognormal":
        low, high = sampler.sigma_min, sampler.sigma_max
        return samplers.karras_sigmas(sampler.steps, low, high, sampler.rho)
    sigmas = samplers.log_snr_sigmas(_SCHEDULES[diffusion.noise], sampler.steps)
    return sigmas if sampler.name == "ddpm" else samplers.ending_at_zero(sigmas)


def _guided(denoise: Denoiser, scale: Any, sampler: Sampler) -> Denoiser:
    if scale is not None:
        within = guidance.interval(scale, sampler.guidance_low, sampler.guidance_high)
        denoise = guidance.classifier_free(denoise, within)
    return _THRESHOLDS[sampler.threshold](denoise)


def _read_unet(group: Mapping[str, Any], text_width: int) -> UNet | EfficientUNet:
    values: dict[str, Any] = {k: settings.plain(v) for k, v in group.items()}
    if "kind" not in values:
        raise ValueError(f"the config lacks unet.kind: choose from {', '.join(_UNETS)}")
    settings.one_of("unet.kind", kind := values.pop("kind"), _UNETS)
    network, check = _UNETS[kind]
    fields = [name for name in network.__dataclass_fields__ if name not in ("parent", "name")]
    settings.check_fields(values, fields, "unet")
    values["dtype"] = jnp.dtype(values["dtype"])
    unet = network(**values)
    check(unet, text_width)
    return unet


def check(s: Settings) -> None:
    """ValueError for values that cannot be or do not go together."""
    choices = [
        ("text.encoder", s.text.encoder, registry.ENCODERS),
        ("text.dtype", s.text.dtype, ("bfloat16", "float32")),
        ("diffusion.precond", s.diffusion.precond, _PRECONDS),
        ("diffusion.noise", s.diffusion.noise, _NOISES),
        ("diffusion.distance", s.diffusion.distance, _DISTANCES),
        ("sampler.name", s.sampler.name, _SAMPLERS),
        ("sampler.threshold", s.sampler.threshold, _THRESHOLDS),
        ("optimizer.schedule", s.optimizer.schedule, loop.SCHEDULES),
        ("data.crop", s.data.crop, pipeline.CROPS),
    ]
    for field, value, known in choices:
        settings.one_of(field, value, known)
    settings.positive(
        steps=s.run.steps, batch_size=s.run.batch_size, log_every=s.run.log_every,
        save_every=s.run.save_every, keep_last=s.run.keep_last, sampler__steps=s.sampler.steps,
        optimizer__accumulate=s.optimizer.accumulate, optimizer__lr=s.optimizer.lr,
        text__width=s.text.width, text__max_tokens=s.text.max_tokens,
        super_resolution__aug_sigma=s.super_resolution.aug_sigma,
        diffusion__sigma_data=s.diffusion.sigma_data, diffusion__p_std=s.diffusion.p_std,
        sampler__sigma_min=s.sampler.sigma_min, sampler__rho=s.sampler.rho,
        optimizer__clip=s.optimizer.clip,
    )  # fmt: skip
    settings.within(
        0, 1, text__drop_prob=s.text.drop_prob, sampler__eta=s.sampler.eta,
        optimizer__b1=s.optimizer.b1, optimizer__b2=s.optimizer.b2,
    )  # fmt: skip
    settings.within(0, 1000, sampler__guidance=s.sampler.guidance, sampler__churn=s.sampler.churn)
    if not s.sampler.sigma_max > s.sampler.sigma_min:
        raise ValueError(
            f"sampler.sigma_max is {s.sampler.sigma_max}: it must be above sampler.sigma_min, "
            f"{s.sampler.sigma_min}"
        )
    loop.make_optimizer(s.optimizer, s.run.steps)  # A schedule may not fit the number of steps.
    train_state.check_decays(s.optimizer.ema_decays)
    _check_sizes(s)
    _check_texts(s)


def _check_sizes(s: Settings) -> None:
    """ValueError unless the sizes of the large image, the small one and the data fit together."""
    factor, size, resize = s.super_resolution.factor, s.unet.image_size, s.data.resize
    if factor < 1 or size % factor:
        raise ValueError(
            f"super_resolution.factor is {factor}: it must divide unet.image_size {size}"
        )
    if s.unet.low_res != (factor > 1):
        raise ValueError(
            f"super_resolution.factor is {factor} and unet.low_res {s.unet.low_res}: a model with "
            "a factor above 1 sees a small image (unet.low_res=True, or unet.kind='efficient'), "
            "and one with factor 1 sees none"
        )
    if factor > 1 and s.evaluation.every:
        raise ValueError(
            "evaluation.every is set, and a super-resolution model draws no prompt alone: set it "
            "to 0, and evaluate the cascade"
        )
    if resize and (resize < size or resize % factor):
        raise ValueError(
            f"data.resize is {resize}: take 0, or a multiple of {factor} from unet.image_size "
            f"{size} on, which is cut out of it"
        )


def _check_texts(s: Settings) -> None:
    """ValueError if the encoder cannot read the data's texts, or there is nothing to draw."""
    embedded = s.text.encoder == "precomputed"
    if not embedded and s.run.sample_every and not s.run.prompts:
        raise ValueError(
            "prompts is empty: give texts to draw on the way, such as "
            "--config.prompts=\"('a red dog',)\", or set sample_every=0"
        )
    if s.data.source in ("folder", "webdataset") and embedded == s.data.text.endswith("txt"):
        way_out = "the suffix of embeddings, such as npy" if embedded else "txt"
        raise ValueError(
            f"data.text is {s.data.text!r} and text.encoder is {s.text.encoder!r}, which cannot "
            f"read it: set data.text to {way_out}, or choose another encoder"
        )
