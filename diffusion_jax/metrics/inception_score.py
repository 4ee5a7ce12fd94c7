"""Compute the Inception Score (Salimans et al. 2016) from the logits of the FID Inception."""

import numpy as np
from jaxtyping import Float

from diffusion_jax.metrics.bootstrap import Score
from diffusion_jax.metrics.features import FeatureRows, check_finite

_PART = 5000  # Images per part, as in ADM's evaluator.


def score(logits: FeatureRows) -> Score:
    """Return the Inception Score: exp(mean KL(p(class | image) || p(class))).

    The images are split into parts of 5,000, and the score is the mean over the parts. `logits` do
    not include the classifier's bias, as in the original TensorFlow code and in ADM's evaluator.
    Raises ValueError for logits with NaN or infinity.
    """
    check_finite(logits)
    parts = [_part(logits[start : start + _PART]) for start in range(0, len(logits), _PART)]
    value = np.mean([value for value, _ in parts])
    return Score(float(value), np.concatenate([each for _, each in parts]))


def _part(logits: FeatureRows) -> tuple[float, Float[np.ndarray, "N"]]:
    """Return the score of one part, and each image's first-order contribution to it."""
    x = logits.astype(np.float64)
    x -= x.max(1, keepdims=True)
    log_p = x - np.log(np.exp(x).sum(1, keepdims=True))
    p = np.exp(log_p)
    divergence = (p * (log_p - np.log(p.mean(0)))).sum(1)
    value = np.exp(divergence.mean())
    return value, value * divergence
