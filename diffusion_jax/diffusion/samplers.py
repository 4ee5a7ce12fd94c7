"""The table SAMPLERS, and functions that build the sampler and the grid of a config.

onestep.py, multistep.py and stochastic.py implement the samplers. onestep.py describes the
arguments that all samplers take.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from diffusion_jax.config import named
from diffusion_jax.config.named import Table
from diffusion_jax.diffusion import grids, multistep, onestep, stochastic
from diffusion_jax.diffusion.grids import Grid, GridOptions
from diffusion_jax.diffusion.noise import Noise, Scalar, Sigmas
from diffusion_jax.diffusion.onestep import Draws, SamplerFunction
from diffusion_jax.diffusion.precond import Denoiser, Images

if TYPE_CHECKING:
    from diffusion_jax.diffusion.groups import Diffusion, Sampler


class Method(NamedTuple):
    """An entry of SAMPLERS: a sampler and its default grid."""

    sampler: Any
    """The function, or "MODULE:FUNCTION". Configs can set its keyword-only parameters."""
    grid: str = "even"
    """The default grid on discrete schedules, a key of GRIDS."""
    end: str = "zero"
    """The default end of the grid on continuous schedules, "zero" or "sigma_min"."""
    grid_options: GridOptions = GridOptions()
    """The options of the grid that depend on the sampler."""


class _Methods(Table):
    def __setitem__(self, name: str, method: Method | SamplerFunction) -> None:
        """Add a sampler. A function alone gets the defaults of `Method`."""
        super().__setitem__(name, method if isinstance(method, Method) else Method(method))

    def function(self, name: str) -> SamplerFunction:
        return named.resolved(self[name].sampler)

    def question(self, text: str) -> str:
        """Suggest the sampler, and the grid, of a name of the web UI of AUTOMATIC1111."""
        name, setting = text.strip().removeprefix("k_").removeprefix("sample_"), ""
        for suffix, of_suffix in _SUFFIXES.items():
            if name.lower().endswith(f" {suffix.lower()}"):
                name, setting = name[: -len(suffix) - 1], of_suffix
        if name.lower() in _ABSENT:
            return f"no sampler here equals the web UI's {name}."
        names = {of_web.lower(): ours for ours, of_web in WEB_NAMES.items()}
        question = super().question(names.get(name.lower(), name))
        return question.replace("?", f" with sampler.{setting}?") if setting else question


_UNROUNDED, _WITH_END = GridOptions(rounded=False), GridOptions(includes_end=True)
_MIDDLES = GridOptions(rounded=False, middles=True)
SAMPLERS = _Methods(
    heun=Method(onestep.heun, grid_options=_UNROUNDED),
    euler=Method(onestep.euler, grid_options=_UNROUNDED),
    euler_ancestral=Method(onestep.euler_ancestral, grid_options=_UNROUNDED),
    dpm2=Method(onestep.dpm2, grid_options=_MIDDLES),
    dpm2_ancestral=Method(onestep.dpm2_ancestral, grid_options=_MIDDLES),
    ddim=Method(onestep.ddim, grid="ldm"),
    ddpm=Method(onestep.ddpm, grid="ldm", end="sigma_min"),
    plms=Method(multistep.plms, grid="ldm"),
    plms_v=Method(multistep.plms_v, grid="ldm"),
    lms=Method(multistep.lms, grid_options=_UNROUNDED),
    dpmpp_2m=Method(multistep.dpmpp_2m, grid_options=_WITH_END),
    dpmpp_2s=Method(multistep.dpmpp_2s, grid_options=_WITH_END),
    unipc=Method(multistep.unipc, grid_options=_WITH_END),
    deis=Method(multistep.deis, grid_options=_WITH_END),
    dpmpp_2m_sde=Method(stochastic.dpmpp_2m_sde, grid_options=_WITH_END),
    dpmpp_3m_sde=Method(stochastic.dpmpp_3m_sde, grid_options=_WITH_END),
    lcm=Method(onestep.lcm, grid="lcm"),
    restart=Method(stochastic.restart, grid_options=_UNROUNDED),
)
"""The values that sampler.name can have in configs of Imagen and Stable Diffusion."""
WEB_NAMES = {
    "euler": "Euler",
    "euler_ancestral": "Euler a",
    "heun": "Heun",
    "lms": "LMS",
    "dpm2": "DPM2",
    "dpm2_ancestral": "DPM2 a",
    "dpmpp_2m": "DPM++ 2M",
    "dpmpp_2m_sde": "DPM++ 2M SDE",
    "dpmpp_3m_sde": "DPM++ 3M SDE",
    "ddim": "DDIM",
    "plms": "PLMS",
    "unipc": "UniPC",
    "lcm": "LCM",
    "restart": "Restart",
}
"""The names of samplers in the web UI of AUTOMATIC1111."""
_ABSENT = ("dpm++ sde", "dpm++ 2s a", "dpm++ 2m sde heun", "dpm fast", "dpm adaptive")
_SUFFIXES = {
    "Automatic": "",
    "Karras": "grid='karras'",
    "Exponential": "grid='exponential'",
    "Polyexponential": "grid='exponential'",
    "SGM Uniform": "grid='trailing'",
    "Uniform": "grid='linspace'",
    "CFG++": "guiding='cfg_pp'",
}
"""The web UI's names of schedules, and the settings that draw with (nearly) the same levels."""


