"""The config groups `diffusion` and `sampler`, which each system extends by fields of its own."""

import functools
from typing import Annotated

from diffusion_jax.config import ranges
from diffusion_jax.config.groups import Group, group
from diffusion_jax.config.named import Table
from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.diffusion import meanflow, samplers
from diffusion_jax.diffusion import objective as objective_module
from diffusion_jax.diffusion.grids import EndName, GridName
from diffusion_jax.diffusion.guidance import GuidingName
from diffusion_jax.diffusion.noise import NoiseName
from diffusion_jax.diffusion.objective import Denoise, WeightName
from diffusion_jax.diffusion.precond import DistanceName, PrecondName

METHODS = Table(denoise=Denoise, meanflow=meanflow.MeanFlow)
"""The classes that diffusion.method can name in configs. They are subclasses of Denoise."""


@group
class Diffusion(Group):
    """The training objective: what the network predicts, the noise levels, and the loss."""

    predicts: PrecondName = "edm"
    """What the network predicts: the noise ("eps"), the image ("x0"), a mixture of both ("v", or
    "flow" for rectified flow), or EDM's target ("edm"). The loss is the error of the prediction."""
    offset_noise: ranges.Share = 0.0
    """The strength of offset noise: one random number per image and channel, added to the noise of
    the whole channel. It helps a model to draw very dark and very bright images; 0 for none."""
    noise: NoiseName = "lognormal"
    """The distribution of noise levels in training: "lognormal" (EDM), "logit_normal" or
    "uniform_flow" (rectified flow), "cosine" or "linear" (continuous DDPM), Stable Diffusion's
    table of 1000 levels ("scaled_linear"), or this table with pure noise as its last level
    ("zero_terminal_snr"). "eps" cannot be predicted with "zero_terminal_snr" or rectified flow."""
    distance: DistanceName = "l2"
    """How a prediction is compared with its target: squared ("l2") or absolute ("l1") error, or a
    mix of both ("huber")."""
    weight: WeightName = "none"
    """The weight of each noise level in the loss: "none", "min_snr(5)" (Hang et al. 2023, with
    their limit 5 on the signal-to-noise ratio), "p2" (Choi et al. 2022), "edm" (Karras et al.
    2022), "flow" (the loss of a network that predicts the flow), or "uncertainty" (learned during
    training, as in EDM2)."""
    method: Annotated[str, METHODS] = "denoise"
    """What the network learns: to denoise ("denoise"), or to predict the mean velocity between two
    noise levels, so that one step can draw an image ("meanflow"). "meanflow(omega=2)" also learns
    guidance scale 2 (see diffusion_jax/diffusion/meanflow.py)."""

    objective = functools.cached_property(objective_module.make)

    @functools.cached_property
    def training(self) -> Denoise:
        """The training method that `method` names."""
        return METHODS.bound("diffusion.method", self.method)()


@group
class Sampler(Group):
    """How images are drawn."""

    name: samplers.SamplerName = "heun"
    """The method that steps from noise to an image. Its parameters may follow in brackets, such as
    restart(low=0.5)."""
    steps: ranges.Count = 30
    """Number of steps from noise to an image. More steps take longer and follow the model more
    closely."""
    eta: ranges.Share = 0.0
    """The share of new noise per step of the sampler "ddim"; 1 for DDPM's ancestral sampling.
    Other samplers ignore it."""
    guidance: ranges.Scale = 7.5
    """The guidance scale: how strongly the picture follows the prompt. 1 for no guidance; large
    values give plainer, more saturated pictures."""
    negative_prompt: str = ""
    """A text that the picture should not show. Guidance leads away from it; "" leads away from the
    prediction without a text."""
    height: ranges.WholeNumber = 0
    """The height of the images in pixels; 0 for the training size."""
    width: ranges.WholeNumber = 0
    """The width of the images in pixels; 0 for the training size."""
    churn: ranges.Scale = 0.0
    """The amount of new noise per step of the sampler "heun" (S_churn of Karras et al. 2022).
    Other samplers ignore it."""
    grid: GridName = ""
    """How the steps are spaced, by time ("ldm", "even", "leading", "trailing", "linspace") or by
    noise level ("karras", "exponential"); "" for a default that depends on noise and sampler."""
    end: EndName = ""
    """Where the last step ends: without noise ("zero"), or at the smallest noise level
    ("sigma_min"); "" for a default that depends on noise and sampler."""
    offset: Annotated[int, ranges.Interval("[0, 1000]")] = 1
    """The number of timesteps that the grid "leading" adds to all of its times, if diffusion.noise
    is a table of levels. Other grids ignore it."""
    sigma_min: ranges.Positive = 0.002
    """The smallest noise level above 0 of the grids "karras" and "exponential". Other grids ignore
    it."""
    sigma_max: ranges.Positive = 80.0
    """The noise level at which the grids "karras" and "exponential" start. It also limits the
    levels of the grids "leading", "trailing" and "linspace" on tables of noise levels."""
    rho: ranges.Positive = 7.0
    """The exponent rho of the grid "karras" (Karras et al. 2022, equation 5). With larger values,
    more of the steps are at small noise levels. Other grids ignore it."""
    guiding: GuidingName = "cfg"
    """The kinds of guidance, joined by +, such as apg(norm=5)+rescale. "cfg" is plain
    classifier-free guidance."""
    guidance_low: ranges.LowLevel = 0.0
    """The smallest noise level at which guidance acts."""
    guidance_high: ranges.HighLevel = float("inf")
    """The largest noise level at which guidance acts; inf for no limit."""
    fields: str = ""
    """The numbers of data.fields with which pictures are drawn, such as aesthetic=7,year=1950.
    Fields that are not named are unknown."""

    method = functools.cached_property(samplers.make)
    guides = functools.cached_property(guidance_module.bound)
