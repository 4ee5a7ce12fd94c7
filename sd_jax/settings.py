"""The settings of a Stable Diffusion config, with their types and ranges, and their checks."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from diffusion_jax import systems
from diffusion_jax.config import ranges, settings
from diffusion_jax.config.settings import (
    MOMENTS,
    Data,
    Evaluation,
    Heldout,
    Lora,
    MeshShape,
    Optimizer,
    Run,
    Text,
)
from diffusion_jax.diffusion import editing, objective
from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.diffusion.grids import EndName, GridName
from diffusion_jax.diffusion.guidance import GuidingName
from diffusion_jax.diffusion.noise import NoiseName
from diffusion_jax.diffusion.objective import WeightName
from diffusion_jax.diffusion.precond import DistanceName, PrecondName
from diffusion_jax.diffusion.samplers import SamplerName
from diffusion_jax.systems import System
from diffusion_jax.text import registry
from diffusion_jax.train import optimizer as optimizer_module
from sd_jax import unet as unet_module
from sd_jax import vae as vae_module
from sd_jax.unet import UNet
from sd_jax.vae import VAE

PIXELS = ("symmetric", "unit")
DROP_TO = ("empty", "zeros")
_Level = Annotated[float, "[0, 2097152]"]


class Latents(NamedTuple):
    """Settings of the latents, which are `scale` times a sample of the VAE's posterior."""

    image_size: ranges.Count
    """Side of the square training images in pixels."""
    scale: ranges.Positive = vae_module.SCALE
    """The inverse of the standard deviation of the VAE's samples."""
    pixels: Annotated[str, PIXELS] = "symmetric"
    """Range of the pixels that the VAE encodes: "symmetric" for [-1, 1], as in the VAE's training,
    or "unit" for [0, 1], as in MLPerf's published moments."""


class Conditioning(NamedTuple):
    """Settings of the text context that the UNet attends to."""

    drop_to: Annotated[str, DROP_TO] = "empty"
    """The replacement of dropped texts: "empty" for the embeddings of the empty prompt, as in
    sampling, or "zeros", as in NeMo."""
    pad_to: ranges.Amount = 0
    """Number of tokens to which the context is padded with zeros; 0 for no padding. NeMo pads the
    77 tokens of CLIP to 80."""


class Diffusion(NamedTuple):
    """Settings of the objective: the UNet's prediction, the noise levels of training, the loss."""

    predicts: PrecondName = "eps"
    """What the UNet predicts, such as eps or v: a key of precond.PRECONDS."""
    offset_noise: ranges.Share = 0.0
    """Scale of offset noise, which is one normal draw per image and channel; 0 for none."""
    min_snr: ranges.Scale = 0.0
    """Bound on the loss weight at low noise levels (5 in Hang et al. 2023); 0 for no weighting."""
    noise: NoiseName = "scaled_linear"
    """The noise levels of training: LDM's table "scaled_linear", or another key of noise.NOISES.
    With "zero_terminal_snr", the UNet cannot predict eps."""
    distance: DistanceName = "l2"
    """The distance between prediction and target: l1, l2 or huber."""
    weight: WeightName = "min_snr"
    """The weight of the loss at each noise level."""


class Sampler(NamedTuple):
    """Settings for drawing images: the sampler, its noise levels, and guidance."""

    name: SamplerName = "plms"
    """The sampler, a key of samplers.SAMPLERS, possibly with arguments: restart(low=0.5)."""
    steps: Annotated[int, "[1, 1000]"] = 50
    """Number of sampling steps."""
    eta: ranges.Share = 0.0
    """The share of new noise in the sampler ddim; 1 gives DDPM's ancestral sampling."""
    guidance: ranges.Scale = 7.5
    """The guidance scale; 1 for no guidance."""
    negative_prompt: str = ""
    """The text that guidance leads away from; "" for the replacement of dropped texts."""
    height: ranges.Amount = 0
    """The height of the images in pixels; 0 for the training size."""
    width: ranges.Amount = 0
    """The width of the images in pixels; 0 for the training size."""
    churn: ranges.Scale = 0.0
    """The amount of new noise in the sampler heun (S_churn in Karras et al. 2022)."""
    grid: GridName = ""
    """The spacing of the noise levels, a key of grids.GRIDS; "" for the default of diffusion.noise,
    or else of the sampler."""
    end: EndName = ""
    """The last noise level: "zero" for 0, "sigma_min" for the smallest noise level, or "" for the
    default of diffusion.noise, or else of the sampler."""
    offset: Annotated[int, "[0, 1000]"] = 1
    """The smallest time of the grid "leading"."""
    sigma_min: _Level = 0.0
    """The smallest noise level of the grids "karras" and "exponential". 0 means the smallest
    level of a discrete noise schedule, or else 0.002."""
    sigma_max: _Level = 0.0
    """The largest noise level of the grids "karras" and "exponential". 0 means the largest
    level of a discrete noise schedule, or else 80. On a discrete schedule, this value also clips
    the grids "leading", "trailing" and "linspace"."""
    rho: ranges.Positive = 7.0
    """The exponent rho of the grid "karras" (Karras et al. 2022, equation 5)."""
    unit_start: bool = True
    """Whether sampling starts from sqrt(1 + sigma^2) * eps instead of sigma * eps. The network of a
    variance-preserving model then receives standard normal noise first."""
    guiding: GuidingName = "cfg"
    """The kinds of guidance: keys of guidance.GUIDANCE joined by +, such as apg(norm=5)+rescale."""
    guidance_low: ranges.LowLevel = 0.0
    """The smallest noise level at which guidance acts."""
    guidance_high: ranges.HighLevel = float("inf")
    """The largest noise level at which guidance acts."""


