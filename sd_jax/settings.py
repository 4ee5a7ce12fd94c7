"""The settings of Stable Diffusion configs, with types, ranges and checks."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from jaxtyping import Array, Float

from diffusion_jax import systems
from diffusion_jax.config import picture_fields, ranges, settings, shapes
from diffusion_jax.config.groups import group
from diffusion_jax.config.settings import MOMENTS, Data
from diffusion_jax.diffusion import editing, groups, objective, precond, samplers
from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.diffusion import noise as noise_module
from diffusion_jax.diffusion.noise import NoiseName
from diffusion_jax.diffusion.precond import DistanceName, PrecondName
from diffusion_jax.systems import SystemEntry
from diffusion_jax.text import registry
from diffusion_jax.train import optimizer as optimizer_module
from sd_jax import unet as unet_module
from sd_jax import vae as vae_module
from sd_jax.unet import INPAINTING, PIX2PIX, UNet
from sd_jax.vae import VAE

PIXELS = ("symmetric", "unit")
DROP_TO = ("empty", "zeros")
_Level = Annotated[float, ranges.Interval("[0, 2097152]")]


class Latents(NamedTuple):
    """The latents that the UNet learns to draw. Read by sd_jax/task.py and sd_jax/sampling.py."""

    image_size: ranges.Side
    """Side of the square training images in pixels."""
    scale: ranges.Positive = vae_module.SCALE
    """The factor that scales samples of the VAE to a standard deviation of 1. It is 1 / latent_std,
    where latent_std is a metric of `python -m sd_jax.train_vae`."""
    pixels: Annotated[str, PIXELS] = "symmetric"
    """Range of the pixels that the VAE encodes: "symmetric" for [-1, 1], as in the VAE's training,
    or "unit" for [0, 1], as in MLPerf's published moments."""
    shift: Annotated[float, ranges.Interval("(-inf, inf)")] = 0.0
    """The number that is subtracted from samples of the VAE before they are scaled: diffusers'
    shift_factor, 0.0609 for SD 3 and 0.1159 for FLUX.1."""

    def to_unet(self, z: Float[Array, "... Z"]) -> Float[Array, "... Z"]:
        """Map samples of the VAE to the latents that the UNet sees, which are standardized."""
        return (z - self.shift) * self.scale

    def to_vae(self, x: Float[Array, "... Z"]) -> Float[Array, "... Z"]:
        """Map the UNet's latents to those that the VAE decodes, the inverse of `to_unet`."""
        return x / self.scale + self.shift


class Conditioning(NamedTuple):
    """How texts are dropped and padded. Read by sd_jax/task.py and sd_jax/sampling.py."""

    drop_to: Annotated[str, DROP_TO] = "empty"
    """What replaces a dropped text in training: the embeddings of the empty text ("empty"), from
    which guidance leads away by default, or zeros ("zeros"), as in NeMo."""
    pad_to: ranges.WholeNumber = 0
    """Number of tokens to which the text embeddings are padded with zeros (NeMo pads CLIP's 77
    tokens to 80); 0 for no padding."""


@group
class Diffusion(groups.Diffusion):
    """The training objective: what the UNet predicts, the noise levels, and the loss.

    Read by diffusion_jax/diffusion/objective.py.
    """

    predicts: PrecondName = "eps"
    noise: NoiseName = "scaled_linear"


@group
class Sampler(groups.Sampler):
    """How images are drawn.

    Read by sd_jax/sampling.py, diffusion_jax/diffusion/samplers.py,
    diffusion_jax/diffusion/grids.py and diffusion_jax/diffusion/guidance.py.
    """

    name: samplers.SamplerName = "plms"
    steps: Annotated[int, ranges.Interval("[1, 1000]")] = 50
    sigma_min: _Level = 0.0
    """The smallest noise level above 0 of the grids "karras" and "exponential"; 0 for the smallest
    level of the training noise. Other grids ignore it."""
    sigma_max: _Level = 0.0
    """The noise level at which the grids "karras" and "exponential" start; 0 for the largest level
    of the training noise. It also limits the levels of the grids "leading", "trailing" and
    "linspace"."""
    unit_start: bool = True
    """Whether the UNet's first input is noise of standard deviation 1, as in LDM (True), or the
    slightly weaker noise of the first noise level (False)."""
    prompt_weights: bool = False
    """Whether prompts are read as in the web UI of AUTOMATIC1111: (word:1.3) weights a word,
    [word] weakens it, BREAK starts a new chunk, and long texts take several chunks of 75 tokens.
    Only with CLIP."""


