"""CLIP's towers (Radford et al. 2021) as extractors, and the CLIP score as MLPerf and NeMo take it.

The score is the cosine of an image's and its text's embedding: not times 100, nor cut at 0. Its
name carries the model's, since ViT-L/14 and ViT-H/14 give different numbers.
"""

import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from diffusion_jax.metrics import preprocess
from diffusion_jax.metrics.extractors import Extractor
from diffusion_jax.metrics.features import Rows
from diffusion_jax.text import clip, clip_weights, tokenize
from diffusion_jax.weights import pretrained, torch_weights


class Clip(NamedTuple):
    """Both towers; their features are not normalised."""

    image: Extractor
    text: Extractor
    """Of token ids [B, L]."""
    tokenize: Callable[[Sequence[str]], Int[np.ndarray, "B L"]]


def load(
    weights: str | os.PathLike[str], *, name: str = "", preprocessing: str = "open_clip"
) -> Clip:
    """A whole CLIP, float32, from a folder or a Hub name; `name` defaults to the folder's.

    `preprocessing` "open_clip" is MLPerf's and NeMo's, "squash" CMMD's. ValueError or
    FileNotFoundError if the weights cannot do.
    """
    if preprocessing not in ("open_clip", "squash"):
        raise ValueError(
            f"there is no preprocessing {preprocessing!r} for CLIP: there are open_clip, squash"
        )
    folder = pretrained.locate(weights)
    opened = clip_weights.open_clip(folder)
    image_tower, image_table = clip.image_tower(opened)
    text_tower, text_table = clip.text_tower(opened)
    if image_tower.projection is None or text_tower.projection is None:
        raise ValueError(f"{folder} has no projections: a CLIP score needs the whole model")
    tokenizer = tokenize.clip(folder, open_clip=opened.pads_with_0)
    size = image_tower.image_size
    prepare = (
        preprocess.open_clip(size) if preprocessing == "open_clip" else preprocess.squash(size)
    )
    name = name or str(weights).rstrip("/").rpartition("/")[2]
    digest = _digest(folder)

    def extractor(tower, table, preprocessing, prepare):
        state = clip_weights.tower_state(opened, table)
        params = torch_weights.to_params(state, table, clip.abstract_params(tower))
        return Extractor(
            name=f"clip_{name}",
            width=tower.projection,
            preprocessing=preprocessing,
            weights=digest,
            official=False,
            params=params,
            prepare=prepare,
            apply=_projected(tower),
        )

    return Clip(
        extractor(image_tower, image_table, preprocessing, prepare),
        extractor(text_tower, text_table, "tokens", lambda ids: ids),
        lambda texts: tokenizer(texts, text_tower.max_tokens)["text_ids"],
    )


def cosines(images: Rows, texts: Rows) -> Float[np.ndarray, "N"]:
    """The score of each pair, -1 to 1; float64. ValueError unless there is a text an image."""
    if images.shape != texts.shape:
        raise ValueError(
            f"features of images {images.shape} and of texts {texts.shape} are no pairs: each "
            "image needs its text, and both the same model"
        )
    x, y = images.astype(np.float64), texts.astype(np.float64)
    return (x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))


def clip_score(images: Rows, texts: Rows) -> float:
    """The mean over pairs."""
    return float(cosines(images, texts).mean())


def normalised(rows: Rows) -> Rows:
    """Rows of norm 1, of which CMMD is computed."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _projected(tower: Any) -> Callable[[Any, jax.Array], jax.Array]:
    def apply(params, x):
        # Else products of float32 are TF32 or bf16 on accelerators.
        with jax.default_matmul_precision("highest"):
            return tower.apply(params, x).projected

    return apply


def _digest(folder: pathlib.Path) -> str:
    """A sha256 of the folder's safetensors, one after the other."""
    whole = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(2**24):
                whole.update(chunk)
    return whole.hexdigest()
