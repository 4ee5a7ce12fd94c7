"""Add textual inversion embeddings (Gal et al. 2022) to a text encoder, as new words.

Files of diffusers name their word. The word of other files, of the web UI of AUTOMATIC1111 and of
kohya's scripts, is the file's name without its suffix.
"""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diffusion_jax import files
from diffusion_jax.text import clip
from diffusion_jax.text.tokenize import TextTokenizer
from diffusion_jax.weights import torch_files, torch_weights
from sd_jax.weights.text import TextPart

_UNNAMED = ("*", "emb_params")  # The names of the array in files that do not name their word.


class Embedding(NamedTuple):
    """The vectors of a word, which take the place of as many tokens."""

    word: str
    vectors: np.ndarray
    """float32 [N, D]."""


def read(path: pathlib.Path) -> Embedding:
    """Read an embedding. Raises ValueError if the file holds anything else."""
    state = torch_files.read_state_dict(path)
    if state.keys() >= {"clip_g"}:
        raise ValueError(f"{path} is an embedding for SDXL, which is not supported")
    arrays = {name: np.atleast_2d(np.asarray(x, np.float32)) for name, x in state.items()}
    if len(arrays) != 1 or any(x.ndim > 2 for x in arrays.values()):
        raise ValueError(
            f"{path} is not a textual inversion embedding, because it holds {len(arrays)} arrays, "
            f"such as {torch_weights.some(arrays)}, instead of one with a vector per token"
        )
    try:
        torch_weights.check_finite(state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    ((name, vectors),) = arrays.items()
    return Embedding(path.stem if name in _UNNAMED else name, vectors)


def apply(paths: Sequence[str], part: TextPart, tokenizer: TextTokenizer) -> TextPart:
    """Return a text encoder that knows the words of embeddings, and add them to the tokenizer.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A file holds no embedding, or one of another width, or two have the same word.
    """
    if not paths:
        return part
    embeddings = [read(files.local(path)) for path in paths]
    width, words = part.tower.width, [embedding.word.lower() for embedding in embeddings]
    for path, (word, vectors) in zip(paths, embeddings, strict=True):
        if vectors.shape[1] != width:
            raise ValueError(
                f"--embedding={path} has vectors of width {vectors.shape[1]}, but the model's text "
                f"encoder has width {width}: choose an embedding for this model"
            )
        if words.count(word.lower()) > 1:
            raise ValueError(f"--embedding={path}: another file has the word {word!r}: keep one")
    ids = tokenizer.add_words({word: len(vectors) for word, vectors in embeddings})
    vectors = np.concatenate([vectors for _, vectors in embeddings])  # [N, D]
    tower, params = clip.with_learned(part.tower, part.params, ids, vectors)
    return part._replace(tower=tower, params=params)


def write(path: files.Path, embedding: Embedding) -> None:
    """Write an embedding to a .safetensors file as diffusers does."""
    torch_weights.write(path, {embedding.word: embedding.vectors})
