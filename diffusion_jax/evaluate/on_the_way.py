"""Scores on the way of a training: what the evaluation's command scores, nothing kept on disk."""

from collections.abc import Callable, Sequence

import numpy as np
from absl import logging

from diffusion_jax.config.settings import Evaluation
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.draw import program
from diffusion_jax.evaluate import loop, scorers
from diffusion_jax.evaluate.scorers import Scorer
from diffusion_jax.task import Texts
from diffusion_jax.train import loop as training

OpenPrompts = Callable[[Sequence[str]], Callable[[Sequence[str]], Texts]]


def open_evaluation(
    evaluation: Evaluation, source: str, size: int, open_prompts: OpenPrompts
) -> training.Scoring | None:
    """The evaluation that config.evaluation describes; None where it says never.

    `source` is the data's, `size` that of the pictures that are drawn; `open_prompts` gets all
    prompts, and returns what makes of some of them what the task draws from. ValueError or
    FileNotFoundError if it cannot be.
    """
    if not evaluation.every:
        return None
    prompts = (
        prompt_files.read(evaluation.prompts, evaluation.num_prompts) if evaluation.prompts else []
    )
    scorer = scorers.open_scorer(source, size, prompts, evaluation)
    tokenize = open_prompts(scorer.prompts)
    most = program.default_batch_size(size, size)
    batch_size = program.even_batch_size(most, len(scorer.prompts))

    def score(draw, params):
        def images(prompts, seeds, scale):
            scales = np.full(len(seeds), scale, np.float32)
            return draw(params, tokenize(list(prompts)), seeds, scales)

        return score_now(scorer, images, evaluation.guidance, batch_size)

    def rehearse(draw, params):
        def images(prompts, seeds, scale):
            return draw(params, tokenize(list(prompts)), seeds, np.full(len(seeds), scale))

        loop.drawing(scorer, images, evaluation.guidance[0], batch_size)(np.arange(batch_size))

    return training.Scoring(evaluation.every, score, rehearse)


def score_now(
    scorer: Scorer, draw: loop.Draw, guidance: Sequence[float], batch_size: int
) -> dict[str, float]:
    """{"evaluation/guidance_2/fid": ...}: all prompts, `batch_size` at once.

    Of a scale at which images are not finite it is {"evaluation/guidance_2/images_not_finite": 3}.
    """
    scores = {}
    for scale in guidance:
        name = f"guidance_{scale:g}"
        compute = loop.drawing(scorer, draw, scale, batch_size)
        features = loop.collect(len(scorer.prompts), batch_size, compute, name)
        bad = int((~features["fine"]).sum())
        if bad:
            logging.warning("%d images at guidance %g are not finite: no score of it", bad, scale)
        row = {"images_not_finite": float(bad)} if bad else scorers.columns(scorer.score(features))
        scores |= {f"evaluation/{name}/{column}": value for column, value in row.items()}
    return scores
