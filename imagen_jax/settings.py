"""The config of an Imagen model, base or super-resolution: typed and checked."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from diffusion_jax import systems
from diffusion_jax.config import named, ranges
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
from diffusion_jax.diffusion import samplers
from diffusion_jax.diffusion.grids import ENDS, GRIDS
from diffusion_jax.diffusion.guidance import THRESHOLDS
from diffusion_jax.diffusion.noise import NOISES
from diffusion_jax.diffusion.objective import WEIGHTINGS
from diffusion_jax.diffusion.precond import DISTANCES, PRECONDS
from diffusion_jax.systems import System
from diffusion_jax.text import registry
from imagen_jax import unet as unet_module
from imagen_jax.unet import UNet

if TYPE_CHECKING:
    from imagen_jax.efficient_unet import EfficientUNet
    from imagen_jax.magnitude_unet import MagnitudeUNet


class Diffusion(NamedTuple):
    """The objective: the network's output, the noise of training, the distance of the loss."""

    precond: Annotated[str, named.checked(PRECONDS)] = "edm"
    sigma_data: ranges.Positive = 0.5
    noise: Annotated[str, named.checked(NOISES)] = "lognormal"
    p_mean: Annotated[float, "(-inf, inf)"] = -1.2
    p_std: ranges.Positive = 1.2
    distance: Annotated[str, DISTANCES] = "l2"
    weight: Annotated[str, named.checked(WEIGHTINGS)] = "min_snr"
    """How much an error counts at each noise level."""
    min_snr: ranges.Scale = 0.0
    """Bounds the weight of levels with little noise (Hang et al. 2023: 5); 0: the loss as such."""
    offset_noise: ranges.Share = 0.0
    """Times a normal number for each image and channel joins the noise; 0: none."""


class SuperResolution(NamedTuple):
    """`factor` large pixels a small one, 1 for base models; the small image's noise in sampling.

    Models without unet.noise_aug see the small image as it is.
    """

    factor: ranges.Count = 1
    aug_sigma: ranges.Positive = 0.002


class Sampler(NamedTuple):
    """How images are drawn. A DDPM model's levels come from its schedule, not from `sigma_*`."""

    name: Annotated[str, samplers.bound] = "heun"
    steps: ranges.Count = 30
    sigma_min: ranges.Positive = 0.002
    sigma_max: ranges.Positive = 80.0
    rho: ranges.Positive = 7.0
    churn: ranges.Scale = 0.0
    eta: ranges.Share = 0.0
    guidance: ranges.Scale = 7.5
    guidance_low: Annotated[float, "[0, inf)"] = 0.0
    """Guidance acts on noise levels from low to high."""
    guidance_high: Annotated[float, "(0, inf]"] = float("inf")
    threshold: Annotated[str, named.checked(THRESHOLDS)] = "dynamic"
    grid: Annotated[str, GRIDS] = ""
    """The noise levels of the steps, a key of grids.GRIDS; "" takes that of noise and sampler."""
    end: Annotated[str, ENDS] = ""
    """Where they end: at "zero" or at "sigma_min", the least level that there is."""
    offset: Annotated[int, "[0, 1000]"] = 1
    """The first of a table's leading times."""
    guiding: Annotated[str, guidance_module.bound] = "cfg"
    """How guidance acts: names in guidance.GUIDANCE, joined by +, such as apg(norm=5)+rescale."""
    negative_prompt: str = ""
    """What guidance leads away from; "": from no text."""


class Settings(NamedTuple):
    """A whole config, checked.

    `unet_weights` is what training starts from, or what a LoRA adapts, "" for random numbers: the
    workdir of a run, or a checkpoint of NeMo's.
    """

    run: Run
    unet: "UNet | EfficientUNet | MagnitudeUNet"
    unet_weights: str
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
        """The side of what the model draws: 1024 also where it is trained on crops of 256."""
        return self.data.resize or self.unet.image_size

    @property
    def input_size(self) -> int:
        """The side of the small image that a super-resolution model enlarges."""
        return self.output_size // self.super_resolution.factor


UNETS: dict[str, type | str] = {
    "unet": UNet,
    "efficient": "imagen_jax.efficient_unet:EfficientUNet",
    "magnitude": "imagen_jax.magnitude_unet:MagnitudeUNet",
}


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Checks a config, all of it, in milliseconds; ValueError that says what to change."""
    return systems.read(config, "imagen_jax")


def check(s: Settings) -> None:
    """ValueError for values that cannot be or do not go together."""
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
    """ValueError unless the sizes of the large image, the small one and the data fit together."""
    factor, size, resize = s.super_resolution.factor, s.unet.image_size, s.data.resize
    if size % factor:
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
    """ValueError if the data's texts are embeddings that the encoder or a store cannot give."""
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


SYSTEMS = {
    "imagen_jax": System(
        Settings, check, "imagen_jax.train", "imagen_jax.task:example", {"unet": UNETS}
    )
}