def web_schedule(grid: str) -> str:
    """Return the web UI's name of a grid, or "" if it has none."""
    return next((name for name, setting in _SUFFIXES.items() if setting == f"grid={grid!r}"), "")


SamplerName = Annotated[str, SAMPLERS]


class SamplerInputs(NamedTuple):
    """The result of Task.sampler_inputs: a sampler's arguments, and functions to finish images."""

    denoise: Denoiser
    x: Images
    sigmas: Sigmas
    noise: Draws
    finish: Callable[[Images], Images]
    """Converts the sampler's result to images."""
    wrap: Callable[[SamplerFunction], SamplerFunction] = lambda sampler: sampler
    """Adapts the sampler to image-to-image or inpainting. By default, returns it unchanged."""


InputsFunction = Callable[..., SamplerInputs]  # Takes the arguments of a Task's `sample`.


def make_sample(sampler_inputs: InputsFunction, s: "Sampler") -> Callable[..., Images]:
    """Build the function `sample` of a Task.

    The function calls the Task's `sampler_inputs`, runs the sampler that the `sampler` group `s`
    names, and converts the sampler's result to images.
    """

    def sample(*arguments: Any) -> Images:
        inputs = sampler_inputs(*arguments)
        x = inputs.wrap(s.method.sampler)(*inputs[:4])
        if (shape := getattr(x, "shape", type(x).__name__)) != inputs.x.shape:
            raise ValueError(
                f"the sampler {s.name} returns {shape}, but x has the shape {inputs.x.shape}: "
                "return an array of this shape"
            )
        return inputs.finish(x)

    return sample


def make(s: "Sampler") -> Method:
    """Return the entry of SAMPLERS that a config's `sampler` group names, with bound parameters.

    Raises ValueError if the name or a parameter is unknown.
    """
    sampler = SAMPLERS.bound("sampler.name", s.name, s)
    (call,) = named.calls("sampler.name", s.name, SAMPLERS)
    return SAMPLERS[call.name]._replace(sampler=sampler)


def check_method(d: "Diffusion", s: "Sampler") -> None:
    """Raise ValueError if the sampler does not suit the training method, such as MeanFlow.

    D of a MeanFlow model is defined so that one straight (Euler) step towards D lands on the next
    level of the grid. This suits only samplers that evaluate D once per step, add no noise and use
    no earlier step.

    Args:
        d: The config's `diffusion` group.
        s: The config's `sampler` group.
    """
    if d.training.straight and not onestep.is_straight(s.method.sampler):
        raise ValueError(
            f"sampler.name is {s.name!r}, but a model trained with diffusion.method={d.method} "
            "needs a sampler that goes straight from level to level: set sampler.name to euler, or "
            "to ddim with sampler.eta 0"
        )


def sampling_grid(noise: Noise, s: "Sampler") -> Grid:
    """Build the sampling grid of a config's `sampler` group, for a model trained on this noise.

    The group's fields `grid` and `end` name the grid and its end. For a field that is "",
    `default_grid` gives the value.

    Raises:
        ValueError: The grid is spaced in time, but the noise defines no times.
    """
    with jax.ensure_compile_time_eval():  # Grids may call numpy, also while a function is traced.
        grid, end = default_grid(noise, s.method)
        return grids.make_grid(noise, s, s.grid or grid, s.end or end, s.method.grid_options)


def default_grid(noise: Noise, method: Method) -> tuple[str, str]:
    """Return the default grid, a key of GRIDS, and its default end, one of ENDS.

    A noise without times, such as EDM's, has EDM's grid. A table of levels has the sampler's grid,
    and ends at its smallest level. Other noises have evenly spaced times, and end at 0 if the level
    at time 0 is 0, as in rectified flow.
    """
    if noise.level is None:
        return "karras", "zero"
    if noise.steps:
        return method.grid, "sigma_min"
    return "even", method.end if noise.least else "zero"


def initial_noise(keys: Key[Array, "B"], shape: tuple[int, ...], sigma: Scalar) -> Images:
    """Draw the noise sigma * eps from which a sampler starts, with one key per image.

    `shape` is the shape [H, W, C] of an image.
    """
    return sigma * _normal(keys, 0, shape)


def gaussian_noise(keys: Key[Array, "B"], shape: tuple[int, ...]) -> Draws:
    """Return a function noise(i), which gives a sampler the standard normal noise of step i.

    There is one key per image, and `shape` is the shape [H, W, C] of an image. The noise of an
    image depends only on its key and on i.
    """
    return lambda i: _normal(keys, i + 1, shape)  # Draw 0 is the initial noise.


def to_variance_preserving(x: Images, sigma: Scalar) -> Images:
    """Return alpha * x with alpha = 1 / sqrt(1 + sigma^2): x in variance-preserving coordinates."""
    return x / jnp.sqrt(1 + sigma**2)


def _normal(keys: Key[Array, "B"], draw: int | Int[Array, ""], shape: tuple[int, ...]) -> Images:
    # Drawn flat: XLA's CPU backend compiles a 4-D draw of the same numbers several times slower.
    flat = lambda key: jax.random.normal(jax.random.fold_in(key, draw), (math.prod(shape),))
    return jax.vmap(flat)(keys).reshape(-1, *shape)
