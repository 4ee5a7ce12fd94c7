"""Torch pickles of text encoders to safetensors, for programs that take these alone.

Here nothing needs them: pickles open as they are (see weights/pretrained.py).
"""

import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator

import numpy as np
import safetensors.numpy

from diffusion_jax.machine import files
from diffusion_jax.weights import pretrained, torch_files

_PART = 2**32  # Bytes of a shard, which is held in memory while it is written.
_COPIED = ("*.json", "*.model", "*.txt", "*.txt.gz")
_T5 = "encoder.block.0.layer.0.layer_norm.weight"
_LEFT_OUT = ("decoder.", "lm_head.", "encoder.embed_tokens.")  # The last is shared.weight again.


def convert(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Writes what encoders need of FOLDER's *.bin to OUT as safetensors, types unchanged.

    Of a T5 that is all but its decoder. FileNotFoundError or ValueError if FOLDER has no pickles,
    or is of diffusers, or OUT holds something. The pickles are not run: see torch_files.
    """
    folder, out = pathlib.Path(folder), pathlib.Path(out)
    pickles = sorted(folder.glob("*.bin"))
    if not pickles:
        raise FileNotFoundError(f"{folder} holds no .bin files to convert")
    config = folder / "config.json"
    if config.is_file() and (kind := pretrained.read_json(config).get("_class_name")):
        raise ValueError(
            f"{folder} holds diffusers' {kind} and no text encoder: its .bin files open as "
            "they are, and python -m sd_jax.weights convert --from=FOLDER writes other formats"
        )
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: give a new folder")
    arrays = {n: array for path in pickles for n, array in torch_files.map_state_dict(path).items()}
    if _T5 in arrays:
        arrays = {n: array for n, array in arrays.items() if not n.startswith(_LEFT_OUT)}
    out.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    for i, part in enumerate(_parts(arrays.items())):
        name = f"model-{i + 1:05}.safetensors"
        files.write_whole(out / name, safetensors.numpy.save(part))
        where |= dict.fromkeys(part, name)
    files.write_whole(out / pretrained.INDEX, json.dumps({"metadata": {}, "weight_map": where}))
    for path in (path for pattern in _COPIED for path in folder.glob(pattern)):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, out / path.name)


def _parts(arrays: Iterable[tuple[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    part, size = {}, 0
    for name, array in arrays:
        if part and size + array.nbytes > _PART:
            yield part
            part, size = {}, 0
        part[name] = np.asarray(array, order="C")  # Which safetensors wants.
        size += array.nbytes
    yield part
