"""Convert torch pickles of text encoders to safetensors, for programs that cannot read pickles.

This project does not need the conversion: weights/pretrained.py reads pickles directly.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator

import numpy as np
import safetensors.numpy

from diffusion_jax import files
from diffusion_jax.weights import pretrained, torch_files

_PART = 2**32  # Bytes per output file, which is held in memory while it is written.
_COPIED = ("*.json", "*.model", "*.txt", "*.txt.gz")
_T5 = "encoder.block.0.layer.0.layer_norm.weight"
_LEFT_OUT = ("decoder.", "lm_head.", "encoder.embed_tokens.")  # The last repeats shared.weight.


def convert(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Convert the *.bin files of a text encoder to safetensors files in the folder `out`.

    Dtypes do not change. The decoder of a T5 is left out. No code in the pickles is executed.
    Tokenizer and config are copied.

    Raises:
        FileNotFoundError: the folder has no .bin files.
        ValueError: the folder holds a diffusers model instead of a text encoder, or `out` is not
            empty.
    """
    folder, out = pathlib.Path(folder), pathlib.Path(out)
    pickles = sorted(folder.glob("*.bin"))
    if not pickles:
        raise FileNotFoundError(f"{folder} holds no .bin files to convert")
    config = folder / "config.json"
    if config.is_file() and (kind := pretrained.read_json(config).get("_class_name")):
        raise ValueError(
            f"{folder} holds diffusers' {kind}, not a text encoder: sd_jax reads its .bin files "
            "directly. To write safetensors files, run\n  python -m sd_jax.weights convert "
            f"--from={folder} --to={out}"
        )
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose a new folder")
    arrays = {n: array for path in pickles for n, array in torch_files.map_state_dict(path).items()}
    if _T5 in arrays:
        arrays = {n: array for n, array in arrays.items() if not n.startswith(_LEFT_OUT)}
    out.parent.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    with files.whole(out) as temporary:
        temporary.mkdir()
        for i, part in enumerate(_parts(arrays.items())):
            name = f"model-{i + 1:05}.safetensors"
            files.write_whole(temporary / name, safetensors.numpy.save(part))
            weight_map |= dict.fromkeys(part, name)
        index = {"metadata": {}, "weight_map": weight_map}
        files.write_whole(temporary / pretrained.INDEX, json.dumps(index))
        for path in (path for pattern in _COPIED for path in folder.glob(pattern)):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, temporary / path.name)


def _parts(arrays: Iterable[tuple[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    part, size = {}, 0
    for name, array in arrays:
        if part and size + array.nbytes > _PART:
            yield part
            part, size = {}, 0
        part[name] = np.asarray(array, order="C")  # As safetensors requires.
        size += array.nbytes
    yield part
