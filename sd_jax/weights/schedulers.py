"""scheduler_config.json of diffusers directories: the sampler that stands for each scheduler.

A directory draws as its own pipeline does: with the solver that its scheduler names, on that
scheduler's grid. Both are fields of settings.Sampler, which state them in cards and metadata.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from diffusion_jax.diffusion import noise as noises
from diffusion_jax.diffusion import samplers
from sd_jax.settings import Diffusion, Sampler

Config = Mapping[str, Any]
PREDICTS = {"eps": "epsilon", "v": "v_prediction"}
_TABLE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
          "num_train_timesteps": 1000, "trained_betas": None}  # fmt: skip


class Scheduler(NamedTuple):
    """A scheduler of diffusers."""

    sampler: str
    """The sampler of the same steps."""
    defaults: Config = MappingProxyType({})
    """What its class takes for fields that a config omits, where that is not as of most."""
    only: Config = MappingProxyType({})
    """Options of its steps, with the values that are built here."""
    exploding: bool = False
    """Whether latents start as sigma * eps on grids that reach the last time, not as N(0, 1)."""


_LDM = {"timestep_spacing": "leading", "set_alpha_to_one": True, "clip_sample": True}
SCHEDULERS: Mapping[str, Scheduler] = {
    "DDIMScheduler": Scheduler("ddim", _LDM),
    "PNDMScheduler": Scheduler(
        "plms", {"timestep_spacing": "leading", "set_alpha_to_one": False, "skip_prk_steps": False}
    ),
    "EulerDiscreteScheduler": Scheduler("euler", exploding=True),
    "EulerAncestralDiscreteScheduler": Scheduler("euler_ancestral", exploding=True),
    "HeunDiscreteScheduler": Scheduler("heun", exploding=True),
    "DPMSolverMultistepScheduler": Scheduler(
        "dpmpp_2m", only={"solver_type": ("midpoint", "logrho", "bh1", "bh2")}
    ),
    "UniPCMultistepScheduler": Scheduler(
        "unipc", only={"solver_type": ("bh2", "midpoint", "heun", "logrho")}
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
    "lower_order_final": (True,),
    "euler_at_final": (False,),
    "predict_x0": (True,),
    "disable_corrector": ([],),
    "solver_p": (None,),
}


def read_diffusion(config: Config) -> tuple[str, str]:
    """What the UNet predicts, and its noise; ValueError if these are not built here."""
    for name, ours in _TABLE.items():
        if config.get(name, ours) != ours:
            raise ValueError(
                f"says {name} {config[name]!r}: only Stable Diffusion's own schedule is built "
                "here, scaled_linear from 0.00085 to 0.012 in 1000 steps"
            )
    kind = config.get("prediction_type", "epsilon")
    known = {theirs: predicts for predicts, theirs in PREDICTS.items()}
    if kind not in known:
        raise ValueError(f"says prediction_type {kind!r}: known are {', '.join(known)}")
    noise = "zero_terminal_snr" if config.get("rescale_betas_zero_snr") else "scaled_linear"
    return known[kind], noise


def read_sampler(config: Config, sampler: Sampler) -> Sampler:
    """`sampler` with the solver and the grid of a scheduler, at as many steps.

    ValueError, one line, for a scheduler or an option that is not built here.
    """
    name = config.get("_class_name", "")
    if name not in SCHEDULERS:
        raise ValueError(f"the scheduler is {name}: known are {', '.join(SCHEDULERS)}")
    scheduler = SCHEDULERS[name]
    config = {**scheduler.defaults, **config}
    for option, values in {**_ONLY, **scheduler.only}.items():
        if option in config and config[option] not in values:
            raise ValueError(
                f"{name}'s {option} is {config[option]!r}, and {values[0]!r} is built here"
            )
    predicts, noise = read_diffusion(config)
    spacing = config.get("timestep_spacing", "linspace")
    ldm = scheduler.defaults.get("set_alpha_to_one") is not None
    at_zero = config["set_alpha_to_one"] if ldm else config.get("final_sigmas_type") != "sigma_min"
    s = sampler._replace(
        name=scheduler.sampler + "_v" * (scheduler.sampler == "plms" and predicts == "v"),
        grid=spacing,
        end="zero" if at_zero else "sigma_min",
        offset=config.get("steps_offset", 0),
        unit_start=not scheduler.exploding or spacing == "leading",
        # Where no signal is left diffusers takes 2^-24 for alpha bar, but for DDIM.
        sigma_max=4096.0 if noise == "zero_terminal_snr" and not ldm else 0.0,
    )
    named = [grid for grid in ("karras", "exponential") if config.get(f"use_{grid}_sigmas")]
    if named and s.end != "zero":
        raise ValueError(
            f"{name} has {named[0]} levels that end at sigma_min, which it meets twice"
        )
    return _between(config, s, named[0], noise, scheduler.exploding) if named else s


def _between(config: Config, s: Sampler, grid: str, noise: str, exploding: bool) -> Sampler:
    """On a grid by levels, whose ends are the config's, else the table's or those of the spacing.

    k-diffusion's solvers take the ends of the levels that their spacing would have given.
    """
    low, high = config.get("sigma_min"), config.get("sigma_max")
    if exploding:
        own = samplers.sampling_grid(noises.make(Diffusion(noise=noise)), s).sigmas
        low, high = low or float(own[-2]), high or float(own[0])
    return s._replace(grid=grid, sigma_min=low or 0.0, sigma_max=high or s.sigma_max)
