"""Add textual inversion embeddings (Gal et al. 2022) to a text encoder, as new words.

Files of diffusers name their word. The word of other files, of the web UI of AUTOMATIC1111 and of
kohya's scripts, is the file's name without its suffix.
"""

import pathlib
from typing import Any, NamedTuple

import numpy as np

from diffusion_jax import files
from diffusion_jax.text import TextEncoder
from diffusion_jax.weights import torch_files, torch_weights

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


def apply(paths: str, encoder: TextEncoder, frozen: Any) -> tuple[TextEncoder, Any]:
    """Return a text encoder that knows the words of embeddings, and its weights.

    Args:
        paths: The files, separated by commas.
        encoder: A text encoder, which the result replaces.
        frozen: The weights of `encoder`.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A file holds no embedding, or one of another width, two have the same word, or
            the encoder is not CLIP.
    """
    if encoder.add_words is None:
        raise ValueError(
            f"--embedding={paths} holds vectors for CLIP, but the text encoder is "
            f"{encoder.name!r}: choose a model with CLIP"
        )
    vectors: dict[str, np.ndarray] = {}
    for path in split(paths):
        word, rows = read(files.local(path))
        if rows.shape[1] != encoder.width:
            raise ValueError(
                f"--embedding={path} has vectors of width {rows.shape[1]}, but the model's text "
                f"encoder has width {encoder.width}: choose an embedding for this model"
            )
        if len(rows) > encoder.max_tokens - 2:
            raise ValueError(
                f"--embedding={path} has {len(rows)} vectors, but the text encoder reads "
                f"{encoder.max_tokens - 2} tokens: choose an embedding with fewer vectors"
            )
        if word.lower() in map(str.lower, vectors):
            raise ValueError(f"--embedding={path}: another file has the word {word!r}: keep one")
        vectors[word] = rows
    return encoder.add_words(frozen, vectors)


def split(paths: str) -> list[str]:
    """Return the paths in a value of the option `embedding`."""
    return [path for path in paths.split(",") if path]


def write(path: files.Path, embedding: Embedding) -> None:
    """Write an embedding to a .safetensors file as diffusers does."""
    torch_weights.write(path, {embedding.word: embedding.vectors})
