"""The config of a Stable Diffusion model: typed and checked."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from diffusion_jax import systems
from diffusion_jax.config import named, ranges
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
from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.diffusion import samplers
from diffusion_jax.diffusion.grids import ENDS, GRIDS
from diffusion_jax.diffusion.noise import NOISES
from diffusion_jax.diffusion.objective import WEIGHTINGS
from diffusion_jax.diffusion.precond import DISTANCES, PRECONDS
from diffusion_jax.systems import System
from sd_jax import unet as unet_module
from sd_jax import vae as vae_module
from sd_jax.unet import UNet
from sd_jax.vae import VAE

PIXELS = ("symmetric", "unit")
DROP_TO = ("empty", "zeros")
_Level = Annotated[float, "[0, 2097152]"]


class Latents(NamedTuple):
    """The latents that are noised: `scale` times a sample of the VAE's posterior of square images.

    `pixels` is the range in which the VAE sees images: "symmetric", -1 to 1, as it was trained, or
    "unit", 0 to 1, which MLPerf's published moments are of.
    """

    image_size: ranges.Count
    scale: ranges.Positive = vae_module.SCALE
    pixels: Annotated[str, PIXELS] = "symmetric"


class Conditioning(NamedTuple):
    """The UNet's text context.

    Dropped texts become those of "" where `drop_to` is "empty", as in sampling, or vectors of 0
    where it is "zeros", as in NeMo. `pad_to` tokens, the further ones 0 (NeMo has 80 for CLIP's
    77); 0 adds none.
    """

    drop_to: Annotated[str, DROP_TO] = "empty"
    pad_to: ranges.Amount = 0


class Diffusion(NamedTuple):
    """The objective: the UNet predicts "eps" or "v" over a table of a thousand steps, or others.

    `noise` is LDM's table, "scaled_linear", or another of noise.NOISES; of "zero_terminal_snr" eps
    cannot be learned. `offset_noise` times a draw for each image and channel joins the noise (0:
    none); `min_snr` bounds the weight of steps with little noise (Hang et al. 2023: 5; 0: all weigh
    the same), or `weight` names another of objective.WEIGHTINGS.
    """

    predicts: Annotated[str, named.checked(PRECONDS)] = "eps"
    offset_noise: ranges.Share = 0.0
    min_snr: ranges.Scale = 0.0
    noise: Annotated[str, named.checked(NOISES)] = "scaled_linear"
    distance: Annotated[str, DISTANCES] = "l2"
    weight: Annotated[str, named.checked(WEIGHTINGS)] = "min_snr"


class Sampler(NamedTuple):
    """How images are drawn, `height` x `width` pixels large, 0 for those of training.

    `eta` is DDIM's share of new noise, `churn` Heun's, from 0.
    """

    name: Annotated[str, samplers.bound] = "plms"
    steps: Annotated[int, "[1, 1000]"] = 50
    eta: ranges.Share = 0.0
    guidance: ranges.Scale = 7.5
    negative_prompt: str = ""
    height: ranges.Amount = 0
    width: ranges.Amount = 0
    churn: ranges.Scale = 0.0
    grid: Annotated[str, GRIDS] = ""
    """The noise levels of the steps, a key of grids.GRIDS; "" takes that of the sampler."""
    end: Annotated[str, ENDS] = ""
    """Where they end: at "zero" or at "sigma_min", the level of time 0."""
    offset: Annotated[int, "[0, 1000]"] = 1
    """The first of the leading times."""
    sigma_min: _Level = 0.0
    """Ends of the grids by levels, 0 for those of the table; none of another is above sigma_max."""
    sigma_max: _Level = 0.0
    rho: ranges.Positive = 7.0
    unit_start: bool = True
    """A latent starts as N(0, 1), whatever is left of an image there, not as sigma * eps."""
    guiding: Annotated[str, guidance_module.bound] = "cfg"
    """How guidance acts: names in guidance.GUIDANCE, joined by +, such as apg(norm=5)+rescale."""
    guidance_low: Annotated[float, "[0, inf)"] = 0.0
    """Guidance acts on noise levels from low to high."""
    guidance_high: Annotated[float, "(0, inf]"] = float("inf")


class Pipeline(NamedTuple):
    """The settings that drawing needs, of a model trained here or elsewhere.

    `strength` is the share of the steps that image-to-image takes: 1 keeps least of the picture.
    """

    unet: UNet
    vae: VAE
    conditioning: Conditioning
    latents: Latents
    diffusion: Diffusion
    sampler: Sampler
    strength: float = 1.0

    @property
    def output_shape(self) -> tuple[int, int]:
        """Height and width of what is drawn."""
        size = self.latents.image_size
        return self.sampler.height or size, self.sampler.width or size

    @property
    def steps_taken(self) -> int:
        """The number of sampler.steps that image-to-image takes."""
        return round(self.strength * self.sampler.steps)


class Settings(NamedTuple):
    """A whole config, checked.

    `unet_weights` is what training starts from, or what a LoRA adapts, "" for random numbers;
    `vae_weights` the frozen VAE. Both are the workdir of a run, a file or a diffusers directory.
    """

    run: Run
    unet: UNet
    unet_weights: str
    vae: VAE
    vae_weights: str
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
        """The settings that drawing needs."""
        groups = self.conditioning, self.latents, self.diffusion, self.sampler
        return Pipeline(self.unet, self.vae, *groups)

    @property
    def output_size(self) -> int:
        """The side of the square that is drawn; ValueError if it is none."""
        height, width = self.pipeline.output_shape
        if height != width:
            raise ValueError(
                f"sampler.height is {height} and sampler.width {width}: only squares are scored"
            )
        return height


class Reconstruction(NamedTuple):
    """Distance of images and reconstructions, summed, plus `kl` times KL(posterior || N(0, 1)).

    Both sums are divided by the number of pixels' values, so that `kl` is LDM's kl_weight.
    """

    image_size: ranges.Count
    distance: Annotated[str, DISTANCES] = "l1"
    kl: ranges.Share = 1e-2


class AutoencoderSettings(NamedTuple):
    """A whole config of sd_jax.train_vae, checked.

    `vae_weights` is what training starts from, "" for random numbers.
    """

    run: Run
    vae: VAE
    vae_weights: str
    reconstruction: Reconstruction
    optimizer: Optimizer
    mesh: MeshShape
    data: Data


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Checks a config, all of it, in milliseconds; ValueError that says what to change."""
    return systems.read(config, "sd_jax")


