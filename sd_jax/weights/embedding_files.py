"""Add textual inversion embeddings (Gal et al. 2022) to a text encoder, as new words.

Files of diffusers, and pictures with an embedding of the web UI of AUTOMATIC1111, name their word.
The word of other files, of the authors, the web UI and kohya's scripts, is the file's name without
its suffix.
"""

import base64
import pathlib
import re
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import numpy as np

from diffusion_jax import files
from diffusion_jax.files import untrusted
from diffusion_jax.text import TextEncoder
from diffusion_jax.weights import torch_files, torch_weights

# The names of the array in files that do not name their word.
_UNNAMED = ("", "*", "emb_params", "clip_l")
_IN_PNG = "sd-ti-embedding"  # The text in a PNG file that holds an embedding.


class Embedding(NamedTuple):
    """The vectors of a word, which take the place of as many tokens."""

    word: str
    vectors: np.ndarray
    """float32 [N, D]."""


def read(path: pathlib.Path) -> Embedding:
    """Read an embedding. Raises ValueError if the file does not hold exactly one."""
    state = _state(path)
    if state.keys() >= {"clip_g"}:
        raise ValueError(f"{path} is an embedding for SDXL, which is not supported")
    arrays = {name: np.atleast_2d(np.asarray(x, np.float32)) for name, x in state.items()}
    if len(arrays) != 1 or any(x.ndim > 2 for x in arrays.values()):
        raise ValueError(
            f"{path} is not a textual inversion embedding, because it holds {len(arrays)} arrays, "
            f"such as {torch_weights.some(arrays)}, instead of one with a vector per token"
        )
    with untrusted.naming(str(path)):
        torch_weights.check_finite(state)
    ((name, vectors),) = arrays.items()
    if not vectors.size:
        raise ValueError(f"{path} holds no vectors: choose another file")
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
        check(f"--embedding={path}", word, rows, encoder)
        if word.lower() in map(str.lower, vectors):
            raise ValueError(f"--embedding={path}: another file has the word {word!r}: keep one")
        vectors[word] = rows
    larger, params = encoder.add_words(frozen, vectors)
    return larger._replace(added={**encoder.added, **larger.added}), params


def check(option: str, word: str, vectors: np.ndarray, encoder: TextEncoder) -> None:
    """Raise ValueError if the vectors of a word, from the file in `option`, do not fit a model."""
    if vectors.shape != (len(vectors) or 1, encoder.width):
        raise ValueError(
            f"{option} has an embedding of {word!r} of the shape {list(vectors.shape)}, but the "
            f"model's text encoder has width {encoder.width}: choose a file for this model"
        )
    if len(vectors) > encoder.max_tokens - 2:
        raise ValueError(
            f"{option} has {len(vectors)} vectors for {word!r}, but the text encoder reads "
            f"{encoder.max_tokens - 2} tokens: choose an embedding with fewer vectors"
        )


def split(paths: str) -> list[str]:
    """Split a value of the option `embedding` or `lora` at commas, into PATH or PATH:STRENGTH.

    The path of an existing file may contain commas, too.
    """
    # A strength has no comma.
    is_file = lambda path: any(files.path(p).is_file() for p in (path, re.sub(":[^,]*$", "", path)))
    parts, found = paths.split(","), []
    while parts:
        joined = [",".join(parts[:n]) for n in range(len(parts), 1, -1)]
        path = next(filter(is_file, joined), parts[0])
        found.append(path)
        del parts[: path.count(",") + 1]
    return [path for path in found if path]


def write(path: files.Path, embedding: Embedding) -> None:
    """Write an embedding to a .safetensors file as diffusers does."""
    torch_weights.write(path, {embedding.word: embedding.vectors})


def _state(path: pathlib.Path) -> Mapping[str, Any]:
    """Return the arrays of a file, keyed by name, such as "*" or the word."""
    try:
        with path.open("rb") as file:
            start = file.read(6)
            file.seek(0)
            if start == b"\x89PNG\r\n":
                return _of_png(path)
            if start == b"\x93NUMPY":
                return _of_npy(file, path.stat().st_size)
    except FileNotFoundError:
        pass  # The other reader names the file.
    except Exception as error:  # Damaged files raise exceptions of many types.
        raise ValueError(f"cannot read the embedding {path}: {error}") from error
    return torch_files.read_state_dict(path)


def _of_png(path: pathlib.Path) -> Mapping[str, Any]:
    """Return the array of a picture of the web UI of AUTOMATIC1111, under the embedding's name."""
    texts = getattr(untrusted.open_image(path, ["PNG"]), "text", {})
    if _IN_PNG not in texts:
        raise ValueError("the picture contains no embedding, or a program has removed it")
    content = untrusted.parse_json(base64.b64decode(texts[_IN_PNG]))
    arrays = {name: np.asarray(x["TORCHTENSOR"], np.float32) for name, x in content["string_to_param"].items()}
    return {content.get("name") or "*": arrays["*"]} if arrays.keys() == {"*"} else arrays


class _StandIn:
    """Replaces every class and function in a pickle. It records its arguments and runs nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        """Return the array of floats that NumPy's or JAX's functions would make."""
        _, shape, dtype, fortran, content = self.state or self.arguments[2]
        if (name := dtype.arguments[0]) not in ("f2", "f4", "f8"):
            raise ValueError(f"its array has the type {name}")
        return np.frombuffer(content, name).reshape(shape, order="F" if fortran else "C")


class _Unpickler(untrusted.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _StandIn


def _of_npy(file: IO[bytes], size: int) -> Mapping[str, Any]:
    """Return the array of an .npy file, or those of a pickled dict, as diffusers saves from JAX."""
    np.lib.format.read_magic(file)
    *_, dtype = np.lib.format.read_array_header_1_0(file)
    if not dtype.hasobject:
        file.seek(0)
        return {"*": untrusted.read_array(file, size)}
    *_, (arrays,) = _Unpickler(file).load().state
    return {word: array.array() for word, array in arrays.items()}
