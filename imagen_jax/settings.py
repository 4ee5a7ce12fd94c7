"""The settings of an Imagen model, base or super-resolution, and the check of their values."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from diffusion_jax import systems
from diffusion_jax.config import ranges, settings
from diffusion_jax.config.settings import (
    Data,
    Evaluation,
    Heldout,
    Lora,
    MeshShape,
    Optimizer,
    Run,
    Text,
)
from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.diffusion import objective
from diffusion_jax.diffusion.grids import EndName, GridName
from diffusion_jax.diffusion.guidance import GuidingName, ThresholdName
from diffusion_jax.diffusion.noise import NoiseName
from diffusion_jax.diffusion.objective import WeightName
from diffusion_jax.diffusion.precond import DistanceName, PrecondName
from diffusion_jax.diffusion.samplers import SamplerName
from diffusion_jax.systems import System
from diffusion_jax.text import registry
from diffusion_jax.train import optimizer as optimizer_module
from imagen_jax import unet as unet_module
from imagen_jax.efficient_unet import EfficientUNet
from imagen_jax.magnitude_unet import MagnitudeUNet
from imagen_jax.unet import UNet


class Diffusion(NamedTuple):
    """The training objective: what the network predicts, the noise levels, and the loss."""

    precond: PrecondName = "edm"
    """What the network predicts: a key of precond.PRECONDS, such as edm, eps, v or x0."""
    sigma_data: ranges.Positive = 0.5
    """The standard deviation of the data that EDM's preconditioner assumes."""
    noise: NoiseName = "lognormal"
    """The distribution of noise levels in training: a key of noise.NOISES."""
    p_mean: Annotated[float, "(-inf, inf)"] = -1.2
    """The mean of ln(sigma) for the noise "lognormal"."""
    p_std: ranges.Positive = 1.2
    """The standard deviation of ln(sigma) for the noise "lognormal"."""
    distance: DistanceName = "l2"
    """The distance between prediction and target: l1, l2 or huber."""
    weight: WeightName = "min_snr"
    """The weight of the loss at each noise level."""
    min_snr: ranges.Scale = 0.0
    """Largest SNR in the weight min_snr (Hang et al. 2023 use 5); 0 for no weighting."""
    offset_noise: ranges.Share = 0.0
    """Scale of offset noise, which is one normal draw per image and channel; 0 for none."""


class SuperResolution(NamedTuple):
    """The small image that a super-resolution model enlarges."""

    factor: ranges.Count = 1
    """Side of the large image divided by the side of the small one; 1 for base models."""
    aug_sigma: ranges.Positive = 0.002
    """Noise level of the small image during sampling, if the model has unet.noise_aug."""


class Sampler(NamedTuple):
    """How images are drawn. Discrete noise schedules use their own noise levels."""

    name: SamplerName = "heun"
    """A key of samplers.SAMPLERS, optionally with arguments, such as restart(low=0.5)."""
    steps: ranges.Count = 30
    """Number of steps."""
    sigma_min: ranges.Positive = 0.002
    """The smallest noise level of the grid. The last step goes from it to 0."""
    sigma_max: ranges.Positive = 80.0
    """The largest noise level, at which sampling starts."""
    rho: ranges.Positive = 7.0
    """The exponent of Karras et al.'s grid (2022, equation 5)."""
    churn: ranges.Scale = 0.0
    """The amount of new noise per step in the sampler heun (S_churn of Karras et al. 2022)."""
    eta: ranges.Share = 0.0
    """The share of new noise per step in the sampler ddim; 1 for DDPM's ancestral sampling."""
    guidance: ranges.Scale = 7.5
    """The guidance scale; 1 for no guidance."""
    guidance_low: ranges.LowLevel = 0.0
    """The smallest noise level at which guidance acts."""
    guidance_high: ranges.HighLevel = float("inf")
    """The largest noise level at which guidance acts."""
    threshold: ThresholdName = "dynamic"
    """How predicted images are limited to [-1, 1]: a key of guidance.THRESHOLDS."""
    grid: GridName = ""
    """The spacing of noise levels: a key of GRIDS; "" for the default of noise and sampler."""
    end: EndName = ""
    """The last noise level: "zero", or "sigma_min" to stop at the smallest level above zero."""
    offset: Annotated[int, "[0, 1000]"] = 1
    """The first timestep of the grid "leading", for discrete noise schedules."""
    guiding: GuidingName = "cfg"
    """Kinds of guidance: keys of GUIDANCE joined by +, such as apg(norm=5)+rescale."""
    negative_prompt: str = ""
    """The text that guidance moves away from; "" for the prediction without text."""


