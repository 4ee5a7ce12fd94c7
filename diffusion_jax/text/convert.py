"""Torch pickles to safetensors, once, for weights that are published as pickles alone (T5 11B)."""

import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

from diffusion_jax import pretrained

_PART = 2**32  # Bytes of a shard, which is held in memory while it is written.
_COPIED = ("*.json", "*.model", "*.txt", "*.txt.gz")
_LEFT_OUT = ("decoder.", "lm_head.", "encoder.embed_tokens.")  # The last is shared.weight again.


def convert(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Writes what encoders need of FOLDER's *.bin to OUT as safetensors, types unchanged.

    ImportError that says how to get torch; FileNotFoundError or ValueError if FOLDER has no
    pickles or OUT holds something.
    """
    folder, out = pathlib.Path(folder), pathlib.Path(out)
    pickles = sorted(folder.glob("*.bin"))
    if not pickles:
        raise FileNotFoundError(f"{folder} holds no .bin files to convert")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: give a new folder")
    torch_save = _torch()[1]
    out.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    for i, part in enumerate(_parts(_tensors(pickles))):
        name = f"model-{i + 1:05}.safetensors"
        torch_save(part, out / name)
        where |= dict.fromkeys(part, name)
    (out / pretrained.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    for path in (path for pattern in _COPIED for path in folder.glob(pattern)):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, out / path.name)


def _torch() -> tuple[Any, Any]:
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(f"reading pickles needs torch: pip install torch ({error})") from error
    return torch, save_file


def _tensors(pickles: Iterable[pathlib.Path]) -> Iterator[tuple[str, Any]]:
    torch = _torch()[0]
    for path in pickles:
        # weights_only: tensors and nothing that runs. mmap: read when they are used.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        names = [name for name in tensors if not name.startswith(_LEFT_OUT)]
        yield from ((name, tensors[name].contiguous()) for name in names)


def _parts(tensors: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    part, size = {}, 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > _PART:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part
