"""CLIP's towers (Radford et al. 2021) as extractors."""

import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from diffusion_jax.metrics import preprocess
from diffusion_jax.metrics.extractors import Extractor
from diffusion_jax.text import clip, clip_weights, tokenize
from diffusion_jax.weights import pretrained, torch_weights

PREPROCESSING = {"open_clip": preprocess.open_clip, "squash": preprocess.squash}


class Clip(NamedTuple):
    """Both towers; their features are not normalised."""

    image: Extractor
    text: Extractor
    """Takes token ids [B, L]."""
    tokenize: Callable[[Sequence[str]], Int[np.ndarray, "B L"]]


def load(
    weights: str | os.PathLike[str], *, name: str = "", preprocessing: str = "open_clip"
) -> Clip:
    """A whole CLIP, float32, from a folder or a Hub name; `name` defaults to the folder's.

    `preprocessing` "open_clip" is MLPerf's and NeMo's, "squash" CMMD's. ValueError or
    FileNotFoundError if the weights cannot do.
    """
    if preprocessing not in PREPROCESSING:
        raise ValueError(
            f"there is no preprocessing {preprocessing!r} for CLIP: there are "
            f"{', '.join(PREPROCESSING)}"
        )
    folder = pretrained.locate(weights)
    opened = clip_weights.open_clip(folder)
    image_tower, image_table = clip.image_tower(opened)
    text_tower, text_table = clip.text_tower(opened)
    if image_tower.projection is None or text_tower.projection is None:
        raise ValueError(f"{folder} has no projections: a CLIP score needs the whole model")
    tokenizer = tokenize.clip(folder, open_clip=opened.pads_with_0)
    prepare = PREPROCESSING[preprocessing](image_tower.image_size)
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


def load_image(weights: str | os.PathLike[str], preprocessing: str) -> Extractor:
    """The tower for images of `load`."""
    return load(weights, preprocessing=preprocessing).image


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