class Settings(NamedTuple):
    """The checked settings of a config."""

    run: Run
    unet: UNet | EfficientUNet | MagnitudeUNet
    unet_weights: str
    """The initial weights, or the weights that LoRA adapts: a workdir or a NeMo checkpoint. "" for
    random weights."""
    text: Text
    diffusion: Diffusion
    super_resolution: SuperResolution
    sampler: Sampler
    optimizer: Optimizer
    mesh: MeshShape
    evaluation: Evaluation
    heldout: Heldout
    data: Data
    lora: Lora

    @property
    def output_size(self) -> int:
        """Side of the images that the model draws, which can be larger than its training crops."""
        return self.data.resize or self.unet.image_size

    @property
    def input_size(self) -> int:
        """Side of the small image that a super-resolution model enlarges."""
        return self.output_size // self.super_resolution.factor


UNETS: dict[str, type | str] = {
    "unet": UNet,
    "efficient": EfficientUNet,
    "magnitude": MagnitudeUNet,
}
"""Values of unet.kind. Each is a network class or the string "MODULE:CLASS"."""


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Return the checked settings of a config. Raise ValueError if they are invalid."""
    return systems.read(config, "imagen_jax")


def check(s: Settings) -> None:
    """Raise ValueError if settings contradict each other."""
    optimizer_module.check(s.optimizer, s.run.steps)
    registry.check(s.text)
    settings.check_prompts(s.run, s.data)
    objective.check(s.diffusion)
    for name, below in (("sigma_max", "sigma_min"), ("guidance_high", "guidance_low")):
        high, low = getattr(s.sampler, name), getattr(s.sampler, below)
        if not high > low:
            raise ValueError(f"sampler.{name} is {high}: it must be above sampler.{below}, {low}")
    guidance_module.check(s.sampler)
    if isinstance(s.unet, UNet):
        unet_module.check(s.unet)
    else:
        s.unet.check(s.text.width)
    _check_sizes(s)
    _check_texts(s)


def _check_sizes(s: Settings) -> None:
    """Raise ValueError unless the sizes of the large image, the small image and the data fit."""
    factor, size, resize = s.super_resolution.factor, s.unet.image_size, s.data.resize
    if size % factor:
        raise ValueError(
            f"super_resolution.factor is {factor}: it must divide unet.image_size {size}"
        )
    if s.unet.low_res != (factor > 1):
        raise ValueError(
            f"super_resolution.factor is {factor} and unet.low_res is {s.unet.low_res}: a model "
            "with a factor above 1 needs a small image (unet.low_res=True, or "
            "unet.kind='efficient'), and one with factor 1 takes none"
        )
    if factor > 1 and s.evaluation.every:
        raise ValueError(
            f"evaluation.every is {s.evaluation.every}: a super-resolution model cannot draw "
            "prompts alone, so set it to 0 and evaluate the cascade"
        )
    if resize and (resize < size or resize % factor):
        raise ValueError(
            f"data.resize is {resize}: set it to 0, or to a multiple of {factor} that is at least "
            f"unet.image_size {size}, the size of the crops"
        )


def _check_texts(s: Settings) -> None:
    """Raise ValueError if the data holds text embeddings that the model cannot use.

    They need a pretrained text encoder, and exclude a separate store of embeddings.
    """
    if not s.data.embedded or s.data.source == "synthetic":
        return
    if not registry.ENCODERS[s.text.encoder].pretrained:
        raise ValueError(
            f"data.text is {s.data.text!r} and text.encoder is {s.text.encoder!r}, which cannot "
            "read it: set data.text to txt, or name the encoder that made these embeddings"
        )
    if s.text.store:
        raise ValueError(
            f"text.store is {s.text.store!r} and data.text is {s.data.text!r}, embeddings beside "
            "the images: set data.text to txt to look captions up, or leave text.store empty"
        )


SYSTEMS = {"imagen_jax": System(Settings, check, "imagen_jax.train", {"unet": UNETS})}
