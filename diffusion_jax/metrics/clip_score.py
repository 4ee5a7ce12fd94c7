"""Compute the CLIP score as MLPerf and NeMo do: the cosine of CLIP's image and text embeddings.

The score is neither multiplied by 100 nor clipped at 0. ViT-L/14 and ViT-H/14 give different
scores.
"""

import numpy as np
from jaxtyping import Float

from diffusion_jax.metrics import bootstrap
from diffusion_jax.metrics.features import FeatureRows


def score(cosines: Float[np.ndarray, "N 1"]) -> bootstrap.Score:
    """Return the mean of the cosines of all image-text pairs (from -1 to 1) as a score."""
    return bootstrap.mean(cosines[:, 0])


def cosines(images: FeatureRows, texts: FeatureRows) -> Float[np.ndarray, "N 1"]:
    """Return the cosine of each image-text pair, from -1 to 1, in float64.

    `images` and `texts` hold the features of the pairs, one row per pair.

    Raises:
        ValueError: `images` and `texts` differ in shape.
    """
    if images.shape != texts.shape:
        raise ValueError(
            f"image features of shape {images.shape} and text features of shape {texts.shape} are "
            "not pairs: each image needs a text, and both must come from the same model"
        )
    x, y = images.astype(np.float64), texts.astype(np.float64)
    products = (x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
    return products[:, None]


def normalised(rows: FeatureRows) -> FeatureRows:
    """Scale each row to L2 norm 1, as CMMD requires."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