class Pipeline(NamedTuple):
    """All settings that drawing needs, for models trained here or elsewhere."""

    unet: UNet
    vae: VAE
    conditioning: Conditioning
    latents: Latents
    diffusion: Diffusion
    sampler: Sampler
    strength: float = 1.0
    """Share of the sampling steps that image-to-image runs, in (0, 1]; 1 starts from pure noise."""

    @property
    def output_shape(self) -> tuple[int, int]:
        """Height and width of the drawn images in pixels."""
        size = self.latents.image_size
        return self.sampler.height or size, self.sampler.width or size

    @property
    def steps_taken(self) -> int:
        """Number of sampling steps that image-to-image runs."""
        return editing.steps_taken(self.strength, self.sampler.steps)


class Settings(NamedTuple):
    """Checked settings of a training config.

    Weights are given by the path of a workdir, a checkpoint file or a diffusers directory.
    """

    run: Run
    unet: UNet
    unet_weights: str
    """The UNet's initial weights, or the weights that LoRA adapts; "" for random weights."""
    vae: VAE
    vae_weights: str
    """The weights of the frozen VAE; "" for training on moments without sampling."""
    text: Text
    conditioning: Conditioning
    latents: Latents
    diffusion: Diffusion
    sampler: Sampler
    optimizer: Optimizer
    mesh: MeshShape
    evaluation: Evaluation
    heldout: Heldout
    data: Data
    lora: Lora

    @property
    def pipeline(self) -> Pipeline:
        """The subset of the settings that drawing needs."""
        groups = self.conditioning, self.latents, self.diffusion, self.sampler
        return Pipeline(self.unet, self.vae, *groups)

    @property
    def output_size(self) -> int:
        """Side in pixels of the images that evaluation scores.

        Raises ValueError if the images are not square.
        """
        height, width = self.pipeline.output_shape
        if height != width:
            raise ValueError(
                f"sampler.height is {height} and sampler.width is {width}: only squares are scored"
            )
        return height


class Reconstruction(NamedTuple):
    """Settings of an autoencoder's loss: image distance plus `kl` times KL(posterior || N(0, 1)).

    Both terms are divided by the number of values in the images, so that `kl` is LDM's kl_weight.
    """

    image_size: ranges.Count
    """The side of the square images of training, in pixels."""
    distance: DistanceName = "l1"
    """The distance between images and their reconstructions: l1, l2 or huber."""
    kl: ranges.Share = 1e-2
    """The weight of the KL divergence in the loss."""


