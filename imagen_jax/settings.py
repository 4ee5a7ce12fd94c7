"""The settings of an Imagen model, base or super-resolution, and the check of their values."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from diffusion_jax import systems
from diffusion_jax.config import picture_fields, ranges, settings, shapes
from diffusion_jax.config.groups import group
from diffusion_jax.diffusion import groups, objective, samplers
from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.diffusion.guidance import THRESHOLDS, ThresholdName
from diffusion_jax.diffusion.precond import Denoiser
from diffusion_jax.systems import SystemEntry
from diffusion_jax.text import registry
from diffusion_jax.train import optimizer as optimizer_module
from imagen_jax import layers
from imagen_jax.efficient_unet import EfficientUNet
from imagen_jax.magnitude_unet import MagnitudeUNet
from imagen_jax.transformer import Transformer
from imagen_jax.unet import UNet


@group
class Diffusion(groups.Diffusion):
    """The training objective: what the network predicts, the noise levels, and the loss.

    Read by diffusion_jax/diffusion/objective.py.
    """

    sigma_data: ranges.Positive = 0.5
    """The standard deviation of the images in [-1, 1], which EDM's target and the weight "edm"
    assume."""
    p_mean: Annotated[float, ranges.Interval("(-inf, inf)")] = -1.2
    """With the noise "lognormal", the mean of the logarithm of the noise level."""
    p_std: ranges.Positive = 1.2
    """With the noise "lognormal", the standard deviation of the logarithm of the noise level."""


class SuperResolution(NamedTuple):
    """The factor of a super-resolution model, and the noise that it adds to the small image.

    Read by imagen_jax/super_resolution.py.
    """

    factor: ranges.Count = 1
    """The factor by which a super-resolution model enlarges each side; 1 for base models."""
    aug_sigma: ranges.Positive = 0.002
    """The level of the noise that is added to the small image during drawing, if unet.noise_aug is
    True. More noise hides more of the previous stage's errors."""


@group
class Sampler(groups.Sampler):
    """How images are drawn.

    Read by diffusion_jax/diffusion/samplers.py, diffusion_jax/diffusion/grids.py and
    diffusion_jax/diffusion/guidance.py.
    """

    height: ranges.WholeNumber = 0
    """The height of the images that a base model draws, in pixels; 0 for the training size. A
    super-resolution model ignores it and keeps the aspect ratio of the small image."""
    width: ranges.WholeNumber = 0
    """The width of the images that a base model draws, in pixels; 0 for the training size. A
    super-resolution model ignores it and keeps the aspect ratio of the small image."""
    threshold: ThresholdName = "dynamic"
    """How predicted images are limited to valid colours at each step: "static" clips them,
    "dynamic" scales down images that exceed them (Imagen), and "none" does nothing."""

    @functools.cached_property
    def limit(self) -> Callable[[Denoiser], Denoiser]:
        """The function that `threshold` names."""
        return THRESHOLDS.bound("sampler.threshold", self.threshold)


class Settings(NamedTuple):
    """The checked settings of a config."""

    run: settings.Run
    unet: UNet | EfficientUNet | MagnitudeUNet | Transformer
    unet_weights: str
    """The weights that training starts from, or that LoRA adapts: a workdir or a NeMo checkpoint;
    "" for random weights."""
    text: settings.Text
    diffusion: Diffusion
    super_resolution: SuperResolution
    sampler: Sampler
    optimizer: settings.Optimizer
    mesh: settings.MeshShape
    evaluation: settings.Evaluation
    heldout: settings.Heldout
    log: settings.Log
    data: settings.Data
    lora: settings.Lora

    @property
    def output_size(self) -> int:
        """Side in pixels of the images that the model draws. Training crops can be smaller."""
        return self.data.resize or self.unet.image_size

    @property
    def crop_sides(self) -> tuple[int, int]:
        """The side of square training crops, and a number that must divide the sides of all crops.

        Both are in pixels. Crops that are not square have the sizes in data.aspect_buckets.
        """
        return self.unet.image_size, math.lcm(layers.unit(self.unet), self.super_resolution.factor)

    @property
    def output_shape(self) -> tuple[int, int]:
        """Height and width in pixels of the images that a base model draws."""
        return self.sampler.height or self.output_size, self.sampler.width or self.output_size

    @property
    def fields(self) -> tuple[str, ...]:
        """The config's data.fields: the numbers that the network sees besides the text."""
        return self.data.fields

    @property
    def input_size(self) -> int:
        """Side in pixels of the small image that a super-resolution model enlarges."""
        return self.output_size // self.super_resolution.factor


