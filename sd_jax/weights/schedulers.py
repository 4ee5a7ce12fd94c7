"""Convert a scheduler_config.json of diffusers to sampler settings.

With these settings, a model from a diffusers directory draws with the solver and the time grid of
the directory's scheduler. Both are fields of settings.Sampler, so they are saved with each picture.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from diffusion_jax.diffusion import samplers
from diffusion_jax.diffusion.noise import NOISES
from sd_jax.settings import Sampler

Config = Mapping[str, Any]
PREDICTS = {"eps": "epsilon", "v": "v_prediction"}
ZERO_SNR = "zero_terminal_snr"
"""The value of diffusion.noise for noise that leaves nothing of the image at the last level."""
_TABLE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "trained_betas": None,
}


class Scheduler(NamedTuple):
    """How this project reproduces the sampling steps of a scheduler class of diffusers."""

    sampler: str
    """Name of this project's sampler that takes the same steps."""
    options: str
    """Names of the class's own options; _SHARED has the options of all classes. As in diffusers'
    from_config, other options in a config are ignored: they belong to other classes."""
    defaults: Config = MappingProxyType({})
    """Default values of the class's options, where they differ from those of most schedulers."""
    only: Config = MappingProxyType({})
    """Maps options of the class to the tuple of their supported values."""
    grid: str = ""
    """The grid of a class without the option timestep_spacing."""
    exact_end: bool = False
    """Whether sampling at zero terminal SNR starts from noise without any signal."""
    exploding: bool = False
    """Whether sampling starts from noise of the first sigma instead of standard deviation 1, unless
    the timesteps are spaced as "leading"."""


_SHARED = "_class_name prediction_type timestep_spacing steps_offset"
# diffusers reads sigma_min and sigma_max from the config even in classes without these options.
_GRIDS = "use_karras_sigmas use_exponential_sigmas use_beta_sigmas sigma_min sigma_max"
_SOLVER = "thresholding solver_order solver_type lower_order_final use_flow_sigmas"
_LDM = {"timestep_spacing": "leading", "set_alpha_to_one": True, "clip_sample": True}
SCHEDULERS: Mapping[str, Scheduler] = {
    "DDIMScheduler": Scheduler(
        "ddim", "clip_sample set_alpha_to_one thresholding rescale_betas_zero_snr", _LDM, exact_end=True
    ),
    "PNDMScheduler": Scheduler(
        "plms",
        "set_alpha_to_one skip_prk_steps",
        {"timestep_spacing": "leading", "set_alpha_to_one": False, "skip_prk_steps": False},
    ),
    "TCDScheduler": Scheduler(  # With eta = 0, as in diffusers' pipelines by default.
        "ddim",
        "clip_sample thresholding rescale_betas_zero_snr original_inference_steps",
        {"set_alpha_to_one": False},
        {"original_inference_steps": (50,)},
        grid="lcm",
        exact_end=True,
    ),
    "DDPMScheduler": Scheduler(
        "ddpm",
        "clip_sample thresholding rescale_betas_zero_snr variance_type",
        {"timestep_spacing": "leading", "clip_sample": True},
        {"variance_type": ("fixed_small", "fixed_small_log")},
        exact_end=True,
    ),
    "EulerDiscreteScheduler": Scheduler(
        "euler", f"rescale_betas_zero_snr interpolation_type timestep_type {_GRIDS} final_sigmas_type", exploding=True
    ),
    "EulerAncestralDiscreteScheduler": Scheduler("euler_ancestral", "rescale_betas_zero_snr", exploding=True),
    "HeunDiscreteScheduler": Scheduler("heun", f"clip_sample {_GRIDS}", exploding=True),
    "LMSDiscreteScheduler": Scheduler("lms", _GRIDS, exploding=True),
    "KDPM2DiscreteScheduler": Scheduler("dpm2", _GRIDS, exploding=True),
    "KDPM2AncestralDiscreteScheduler": Scheduler("dpm2_ancestral", _GRIDS, exploding=True),
    "DPMSolverSinglestepScheduler": Scheduler(
        "dpmpp_2s",
        f"algorithm_type final_sigmas_type {_SOLVER} {_GRIDS}",
        only={"solver_type": ("midpoint",), "final_sigmas_type": ("zero",)},
        grid="linspace",
    ),
    "DPMSolverMultistepScheduler": Scheduler(
        "dpmpp_2m",
        f"algorithm_type rescale_betas_zero_snr final_sigmas_type euler_at_final use_lu_lambdas {_SOLVER} {_GRIDS}",
        only={"solver_order": (2, 1), "solver_type": ("midpoint", "logrho", "bh1", "bh2")},
    ),
    "DEISMultistepScheduler": Scheduler(
        "deis",
        f"algorithm_type {_SOLVER} {_GRIDS}",
        {"final_sigmas_type": "sigma_min"},
        {"solver_order": (2, 1, 3), "solver_type": ("logrho", "midpoint", "heun", "bh1", "bh2")},
    ),
    "LCMScheduler": Scheduler(
        "lcm",
        "clip_sample thresholding rescale_betas_zero_snr original_inference_steps timestep_scaling",
        only={"original_inference_steps": (50,), "timestep_scaling": (10.0,)},
        grid="lcm",
        exact_end=True,
    ),
    "UniPCMultistepScheduler": Scheduler(
        "unipc",
        f"rescale_betas_zero_snr final_sigmas_type predict_x0 disable_corrector solver_p {_SOLVER} {_GRIDS}",
        only={"solver_type": ("bh2", "midpoint", "heun", "logrho"), "lower_order_final": (True,)},
    ),
}
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "clip_sample": (False,),
    "thresholding": (False,),
    "skip_prk_steps": (True,),
    "interpolation_type": ("linear",),
    "timestep_type": ("discrete",),
    "use_beta_sigmas": (False, None),
    "use_lu_lambdas": (False, None),
    "use_flow_sigmas": (False, None),
    "solver_order": (2,),
    "algorithm_type": ("dpmsolver++", "deis"),
    "predict_x0": (True,),
    "disable_corrector": ([],),
    "solver_p": (None,),
}