class AutoencoderSettings(NamedTuple):
    """Checked settings of a config of sd_jax.train_vae."""

    run: Run
    vae: VAE
    vae_weights: str
    """The VAE's initial weights; "" for random weights."""
    reconstruction: Reconstruction
    optimizer: Optimizer
    mesh: MeshShape
    data: Data


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Return the checked settings of a training config. Raises ValueError for invalid values."""
    return systems.read(config, "sd_jax")


def uses_moments(data: Data) -> bool:
    """Return whether training reads VAE moments instead of images.

    Raises ValueError if a mixture has both.
    """
    kinds = [part[1] for part in data.mixture] if data.source == "mixture" else [data.source]
    if len({kind == MOMENTS for kind in kinds}) > 1:
        raise ValueError(
            f"data.mixture has the sources {', '.join(kinds)}: do not mix moments and images"
        )
    return kinds[0] == MOMENTS


def check(s: Settings) -> None:
    """Raise ValueError if the settings of a training config contradict each other."""
    optimizer_module.check(s.optimizer, s.run.steps)
    registry.check(s.text)
    settings.check_prompts(s.run, s.data)
    unet_module.check(s.unet)
    vae_module.check(s.vae)
    check_size(s.pipeline, "latents.image_size", s.latents.image_size)
    check_pipeline(s.pipeline)
    _check_text(s)
    _check_data(s)


def check_pipeline(p: Pipeline) -> None:
    """Raise ValueError if a model cannot draw with these settings."""
    for name in ("conditioning", "latents", "diffusion", "sampler"):  # Flags may set these.
        group = getattr(p, name)
        ranges.check(type(group), group._asdict(), name)
    objective.check(p.diffusion)
    guidance_module.check(p.sampler)
    check_size(p, "sampler.height", p.output_shape[0])
    check_size(p, "sampler.width", p.output_shape[1])
    if not 0 < p.strength <= 1 or p.steps_taken < 1:
        raise ValueError(
            f"strength is {p.strength}, which makes {p.steps_taken} of {p.sampler.steps} steps: it "
            "must be in (0, 1] and give at least one step"
        )
    channels = (p.vae.latent_channels, p.unet.in_channels, p.unet.out_channels)
    if len(set(channels)) > 1:
        raise ValueError(
            f"vae.latent_channels, unet.in_channels and unet.out_channels are {channels}: they "
            "must be equal"
        )


def check_size(p: Pipeline, field: str, size: int) -> None:
    """Raise ValueError if images with a side of `size` pixels do not fit the VAE and the UNet.

    The size must be a multiple of f * 2^n, where f is the VAE's downsampling factor and n is the
    number of downsampling layers of the UNet. `field` is the name of the size in the message.
    """
    factor, halvings = vae_module.factor(p.vae), len(p.unet.channel_mult) - 1
    unit = factor * 2**halvings
    if size < unit or size % unit:
        raise ValueError(
            f"{field} is {size}: it must be a multiple of {unit}, since latents are {factor} times "
            f"smaller and the UNet halves them {halvings} times"
        )


def _check_text(s: Settings) -> None:
    if s.data.source in ("folder", "webdataset", "moments") and s.data.embedded:
        raise ValueError(
            f"data.text is {s.data.text!r}: Stable Diffusion reads captions, so set it to txt"
        )
    if s.conditioning.pad_to and s.conditioning.pad_to < s.text.max_tokens:
        raise ValueError(
            f"conditioning.pad_to is {s.conditioning.pad_to}: it must be 0, or at least "
            f"text.max_tokens {s.text.max_tokens}"
        )


def _check_data(s: Settings) -> None:
    draws = s.run.sample_every or s.evaluation.every
    if not uses_moments(s.data):
        if not s.vae_weights:
            raise ValueError(
                "vae.weights is empty: name a diffusers directory, a checkpoint, or a workdir of "
                "python -m sd_jax.train_vae; only training on moments (data.source='moments') "
                "works without a VAE"
            )
    elif s.data.flip or s.data.crop != "center" or s.data.resize:
        raise ValueError(
            "data.flip, data.crop or data.resize is set, but moments are of whole images: set "
            "data.flip=False, data.crop=center and data.resize=0 (set data.resize when the moments "
            "are computed)"
        )
    elif draws and not s.vae_weights:
        raise ValueError(
            "vae.weights is empty: name the VAE, or draw nothing during training with "
            "sample_every=0 and evaluation.every=0"
        )


def check_autoencoder(s: AutoencoderSettings) -> None:
    """Raise ValueError if the settings of an autoencoder config contradict each other."""
    optimizer_module.check(s.optimizer, s.run.steps)
    vae_module.check(s.vae)
    size, unit = s.reconstruction.image_size, vae_module.factor(s.vae)
    if size < unit or size % unit:
        raise ValueError(f"reconstruction.image_size is {size}: it must be a multiple of {unit}")
    if uses_moments(s.data):
        raise ValueError("data.source is 'moments': an autoencoder is trained on images")


SYSTEMS = {
    "sd_jax": System(Settings, check, "sd_jax.train"),
    "sd_jax.vae": System(AutoencoderSettings, check_autoencoder, "sd_jax.train_vae"),
}
