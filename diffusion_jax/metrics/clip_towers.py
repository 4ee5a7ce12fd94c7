"""Load the image and text towers of CLIP (Radford et al. 2021) as feature extractors."""

import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from diffusion_jax.files import untrusted
from diffusion_jax.metrics import clip_score, extractors, preprocess
from diffusion_jax.metrics.extractors import Extractor
from diffusion_jax.text import clip, clip_weights, tokenize
from diffusion_jax.weights import pretrained, torch_weights

PREPROCESSING = {"open_clip": preprocess.open_clip, "squash": preprocess.squash, "pad": preprocess.pad}


class ClipExtractors(NamedTuple):
    """The two towers of a CLIP model as feature extractors. The features are not normalised."""

    image: Extractor
    text: Extractor
    """The text tower. It takes token ids [B, L]."""
    tokenize: Callable[[Sequence[str]], Int[np.ndarray, "B L"]]
    """Maps texts to token ids."""


def load(
    weights: str | os.PathLike[str],
    *,
    name: str = "",
    preprocessing: str = "open_clip",
    file: pathlib.Path | None = None,
) -> ClipExtractors:
    """Load both towers of a CLIP model in float32.

    Args:
        weights: a folder, or the name of a Hugging Face Hub repository.
        name: name of the model, shown in score tables as "clip_NAME". The default is the last part
            of `weights`.
        preprocessing: "open_clip", used by MLPerf and NeMo, "squash", used by CMMD, or "pad", used
            by HPSv2.
        file: a torch checkpoint with other weights for the CLIP in `weights`.

    Raises:
        FileNotFoundError: the weights, the config or the tokenizer are missing.
        ValueError: `preprocessing` is unknown, or `weights` does not hold a complete CLIP: two
            towers, each with its projection.
    """
    if preprocessing not in PREPROCESSING:
        raise ValueError(f"CLIP has no preprocessing {preprocessing!r}: choose from {', '.join(PREPROCESSING)}")
    folder = pretrained.locate(weights)
    opened = clip_weights.open_clip(folder, file)
    with untrusted.naming(f"the model in {folder}"):
        image_tower, image_table = clip.image_tower(opened)
        text_tower, text_table = clip.text_tower(opened)
    if image_tower.projection is None or text_tower.projection is None:
        raise ValueError(f"{folder} has no projections: a CLIP score needs the complete model")
    tokenizer = tokenize.clip(folder, open_clip=opened.pads_with_0)
    prepare = PREPROCESSING[preprocessing](image_tower.image_size)
    name = name or str(weights).rstrip("/").rpartition("/")[2]
    digest = hash_of([file]) if file else _digest(folder)

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

    return ClipExtractors(
        extractor(image_tower, image_table, preprocessing, prepare),
        extractor(text_tower, text_table, "tokens", lambda ids: ids),
        lambda texts: tokenizer(texts, text_tower.max_tokens)["text_ids"],
    )


def pair_cosines(
    clip: ClipExtractors, batch_size: int | None = None
) -> Callable[[np.ndarray, Sequence[str]], Float[np.ndarray, "B 1"]]:
    """Return a function that maps images [B, H, W, 3] and their B texts to cosines from -1 to 1.

    The CLIP score is the mean of the cosines. The devices process `batch_size` pairs at a time;
    None stands for all pairs at once.
    """
    image, text = (extractors.on_host(tower, batch_size) for tower in (clip.image, clip.text))
    return lambda images, texts: clip_score.cosines(image(images), text(clip.tokenize(list(texts))))


def load_image(weights: str | os.PathLike[str], preprocessing: str) -> Extractor:
    """Load the image tower of a CLIP model, with the arguments and errors of `load`."""
    return load(weights, preprocessing=preprocessing).image


def _projected(tower: Any) -> Callable[[Any, jax.Array], jax.Array]:
    def apply(params, x):
        # By default, accelerators multiply float32 in TF32 or bf16.
        with jax.default_matmul_precision("highest"):
            return tower.apply(params, x).projected

    return apply


def _digest(folder: pathlib.Path) -> str:
    return hash_of(sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")))


def hash_of(paths: Sequence[pathlib.Path]) -> str:
    """Return the SHA-256 of the contents of files, one after another, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(2**24):
                digest.update(chunk)
    return digest.hexdigest()
