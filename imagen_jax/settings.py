"""The config of an Imagen model, base or super-resolution: typed and checked."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diffusion_jax import checks, settings
from diffusion_jax.diffusion.guidance import THRESHOLDS
from diffusion_jax.diffusion.noise import NOISES
from diffusion_jax.diffusion.precond import DISTANCES, PRECONDS
from diffusion_jax.diffusion.samplers import SAMPLERS
from diffusion_jax.settings import Data, Evaluation, MeshShape, Optimizer, Run, Text
from imagen_jax import efficient_unet
from imagen_jax import unet as unet_module
from imagen_jax.efficient_unet import EfficientUNet
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


# The network, and the check of its fields next to the width of the text.
UNETS: Mapping[str, tuple[type, Callable[[Any, int], None]]] = {
    "unet": (UNet, lambda unet, text_width: unet_module.check(unet)),
    "efficient": (EfficientUNet, efficient_unet.check),
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


def check(s: Settings) -> None:
    """ValueError for values that cannot be or do not go together."""
    checks.check_run(s.run, s.optimizer, s.data)
    checks.check_text(s.text)
    choices = [
        ("diffusion.precond", s.diffusion.precond, PRECONDS),
        ("diffusion.noise", s.diffusion.noise, NOISES),
        ("diffusion.distance", s.diffusion.distance, DISTANCES),
        ("sampler.name", s.sampler.name, SAMPLERS),
        ("sampler.threshold", s.sampler.threshold, THRESHOLDS),
    ]
    for field, value, known in choices:
        settings.one_of(field, value, known)
    settings.positive(
        sampler__steps=s.sampler.steps, super_resolution__aug_sigma=s.super_resolution.aug_sigma,
        diffusion__sigma_data=s.diffusion.sigma_data, diffusion__p_std=s.diffusion.p_std,
        sampler__sigma_min=s.sampler.sigma_min, sampler__rho=s.sampler.rho,
    )  # fmt: skip
    settings.within(0, 1, sampler__eta=s.sampler.eta)
    settings.within(0, 1000, sampler__guidance=s.sampler.guidance, sampler__churn=s.sampler.churn)
    if not s.sampler.sigma_max > s.sampler.sigma_min:
        raise ValueError(
            f"sampler.sigma_max is {s.sampler.sigma_max}: it must be above sampler.sigma_min, "
            f"{s.sampler.sigma_min}"
        )
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
    checks.check_prompts(s.run, s.text)
    embedded = s.text.encoder == checks.EMBEDDED
    if s.data.source in ("folder", "webdataset") and embedded == s.data.text.endswith("txt"):
        way_out = "the suffix of embeddings, such as npy" if embedded else "txt"
        raise ValueError(
            f"data.text is {s.data.text!r} and text.encoder is {s.text.encoder!r}, which cannot "
            f"read it: set data.text to {way_out}, or choose another encoder"
        )


def _read_unet(group: Mapping[str, Any], text_width: int) -> UNet | EfficientUNet:
    if "kind" not in group:
        raise ValueError(f"the config lacks unet.kind: choose from {', '.join(UNETS)}")
    settings.one_of("unet.kind", group["kind"], UNETS)
    network, check = UNETS[group["kind"]]
    fields = {name: value for name, value in group.items() if name != "kind"}
    unet = settings.read_network(network, fields, "unet")
    check(unet, text_width)
    return unet
