"""Read text embeddings that were computed before training and stored beside the images.

A file (.npy, .npz or .safetensors) holds the embeddings of one text: a float array [tokens, width]
without padding. Beside pictures, pickles are refused, because opening them can run arbitrary code.
NeMo's pickles, which `data attach` joins, are read by an unpickler that creates arrays and
dictionaries, and never runs code from a file.
"""

import io
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from diffusion_jax.config.settings import EMBEDDINGS, TEXTS
from diffusion_jax.files import untrusted

_ARRAYS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    *((f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}


def read(contents: bytes, name: str) -> Float[np.ndarray, "L D"]:
    """Return the embeddings in a file as float32 [tokens, width].

    If the file holds several arrays, the one named "encodings" is read. The name may have a prefix,
    as in NeMo's "embeddings_t5_xxl/encodings".

    Args:
        contents: the file's bytes.
        name: the file's name, for error messages. Its suffix selects the format. "pickle:KEY" is a
            pickle with the array KEY; see `read_pickle`.

    Raises:
        ValueError: the suffix is unknown, the file is damaged, there are several arrays but not
            exactly one named "encodings", or the array is not a float matrix or not finite.
    """
    suffix, colon, key = name.rsplit(".")[-1].lower(), *name.partition(":")[1:]
    if not colon:
        check_suffix(suffix)
    if contents.startswith(untrusted.POINTER):
        raise ValueError(f"the file of embeddings is {untrusted.IS_POINTER}")
    try:
        array = read_pickle(contents, key) if colon else _READERS[suffix](contents)
    except Exception as error:  # Damaged files raise exceptions of many types.
        raise ValueError(f"cannot read the embeddings {name}: {error}") from error
    if array.ndim != 2 or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"the embeddings {name} are {array.dtype}{list(array.shape)}: they must be a float array [tokens, width]"
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


def read_pickle(contents: bytes, key: str = "") -> Float[np.ndarray, "L D"]:
    """Return the embeddings in a pickle of nested dictionaries, without running code in it.

    Args:
        contents: The bytes of the pickle.
        key: The path of the array, such as "embeddings_t5_xxl/encodings". "" reads the array called
            "encodings" or, if there is none, the only array.

    Raises:
        ValueError: The array is missing or is not floats [tokens, width], or the pickle holds
            anything but arrays and plain values.
    """
    try:
        tree = _ArrayUnpickler(io.BytesIO(contents)).load()
    except Exception as error:  # A damaged pickle can raise anything.
        raise ValueError(f"cannot read embeddings from a pickle: {error}") from error
    arrays = dict(_flat(tree))
    names = [name for name in arrays if name == key or (not key and _last(name) == "encodings")]
    names = names or ([] if key else list(arrays))
    if len(names) != 1:
        raise ValueError(f"the pickle holds {', '.join(arrays) or 'no arrays'}: choose one array with --key")
    array = arrays[names[0]]
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        actual = f"{array.dtype}{list(array.shape)}"
        raise ValueError(f"{names[0]} in the pickle is {actual}: expected floats [tokens, width]")
    return array


class _ArrayUnpickler(untrusted.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct":  # numpy's would allocate any shape that the file names.
            return lambda *_: np.ndarray((0,), "b")  # The array's state holds the real shape.
        if (module, name) in _ARRAYS:
            return super().find_class(module, name)
        raise ValueError(f"the pickle refers to {module}.{name}, but may hold only arrays")


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(tree, np.ndarray):
        yield prefix.rstrip("/"), tree
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from _flat(value, f"{prefix}{name}/")


def _last(name: str) -> str:
    return name.rpartition("/")[2]


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