class Pipeline(NamedTuple):
    """All settings that drawing needs, for a run or for a model that was trained elsewhere."""

    unet: UNet
    vae: VAE
    conditioning: Conditioning
    latents: Latents
    diffusion: Diffusion
    sampler: Sampler
    strength: float = 1.0
    """Share of the sampling steps that image-to-image takes; 1 starts from pure noise."""
    fields: tuple[str, ...] = ()
    """The config's data.fields: the numbers that the UNet sees besides the text."""

    @property
    def sees(self) -> str:
        """What the UNet sees besides the noisy latents (unet.sees)."""
        return unet_module.sees(self.unet.in_channels, self.vae.latent_channels)

    @property
    def output_shape(self) -> tuple[int, int]:
        """Height and width of the drawn images in pixels."""
        size = self.latents.image_size
        return self.sampler.height or size, self.sampler.width or size

    @property
    def steps_taken(self) -> int:
        """Number of sampling steps that image-to-image takes."""
        return editing.steps_taken(self.strength, self.sampler.steps)


class Settings(NamedTuple):
    """Checked settings of a training config.

    Weights are given by the path of a workdir, a checkpoint file or a diffusers directory.
    """

    run: settings.Run
    unet: UNet
    unet_weights: str
    """The weights that training starts from, or that LoRA adapts: a workdir, a file or a diffusers
    directory; "" for random weights."""
    vae: VAE
    vae_weights: str
    """The weights of the frozen VAE: a workdir, a file or a diffusers directory. Only training on
    moments works without them."""
    text: settings.Text
    conditioning: Conditioning
    latents: Latents
    diffusion: Diffusion
    sampler: Sampler
    optimizer: settings.Optimizer
    mesh: settings.MeshShape
    evaluation: settings.Evaluation
    heldout: settings.Heldout
    log: settings.Log
    data: Data
    lora: settings.Lora

    @property
    def pipeline(self) -> Pipeline:
        """The subset of the settings that drawing needs."""
        groups = self.conditioning, self.latents, self.diffusion, self.sampler
        return Pipeline(self.unet, self.vae, *groups, fields=self.data.fields)

    @property
    def crop_sides(self) -> tuple[int, int]:
        """Side of square training images, and the number that must divide all sides, in pixels."""
        return self.latents.image_size, size_unit(self.pipeline)

    @property
    def output_size(self) -> int:
        """Side in pixels of the images that evaluation scores.

        Raises ValueError if the images are not square.
        """
        height, width = self.pipeline.output_shape
        if height != width:
            raise ValueError(f"sampler.height {height} and sampler.width {width} must be equal for an evaluation")
        return height


class Reconstruction(NamedTuple):
    """Settings of an autoencoder's loss: image distance plus `kl` times KL(posterior || N(0, 1)).

    Both terms are divided by the number of values in an image, so the weight `kl` has the same
    effect as LDM's kl_weight. Read by sd_jax/train_vae.py.
    """

    image_size: ranges.Side
    """Side of the square training images in pixels."""
    distance: DistanceName = "l1"
    """How a reconstruction is compared with its image: absolute ("l1") or squared ("l2") error, or
    a mix of both ("huber")."""
    kl: ranges.Share = 1e-2
    """The weight of the KL divergence, which keeps the latents close to N(0, 1)."""


