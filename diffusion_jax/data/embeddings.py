"""Files of embeddings, computed before training and stored beside the images.

A file holds one text as an array [tokens, width] without padding, of any float type: .npy, .npz or
.safetensors. Pickles can run any code when they are opened, so they are never read.
"""

import io
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from diffusion_jax.config.settings import EMBEDDINGS
from diffusion_jax.machine import untrusted


def read(contents: bytes, name: str) -> Float[np.ndarray, "L D"]:
    """The array [tokens, width] of one file; `name` tells its format and stands in the errors.

    Of several arrays it is the one called "encodings", also at the end of a path such as NeMo's
    "embeddings_t5_xxl/encodings". ValueError if there is none, or it is no matrix of floats.
    """
    suffix = name.rsplit(".")[-1].lower()
    check_suffix(suffix)
    try:
        array = _READERS[suffix](contents)
    except Exception as error:  # Damaged files fail in ways of their own.
        raise ValueError(f"cannot read the embeddings {name}: {error}") from error
    if array.ndim != 2 or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"the embeddings {name} are {array.dtype}{list(array.shape)}: "
            "they must be floats [tokens, width]"
        )
    return array.astype(np.float32)


def check_suffix(text: str) -> None:
    """ValueError unless texts of this suffix are captions or embeddings that can be read."""
    last = text.rsplit(".")[-1]
    if last in ("pickle", "pkl", "pt", "pth"):
        raise ValueError(
            f"texts of suffix {text!r} are pickles, which can run any code when opened: convert "
            "them once to .npy with numpy.save(file, data['embeddings_t5_xxl']['encodings']), "
            "as docs/data.md shows"
        )
    if last != "txt" and last not in EMBEDDINGS:
        raise ValueError(
            f"texts of suffix {text!r}: it must end in txt (captions) or {', '.join(EMBEDDINGS)} "
            "(precomputed embeddings)"
        )


def _read_npz(contents: bytes) -> np.ndarray:
    return _choose(untrusted.read_archive(io.BytesIO(contents)))


def _read_safetensors(contents: bytes) -> np.ndarray:
    import safetensors.numpy  # Few data sets need it.

    return _choose(safetensors.numpy.load(contents))


def _choose(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    names = [name for name in arrays if name.rsplit("/")[-1] == "encodings"] or list(arrays)
    if len(names) != 1:
        raise ValueError(f"it holds the arrays {list(arrays)}: call the right one 'encodings'")
    return arrays[names[0]]


_READERS = {
    "npy": lambda contents: untrusted.read_array(io.BytesIO(contents), len(contents)),
    "npz": _read_npz,
    "safetensors": _read_safetensors,
}