UNETS: dict[str, type | str] = {
    "unet": UNet,
    "efficient": EfficientUNet,
    "magnitude": MagnitudeUNet,
    "transformer": Transformer,
}
"""The network class of each value of unet.kind, or the string "MODULE:CLASS" to import it."""


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Return the checked settings of a config. Raises ValueError if they are invalid."""
    return systems.read(config, "imagen_jax")


def check(s: Settings) -> None:
    """Raise ValueError if settings contradict each other."""
    optimizer_module.check(s.optimizer, s.run.steps)
    registry.check(s.text)
    if s.text.learned_tokens:
        raise ValueError(
            f"text.learned_tokens is {s.text.learned_tokens!r}, but only Stable Diffusion "
            "(sd_jax.train) can learn a word: leave it empty"
        )
    settings.check_prompts(s.run, s.data)
    settings.check_tags(s.data, s.text)
    maskless = "" if s.diffusion.training.takes_mask else s.diffusion.method
    settings.check_loss_mask(s.data, maskless)
    picture_fields.values(picture_fields.read(s.data.fields), s.sampler.fields)
    objective.bound(s.diffusion)
    for name, below in (("sigma_max", "sigma_min"), ("guidance_high", "guidance_low")):
        high, low = getattr(s.sampler, name), getattr(s.sampler, below)
        if not high > low:
            raise ValueError(f"sampler.{name} is {high}: it must be above sampler.{below} ({low})")
    guidance_module.check(s.sampler)
    samplers.check_method(s.diffusion, s.sampler)
    s.unet.check(s.text.width)
    _check_sizes(s)
    _check_texts(s)


def _check_sizes(s: Settings) -> None:
    """Raise ValueError if the image size, the enlargement factor and data.resize do not agree."""
    factor, size, resize = s.super_resolution.factor, s.unet.image_size, s.data.resize
    if size % factor:
        raise ValueError(f"super_resolution.factor is {factor}: it must divide unet.image_size {size}")
    if s.unet.low_res != (factor > 1):
        raise ValueError(
            f"super_resolution.factor is {factor}, but unet.low_res is {s.unet.low_res}: a model "
            "with a factor above 1 needs unet.low_res=True or unet.kind='efficient', and a base "
            "model (factor 1) needs unet.low_res=False"
        )
    if resize and (resize < size or resize % factor):
        raise ValueError(
            f"data.resize is {resize}: set it to 0, or to a multiple of {factor} that is at least "
            f"unet.image_size, which is {size}"
        )
    shapes.check(s.data.aspect_buckets, *s.crop_sides, resize=resize)
    if factor == 1:
        _, unit = s.crop_sides
        shape = s.output_shape
        for name, side in zip(("height", "width"), shape, strict=True):
            if side % unit:
                own = "data.resize" if resize else "unet.image_size"
                set_by = f"sampler.{name}" if getattr(s.sampler, name) else own
                raise ValueError(f"{set_by} is {side}: for this model it must be a multiple of {unit} pixels")
        if s.evaluation.every and shape[0] != shape[1]:
            raise ValueError(
                f"sampler.height and sampler.width give images of {shape[0]}x{shape[1]} pixels, "
                "but only square images can be scored: set both to 0, or set evaluation.every to 0"
            )
    if factor > 1 and s.evaluation.every:
        raise ValueError(
            f"evaluation.every is {s.evaluation.every}, but a super-resolution model cannot draw "
            "from prompts alone: set it to 0, and score the cascade with imagen_jax.evaluate"
        )


def _check_texts(s: Settings) -> None:
    """Raise ValueError if the data holds text embeddings that the model cannot use.

    Embeddings in the data need a pretrained text encoder, and cannot be combined with text.store.
    """
    if not s.data.embedded or s.data.source == "synthetic":
        return
    if not registry.ENCODERS[s.text.encoder].pretrained:
        raise ValueError(
            f"data.text is {s.data.text!r}, but text.encoder is {s.text.encoder!r}, which cannot "
            "use stored embeddings: set data.text to txt, or text.encoder to the encoder that made "
            "the embeddings"
        )
    if s.text.store:
        raise ValueError(
            f"text.store is {s.text.store!r}, but data.text is {s.data.text!r}, which reads "
            "embeddings stored with the images: set data.text to txt to use the store, or leave "
            "text.store empty"
        )


SYSTEMS = {"imagen_jax": SystemEntry(Settings, check, "imagen_jax.train", {"unet": UNETS})}