class AutoencoderSettings(NamedTuple):
    """Checked settings of a config of sd_jax.train_vae."""

    run: settings.Run
    vae: VAE
    vae_weights: str
    """The VAE's initial weights: a workdir, a file or a diffusers directory; "" for random ones."""
    reconstruction: Reconstruction
    optimizer: settings.Optimizer
    mesh: settings.MeshShape
    log: settings.Log
    data: Data

    @property
    def crop_sides(self) -> tuple[int, int]:
        """Side of square training images, and the number that must divide all sides, in pixels."""
        return self.reconstruction.image_size, vae_module.factor(self.vae)


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Return the checked settings of a training config. Raises ValueError for invalid values."""
    return systems.read(config, "sd_jax")


def uses_moments(data: Data) -> bool:
    """Return whether training reads VAE moments instead of images.

    Raises ValueError if data.mixture has sources of both kinds.
    """
    kinds = [part[1] for part in data.mixture] if data.source == "mixture" else [data.source]
    if len({kind == MOMENTS for kind in kinds}) > 1:
        raise ValueError(f"data.mixture has the sources {', '.join(kinds)}: use only moments, or only images")
    return kinds[0] == MOMENTS


def check(s: Settings) -> None:
    """Raise ValueError if the settings of a training config contradict each other."""
    optimizer_module.check(s.optimizer, s.run.steps)
    registry.check(s.text)
    settings.check_prompts(s.run, s.data)
    settings.check_tags(s.data, s.text)
    maskless = "" if s.diffusion.training.takes_mask else s.diffusion.method
    settings.check_loss_mask(s.data, maskless)
    unet_module.check(s.unet)
    vae_module.check(s.vae)
    if s.pipeline.sees == PIX2PIX:
        raise ValueError(
            f"unet.in_channels is {s.unet.in_channels}, as in InstructPix2Pix, which cannot be "
            f"trained: set it to {s.unet.out_channels}, or {2 * s.unet.out_channels + 1} to inpaint"
        )
    check_size(s.pipeline, "latents.image_size", s.latents.image_size)
    check_pipeline(s.pipeline)
    _check_text(s)
    _check_data(s)
    shapes.check(s.data.aspect_buckets, *s.crop_sides, resize=s.data.resize)


_OTHER_UNETS = {7: "an upscaler (latents and the small picture)", 5: "a depth model (latents and a depth map)"}


def check_pipeline(p: Pipeline) -> None:
    """Raise ValueError if a model cannot draw with these settings."""
    for name in ("conditioning", "latents", "diffusion", "sampler"):  # Flags may have changed them.
        group = getattr(p, name)
        ranges.check(type(group), group._asdict(), name)
    picture_fields.values(picture_fields.read(p.fields), p.sampler.fields)
    noise, prediction, *_ = objective.bound(p.diffusion)
    guidance_module.check(p.sampler, sees_picture=p.sees == PIX2PIX)
    samplers.check_method(p.diffusion, p.sampler)
    limited = p.sampler.grid and p.sampler.sigma_max
    if (noise.func, prediction.func) == (noise_module.cosine, precond.epsilon) and not limited:
        raise ValueError(
            "diffusion.noise is 'cosine', so sampling starts at noise level 2e7, where x has no "
            "signal and the prediction 'eps' of diffusion.predicts is undefined: set "
            "diffusion.predicts to v, or sampler.grid to karras and sampler.sigma_max to 80"
        )
    check_size(p, "sampler.height", p.output_shape[0])
    check_size(p, "sampler.width", p.output_shape[1])
    if not 0 < p.strength <= 1:
        raise ValueError(f"strength is {p.strength}: it must be above 0 and at most 1")
    if p.steps_taken < 1:
        raise ValueError(
            f"strength is {p.strength}, which takes {p.steps_taken} of {p.sampler.steps} sampling "
            "steps, but at least one is needed: increase strength or sampler.steps"
        )
    channels = (p.vae.latent_channels, p.unet.in_channels, p.unet.out_channels)
    if len(set(channels[::2] if p.sees else channels)) > 1:
        if family := _OTHER_UNETS.get(p.unet.in_channels):
            raise ValueError(
                f"the UNet reads {p.unet.in_channels} channels, as {family} does: choose a model "
                "that draws from texts alone, whose UNet reads only the latents"
            )
        raise ValueError(
            f"vae.latent_channels, unet.in_channels and unet.out_channels are {channels}: set them to the same number"
        )


def size_unit(p: Pipeline) -> int:
    """Return the number of pixels that must divide the height and width of images."""
    return vae_module.factor(p.vae) * 2 ** (len(p.unet.channel_mult) - 1)


def check_size(p: Pipeline, field: str, size: int) -> None:
    """Raise ValueError if images with a side of `size` pixels do not fit the VAE and the UNet.

    The size must be a multiple of f * 2^n, where f is the VAE's downsampling factor and n is the
    number of downsampling layers of the UNet. `field` names the size in the message.
    """
    factor, unit = vae_module.factor(p.vae), size_unit(p)
    if size < unit or size % unit:
        raise ValueError(
            f"{field} is {size}: it must be a multiple of {unit}, because latents are {factor} "
            f"times smaller, and the UNet halves them {len(p.unet.channel_mult) - 1} times"
        )


def _check_text(s: Settings) -> None:
    if s.text.learned_tokens:
        name, given = f"text.learned_tokens is {s.text.learned_tokens!r}", s.unet_weights
        if s.text.store or not given or s.lora.rank:
            raise ValueError(
                f"{name}, which trains only the vectors of this word: leave text.store empty, set "
                "lora.rank=0, and name the model in unet.weights"
            )
    if s.data.source in ("folder", "webdataset", "moments") and s.data.embedded:
        raise ValueError(
            f"data.text is {s.data.text!r}, but Stable Diffusion reads captions from the data: set "
            "data.text=txt, and for stored text embeddings use text.store"
        )
    if s.conditioning.pad_to and s.conditioning.pad_to < s.text.max_tokens:
        raise ValueError(
            f"conditioning.pad_to is {s.conditioning.pad_to}: it must be 0, or at least "
            f"text.max_tokens {s.text.max_tokens}"
        )


def _check_data(s: Settings) -> None:
    draws = s.run.sample_every or s.evaluation.every
    if uses_moments(s.data) and s.pipeline.sees == INPAINTING:
        raise ValueError(
            "data.source is 'moments', but an inpainting model (unet.in_channels "
            f"{s.unet.in_channels}) also encodes masked pictures: name a source of images"
        )
    if not uses_moments(s.data):
        if not s.vae_weights:
            raise ValueError(
                "vae.weights is empty: name a diffusers directory, a checkpoint, or a workdir of "
                "python -m sd_jax.train_vae; only training on moments (data.source='moments') "
                "works without a VAE"
            )
    elif s.data.aspect_buckets and s.data.heldout:
        raise ValueError(
            f"data.heldout is {s.data.heldout}, but the held-out loss needs square images, and the "
            "moments of data.aspect_buckets are not square: set data.heldout to 0"
        )
    elif draws and not s.vae_weights:
        raise ValueError(
            "vae.weights is empty, but drawing during training needs the VAE: name its weights, or "
            "set sample_every=0 and evaluation.every=0"
        )


def check_autoencoder(s: AutoencoderSettings) -> None:
    """Raise ValueError if the settings of an autoencoder config contradict each other."""
    optimizer_module.check(s.optimizer, s.run.steps)
    vae_module.check(s.vae)
    size, unit = s.crop_sides
    if size < unit or size % unit:
        raise ValueError(f"reconstruction.image_size is {size}: it must be a multiple of {unit}")
    shapes.check(s.data.aspect_buckets, size, unit, resize=s.data.resize)
    if uses_moments(s.data):
        raise ValueError("data.source is 'moments': name a source of images, such as 'folder'")
    if s.data.loss_mask:
        raise ValueError(
            f"data.loss_mask is {s.data.loss_mask!r}, but the loss of an autoencoder has no mask: set it to ''"
        )


SYSTEMS = {
    "sd_jax": SystemEntry(Settings, check, "sd_jax.train"),
    "sd_jax.vae": SystemEntry(AutoencoderSettings, check_autoencoder, "sd_jax.train_vae"),
}
