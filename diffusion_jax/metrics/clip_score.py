"""The CLIP score as MLPerf and NeMo take it, of features of CLIP's towers (see clip_towers).

It is the cosine of an image's and its text's embedding: not times 100, nor cut at 0. ViT-L/14 and
ViT-H/14 give different numbers.
"""

import numpy as np
from jaxtyping import Float

from diffusion_jax.metrics import bootstrap
from diffusion_jax.metrics.features import Rows


def score(cosines: Float[np.ndarray, "N 1"]) -> bootstrap.Score:
    """The mean over pairs of an image and its text."""
    return bootstrap.mean(cosines[:, 0])


def cosines(images: Rows, texts: Rows) -> Float[np.ndarray, "N 1"]:
    """The score of each pair, -1 to 1; float64. ValueError unless there is a text an image."""
    if images.shape != texts.shape:
        raise ValueError(
            f"features of images {images.shape} and of texts {texts.shape} are no pairs: each "
            "image needs its text, and both the same model"
        )
    x, y = images.astype(np.float64), texts.astype(np.float64)
    products = (x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
    return products[:, None]


def normalised(rows: Rows) -> Rows:
    """Rows of norm 1, of which CMMD is computed."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
