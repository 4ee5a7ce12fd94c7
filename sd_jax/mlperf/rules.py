"""Rules of the MLPerf benchmark of Stable Diffusion: targets, and values that configs must have."""

import math
from collections.abc import Mapping
from typing import Any

from sd_jax.settings import Settings

NAME, VERSION = "stable_diffusion", "5.0.0"
"""The name of the benchmark, and the last version of MLPerf's rules that includes it."""
TARGETS = {"FID": 90.0, "CLIP": 0.15}
"""The targets: one evaluation must have at most this FID and at least this CLIP score."""
RUNS = 10
"""The number of runs in a submission."""
EVERY = 512_000
"""The number of training images between evaluations, before it is rounded up to whole steps."""


def meets_targets(scores: Mapping[str, float]) -> bool:
    """Return whether the scores of one evaluation, keyed by "FID" and "CLIP", meet both targets.

    The result is False if a score is missing or NaN.
    """
    if not scores.keys() >= TARGETS.keys():
        return False
    return scores["FID"] <= TARGETS["FID"] and scores["CLIP"] >= TARGETS["CLIP"]


def steps_between(s: Settings) -> int:
    """Return the number of training steps between evaluations."""
    return -(-s.evaluation.every // s.run.batch_size)


def check(s: Settings) -> None:
    """Raise ValueError if the benchmark cannot run with these settings.

    The benchmark needs an interval between evaluations, one guidance scale, enough steps for one
    evaluation, random initial weights, and a VAE.
    """
    if s.evaluation.every < 1 or len(s.evaluation.guidance) != 1:
        raise ValueError(
            f"evaluation.every is {s.evaluation.every} and evaluation.guidance is "
            f"{s.evaluation.guidance}: set evaluation.every to a number of images, such as "
            f"{EVERY}, and evaluation.guidance to a tuple of one guidance scale, such as (8.0,)"
        )
    if s.run.steps < steps_between(s):
        raise ValueError(
            f"steps is {s.run.steps}, but the first evaluation is after {steps_between(s)} steps: "
            f"set steps to about {10 * steps_between(s)}"
        )
    if s.unet_weights:
        raise ValueError(
            f"unet.weights is {s.unet_weights!r}, but benchmark runs start with random weights: leave it empty"
        )
    if not s.vae_weights:
        raise ValueError("vae.weights is empty: name the VAE, which decodes the images to evaluate")


def departures(s: Settings) -> list[str]:
    """Return a text for each setting with a value that MLPerf's closed division does not allow."""
    o = s.optimizer
    rules = [
        ("optimizer.name", o.name, "adamw"),
        ("optimizer.b1", o.b1, 0.9),
        ("optimizer.b2", o.b2, 0.999),
        ("optimizer.eps", o.eps, 1e-8),
        ("optimizer.weight_decay", o.weight_decay, 0.01),
        ("optimizer.clip", o.clip, math.inf),
        ("optimizer.lr_factors", o.lr_factors, ""),
        ("optimizer.decay_factors", o.decay_factors, ""),
        ("optimizer.ema_decays", o.ema_decays, ()),
        ("optimizer.schedule", o.schedule, "ldm"),
        ("unet.norm_groups", s.unet.norm_groups, 16),
        ("text.drop_prob", s.text.drop_prob, 0.0),
        ("diffusion.predicts", s.diffusion.predicts, "v"),
        ("diffusion.offset_noise", s.diffusion.offset_noise, 0.0),
        ("diffusion.weight", s.diffusion.weight, "none"),
        ("latents.image_size", s.latents.image_size, 512),
        ("latents.pixels", s.latents.pixels, "unit"),
        ("sampler.name", s.sampler.name, "ddim"),
        ("sampler.steps", s.sampler.steps, 50),
        ("sampler.eta", s.sampler.eta, 0.0),
        ("evaluation.guidance", s.evaluation.guidance, (8.0,)),
        ("evaluation.every in steps", steps_between(s), -(-EVERY // s.run.batch_size)),
        ("evaluation.num_prompts", s.evaluation.num_prompts, 30_000),
    ]
    return [f"{name} is {value}, not {rule}" for name, value, rule in rules if value != rule]


def hyperparameters(s: Settings, passes: int) -> dict[str, Any]:
    """Return the hyperparameters that a log must hold, keyed by the names in MLPerf's rules.

    The learning rate is the value after the warm-up. `passes` is the number of passes of a step.
    """
    o = s.optimizer
    return {
        "global_batch_size": s.run.batch_size,
        "gradient_accumulation_steps": passes,
        "eval_samples": s.evaluation.num_prompts,
        "opt_name": "adamw",
        "opt_adamw_beta_1": o.b1,
        "opt_adamw_beta_2": o.b2,
        "opt_adamw_epsilon": o.eps,
        "opt_adamw_weight_decay": o.weight_decay,
        "opt_base_learning_rate": o.lr,
        "opt_learning_rate_warmup_steps": o.warmup,
    }
