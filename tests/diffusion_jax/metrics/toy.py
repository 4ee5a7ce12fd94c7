"""An extractor of a few numbers, whose programs compile at once."""

import jax.numpy as jnp
import numpy as np

from diffusion_jax.config.settings import Evaluation
from diffusion_jax.metrics.extractors import Extractor

WIDTH = 6


def prepare(images):
    """Any size to 2x2 means, which differ between resize kernels no less than Inception's input."""
    _, h, w, _ = images.shape
    rows = jnp.split(images.astype(jnp.float32) / 255, [h // 2], 1)
    parts = [part for row in rows for part in jnp.split(row, [w // 2], 2)]
    return jnp.stack([part.mean((1, 2)) for part in parts], 1)  # [B, 4, 3]


def apply(params, x):
    return jnp.tanh(x.reshape(len(x), -1) @ params["kernel"])


def with_spatial():
    """Its first four features as Inception's, one as spatial features and one as logits."""
    parts = {"inception": 4, "inception_spatial": 1, "inception_unbiased": 1}
    return extractor(name="inception", parts=parts)


def extractor(**changes):
    kernel = np.random.default_rng(0).normal(size=(12, WIDTH)).astype(np.float32)
    made = Extractor("toy", WIDTH, "means", "abc", False, {"kernel": kernel}, prepare, apply)
    return made._replace(**changes)


class InMemory:
    """Arrays as a source; in many processes each must hold the same."""

    def __init__(self, rows):
        self._rows = rows
        self.shape, self.dtype = rows.shape[1:], rows.dtype

    def __len__(self):
        return len(self._rows)

    def read(self, indices):
        return self._rows[indices], np.zeros(len(indices), np.uint8)

    def reason(self, status):
        raise ValueError(f"there is no status {status}")


def wanted(reference="", inception="", clip="", **fields):
    """A config's group of these files."""
    return Evaluation(0, (), reference=reference, inception=inception, clip=clip, **fields)
