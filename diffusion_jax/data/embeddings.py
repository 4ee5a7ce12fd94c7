"""Read text embeddings that were computed before training and stored beside the images.

A file (.npy, .npz or .safetensors) holds the embeddings of one text: a float array [tokens, width]
without padding. Pickles are refused, because opening them can run arbitrary code.
"""

import io
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from diffusion_jax.config.settings import EMBEDDINGS, TEXTS
from diffusion_jax.files import untrusted


def read(contents: bytes, name: str) -> Float[np.ndarray, "L D"]:
    """Return the embeddings in a file as float32 [tokens, width].

    If the file holds several arrays, the one named "encodings" is read. The name may have a prefix,
    as in NeMo's "embeddings_t5_xxl/encodings".

    Args:
        contents: the file's bytes.
        name: the file's name, for error messages. Its suffix selects the format.

    Raises:
        ValueError: the suffix is unknown, the file is damaged, there are several arrays but not
            exactly one named "encodings", or the array is not a float matrix or not finite.
    """
    suffix = name.rsplit(".")[-1].lower()
    check_suffix(suffix)
    if contents.startswith(untrusted.POINTER):
        raise ValueError(f"the file of embeddings is {untrusted.IS_POINTER}")
    try:
        array = _READERS[suffix](contents)
    except Exception as error:  # Damaged files raise exceptions of many types.
        raise ValueError(f"cannot read the embeddings {name}: {error}") from error
    if array.ndim != 2 or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"the embeddings {name} are {array.dtype}{list(array.shape)}: "
            "they must be a float array [tokens, width]"
        )
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ValueError(
            f"the embeddings {name} hold NaN or infinite values: encode the text again (T5 in "
            "bfloat16 or float32, as float16 overflows)"
        )
    return array


def check_suffix(text: str) -> None:
    """Check that files with the suffix `text` can be read as captions or embeddings.

    Files of captions have the suffix "txt" or "caption", and files of embeddings have "npy", "npz"
    or "safetensors". Only the part after the last dot counts, such as "npy" in "t5.npy".

    Raises:
        ValueError: the suffix is unknown, or belongs to pickles.
    """
    last = text.rsplit(".")[-1]
    if last in ("pickle", "pkl", "pt", "pth"):
        raise ValueError(
            f"files with suffix {text!r} are pickles, which can run arbitrary code when opened: "
            "convert them to .npy with numpy.save(file, data['embeddings_t5_xxl']['encodings']), "
            "as docs/data.md shows"
        )
    if last not in (*TEXTS, *EMBEDDINGS):
        raise ValueError(
            f"the suffix of text files is {text!r}: it must end in {' or '.join(TEXTS)} (captions) "
            f"or {', '.join(EMBEDDINGS)} (precomputed embeddings); set data.text to such a suffix"
        )


def _read_safetensors(contents: bytes) -> np.ndarray:
    import safetensors.numpy  # Imported here, because few data sets need it.

    return _choose(safetensors.numpy.load(contents))


def _choose(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    names = [name for name in arrays if name.rsplit("/")[-1] == "encodings"] or list(arrays)
    if len(names) != 1:
        raise ValueError(f"the file holds the arrays {list(arrays)}: name one of them 'encodings'")
    return arrays[names[0]]


_READERS = {
    "npy": lambda contents: untrusted.read_array(io.BytesIO(contents), len(contents)),
    "npz": lambda contents: _choose(untrusted.read_archive(io.BytesIO(contents))),
    "safetensors": _read_safetensors,
}