def uses_moments(data: Data) -> bool:
    """Whether the data are moments; ValueError for a mixture of moments and images."""
    kinds = [part[1] for part in data.mixture] if data.source == "mixture" else [data.source]
    if len({kind == MOMENTS for kind in kinds}) > 1:
        raise ValueError(
            f"data.mixture has the sources {', '.join(kinds)}: moments and images do not mix"
        )
    return kinds[0] == MOMENTS


def check(s: Settings) -> None:
    """ValueError for values that cannot be or do not go together."""
    unet_module.check(s.unet)
    vae_module.check(s.vae)
    check_size(s.pipeline, "latents.image_size", s.latents.image_size)
    check_pipeline(s.pipeline)
    _check_text(s)
    _check_data(s)


def check_pipeline(p: Pipeline) -> None:
    """ValueError for values that nothing can be drawn with."""
    for name in ("conditioning", "latents", "diffusion", "sampler"):  # Not all were in a config.
        group = getattr(p, name)
        ranges.check(type(group), group._asdict(), name)
    if p.diffusion.noise == "zero_terminal_snr" and p.diffusion.predicts == "eps":
        raise ValueError(
            "diffusion.noise is 'zero_terminal_snr' and diffusion.predicts 'eps': no image can be "
            "told from its noise where there is nothing else, so set diffusion.predicts='v'"
        )
    guidance_module.check(p.sampler)
    check_size(p, "sampler.height", p.output_shape[0])
    check_size(p, "sampler.width", p.output_shape[1])
    if not 0 < p.strength <= 1 or p.steps_taken < 1:
        raise ValueError(
            f"strength {p.strength} of {p.sampler.steps} steps are {p.steps_taken} steps: it is a "
            "share from 0 to 1 that must give one or more"
        )
    channels = (p.vae.latent_channels, p.unet.in_channels, p.unet.out_channels)
    if len(set(channels)) > 1:
        raise ValueError(
            f"vae.latent_channels, unet.in_channels and unet.out_channels are {channels}: they "
            "must be the same"
        )


def check_size(p: Pipeline, field: str, size: int) -> None:
    """ValueError unless images of `size` pixels have latents that the UNet can halve."""
    factor, halvings = vae_module.factor(p.vae), len(p.unet.channel_mult) - 1
    unit = factor * 2**halvings
    if size < unit or size % unit:
        raise ValueError(
            f"{field} is {size}: latents are images {factor} times smaller, which the UNet halves "
            f"{halvings} times, so take multiples of {unit}"
        )


def _check_text(s: Settings) -> None:
    if s.data.source in ("folder", "webdataset", "moments") and s.data.embedded:
        raise ValueError(f"data.text is {s.data.text!r}: captions are read, so set it to txt")
    if s.conditioning.pad_to and s.conditioning.pad_to < s.text.max_tokens:
        raise ValueError(
            f"conditioning.pad_to is {s.conditioning.pad_to} and texts have "
            f"{s.text.max_tokens} tokens: take 0, or more than these"
        )


def _check_data(s: Settings) -> None:
    draws = s.run.sample_every or s.evaluation.every
    if not uses_moments(s.data):
        if not s.vae_weights:
            raise ValueError(
                "vae.weights is empty: say where the VAE is, such as a diffusers directory, a "
                "checkpoint, or the workdir of python -m sd_jax.train_vae; only training on "
                "moments (data.source='moments') does without"
            )
    elif s.data.flip or s.data.crop != "center" or s.data.resize:
        raise ValueError(
            "data.flip, data.crop or data.resize is set, and moments are of whole images: set "
            "data.flip=False, data.crop=center and data.resize=0 (data.resize may be set when the "
            "moments are made)"
        )
    elif draws and not s.vae_weights:
        raise ValueError(
            "vae.weights is empty: say where the VAE is, or draw nothing on the way with "
            "sample_every=0 and evaluation.every=0"
        )


def check_autoencoder(s: AutoencoderSettings) -> None:
    """ValueError for values that cannot be or do not go together."""
    vae_module.check(s.vae)
    size, unit = s.reconstruction.image_size, vae_module.factor(s.vae)
    if size < unit or size % unit:
        raise ValueError(f"reconstruction.image_size is {size}: take a multiple of {unit}")
    if uses_moments(s.data):
        raise ValueError("data.source is 'moments': an autoencoder is trained on images")


SYSTEMS = {
    "sd_jax": System(Settings, check, "sd_jax.train", "sd_jax.task:example"),
    "sd_jax.vae": System(AutoencoderSettings, check_autoencoder, "sd_jax.train_vae"),
}