def read_diffusion(config: Config) -> tuple[str, str]:
    """Return the UNet's prediction, "eps" or "v", and the value of diffusion.noise for its noise.

    `config` is the content of a scheduler_config.json. Raises ValueError for unsupported values.
    """
    for name, supported in _TABLE.items():
        if config.get(name, supported) != supported:
            raise ValueError(
                f"the scheduler's {name} is {config[name]!r}, but only Stable Diffusion's schedule "
                "is supported, scaled_linear from 0.00085 to 0.012 in 1000 steps"
            )
    kind = config.get("prediction_type", "epsilon")
    predictions = {theirs: ours for ours, theirs in PREDICTS.items()}
    if kind not in predictions:
        raise ValueError(
            f"the scheduler's prediction_type is {kind!r}, but only {' and '.join(predictions)} are supported"
        )
    noise = ZERO_SNR if _own(config).get("rescale_betas_zero_snr") else "scaled_linear"
    return predictions[kind], noise


def read_sampler(config: Config, sampler: Sampler) -> Sampler:
    """Return sampler settings with the solver and the grid of a diffusers scheduler.

    The other fields, such as the number of steps, are those of `sampler`. `config` is the content
    of a scheduler_config.json. Raises ValueError for an unsupported scheduler or option.
    """
    name = config.get("_class_name", "")
    if name not in SCHEDULERS:
        raise ValueError(f"the scheduler {name} is not one of {', '.join(SCHEDULERS)}")
    scheduler = SCHEDULERS[name]
    predicts, noise = read_diffusion(config)
    config = {**scheduler.defaults, **_own(config)}
    for option, values in {**_ONLY, **scheduler.only}.items():
        if option in config and config[option] not in values:
            raise ValueError(
                f"{name}'s {option} is {config[option]!r}, but only {' or '.join(map(repr, values))} is supported"
            )
    spacing = scheduler.grid or config.get("timestep_spacing", "linspace")
    ldm = scheduler.defaults.get("set_alpha_to_one") is not None
    at_zero = config["set_alpha_to_one"] if ldm else config.get("final_sigmas_type") != "sigma_min"
    s = sampler._replace(
        name=_solver(config, scheduler.sampler, predicts),
        grid=spacing,
        end="zero" if at_zero else "sigma_min",
        offset=config.get("steps_offset", 0),
        unit_start=not scheduler.exploding or spacing == "leading",
        # At zero terminal SNR, diffusers uses alpha bar = 2^-24, except in DDIM and DDPM.
        sigma_max=4096.0 if noise == ZERO_SNR and not scheduler.exact_end else 0.0,
    )
    grids = [grid for grid in ("karras", "exponential") if config.get(f"use_{grid}_sigmas")]
    if grids and s.end != "zero":
        raise ValueError(
            f"{name} with a {grids[0]} grid and final_sigmas_type 'sigma_min' is not supported, "
            "because sigma_min would occur twice in the grid"
        )
    return _with_sigma_grid(config, s, grids[0], noise, scheduler.exploding) if grids else s


def _own(config: Config) -> Config:
    """Return the options of a scheduler_config.json that its class has."""
    if not (scheduler := SCHEDULERS.get(config.get("_class_name", ""))):
        return config
    names = f"{_SHARED} {scheduler.options}".split()
    return {name: config[name] for name in names if name in config}


def _solver(config: Config, sampler: str, predicts: str) -> str:
    """Return the sampler's name, with parameters that set the orders of the scheduler's solver.

    The samplers dpmpp_2m and deis lower the order of the last steps if there are fewer than 15
    steps. A parameter `steps` replaces the number of steps in this comparison: with 1 the order is
    always lowered, with 15 never.
    """
    if sampler == "plms":
        return "plms_v" if predicts == "v" else "plms"
    if sampler not in ("dpmpp_2m", "deis"):
        return sampler
    order = config.get("solver_order", 2)
    parameters = {}
    if order == 1:  # All exponential integrators of first order are the same method.
        sampler, parameters["order"] = "deis", 1
    elif sampler == "deis" and order != 2:
        parameters["order"] = order
    if order > 1 and config.get("euler_at_final", False):
        parameters["steps"] = 1
    elif order > 1 and not config.get("lower_order_final", True):
        parameters["steps"] = 15
    values = ", ".join(f"{name}={value}" for name, value in parameters.items())
    return f"{sampler}({values})" if values else sampler


def _with_sigma_grid(config: Config, s: Sampler, grid: str, noise: str, exploding: bool) -> Sampler:
    """Return the sampler settings `s` with the grid `grid`, "karras" or "exponential".

    The grid runs from the config's sigma_max to its sigma_min. If one of them is missing, it is
    replaced: for k-diffusion's solvers (`exploding`), by the highest level, or the last level
    before the end, of the time-spaced grid that `s` gives for the noise schedule `noise`; for other
    solvers, by the end of the noise schedule, or at the top by s.sigma_max if that is not 0.
    """
    low, high = config.get("sigma_min"), config.get("sigma_max")
    if exploding:
        sigmas = samplers.sampling_grid(NOISES.function(noise)(), s).sigmas
        low, high = low or float(sigmas[-2]), high or float(sigmas[0])
    return s._replace(grid=grid, sigma_min=low or 0.0, sigma_max=high or s.sigma_max)
