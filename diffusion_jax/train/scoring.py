"""Draw and score pictures during training, with the same metrics as the evaluation command."""

from collections.abc import Sequence

import numpy as np
from absl import logging

from diffusion_jax.config.settings import Evaluation
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.draw import program
from diffusion_jax.evaluate import drawn_features, scorers
from diffusion_jax.evaluate.scorers import Scorer
from diffusion_jax.train.loop import OpenPrompts, Scoring


def open_scoring(evaluation: Evaluation, source: str, size: int, open_prompts: OpenPrompts) -> Scoring:
    """Open the prompts and metrics that a config's `evaluation` group names, and return a Scoring.

    Args:
        evaluation: The config group.
        source: The config's data.source. The source's own scorer is used if the group names no file
            of prompts.
        size: The side in pixels of the pictures that the model draws.
        open_prompts: Maps all prompts to a function that tokenizes a batch of prompts.

    Raises:
        ValueError or FileNotFoundError: The prompts, a reference or an extractor cannot be read.
    """
    prompts = (
        prompt_files.read(evaluation.prompts, evaluation.num_prompts, flag="evaluation.prompts")
        if evaluation.prompts
        else []
    )
    scorer = scorers.open_scorer(source, size, prompts, evaluation)
    tokenize = open_prompts(scorer.prompts)
    batch_size = program.even_batch_size(program.default_batch_size(size, size), len(scorer.prompts))

    def drawing(draw, params):
        def images(prompts, seeds, guidance):
            rows = np.full(len(seeds), guidance, np.float32)
            return draw(params, tokenize(list(prompts)), seeds, rows)

        return images

    def score(draw, params):
        return score_now(scorer, drawing(draw, params), evaluation.guidance, batch_size)

    def rehearse(draw, params):
        first = evaluation.guidance[0]
        features = drawn_features.drawing(scorer, drawing(draw, params), first, batch_size)
        features(np.arange(batch_size))

    return Scoring(evaluation.every, score, rehearse)


def score_now(
    scorer: Scorer, draw: drawn_features.DrawPrompts, guidance: Sequence[float], batch_size: int
) -> dict[str, float]:
    """Draw and score all prompts at each guidance scale, `batch_size` images at a time.

    Returns scores such as {"evaluation/guidance_2/fid": 12.3}. If some images at a guidance scale
    are not finite, the result holds only their number for this scale:
    {"evaluation/guidance_2/images_not_finite": 3}.
    """
    scores = {}
    for value in guidance:
        name = f"guidance_{value:g}"
        compute = drawn_features.drawing(scorer, draw, value, batch_size)
        features = drawn_features.collect(len(scorer.prompts), batch_size, compute, name)
        bad = int((~features["fine"]).sum())
        if bad:
            logging.warning("%d images at guidance %g are not finite: this guidance gets no scores", bad, value)
        row = {"images_not_finite": float(bad)} if bad else scorers.columns(scorer.score(features))
        scores |= {f"evaluation/{name}/{column}": value for column, value in row.items()}
    return scores
