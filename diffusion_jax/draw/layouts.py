"""The folders in which the programs of benchmarks expect drawn pictures (`sample --layout`)."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from diffusion_jax.data import prompts as prompt_files

_LONGEST = 240  # Bytes of a prompt in a file name, which has at most 255.


class Layout(NamedTuple):
    """The files of a benchmark."""

    names: Sequence[str]
    """The path of each picture in the output folder. `parts` neighbours share a path."""
    texts: Mapping[str, str] = {}
    """The contents of other files, keyed by their paths."""
    parts: int = 1
    """The number of pictures that are joined into one, 1 or 4."""
    square: bool = False
    """Whether the pictures must be square."""


def geneval(file: str, prompts: Sequence[str], num_images: int) -> Layout:
    """Return the layout of GenEval (Ghosh et al. 2023), a folder for each prompt.

    `file` is GenEval's evaluation_metadata.jsonl, whose rows go into the folders. Raises ValueError
    for another file.
    """
    table = prompt_files.table(file)
    if not table or any(not {"tag", "include", "prompt"} <= row.keys() for _, row in table):
        raise ValueError(
            f"--layout=geneval needs GenEval's evaluation_metadata.jsonl as --prompts, but {file} "
            "has rows without tag, include and prompt"
        )
    folders = [f"{n:05}" for n in range(len(prompts))]
    names = [f"{folder}/samples/{k:04}.png" for folder in folders for k in range(num_images)]
    rows = zip(folders, table, strict=True)
    return Layout(names, {f"{folder}/metadata.jsonl": json.dumps(row) for folder, (_, row) in rows})


def geneval2(file: str, prompts: Sequence[str], num_images: int) -> Layout:
    """Return the layout of GenEval 2 (Kamath et al. 2025), pictures and a JSON file of their paths.

    `file` is the benchmark's geneval2_data.jsonl. Raises ValueError for another file, for a prompt
    that occurs twice, and for several pictures per prompt.
    """
    rows = [row for _, row in prompt_files.table(file)]
    if num_images != 1 or not rows or any(not {"prompt", "vqa_list"} <= row.keys() for row in rows):
        raise ValueError(
            "--layout=geneval2 needs --num_images=1, and as --prompts the benchmark's "
            f"geneval2_data.jsonl; you gave {num_images} and {file}"
        )
    if len({*prompts}) < len(prompts):
        raise ValueError(
            f"--layout=geneval2 maps prompts to pictures, but {file} has prompts twice: get the "
            "benchmark's prompts again"
        )
    names = [f"images/{n:05}.png" for n in range(len(prompts))]
    return Layout(names, {"image_paths.json": json.dumps(dict(zip(prompts, names, strict=True)))})


def dpg(file: str, prompts: Sequence[str], num_images: int) -> Layout:
    """Return the layout of DPG-Bench (Hu et al. 2024), a picture of 2x2 pictures for each prompt.

    `file` is the benchmark's folder of prompts, whose files name the pictures. Raises ValueError if
    it is no folder, it has empty files, or `num_images` is neither 4 nor 1, which draws pictures
    alone.
    """
    if num_images not in (1, 4) or not (names := prompt_files.names(file)):
        raise ValueError(
            "--layout=dpg needs --num_images=4 (or 1, for PIC_NUM=1), and as --prompts the "
            f"benchmark's folder dpg_bench/prompts; you gave {num_images} and {file}"
        )
    if empty := len(names) - len(prompts):
        raise ValueError(
            f"--layout=dpg draws a picture for each file in {file}, but {empty} of {len(names)} "
            "are empty: get the benchmark's prompts again"
        )
    files = [f"images/{n}.png" for n in names for _ in range(num_images)]
    return Layout(files, {}, num_images, square=True)  # It cuts squares out of the grid.


def t2i_compbench(file: str, prompts: Sequence[str], num_images: int) -> Layout:
    """Return the layout of T2I-CompBench (Huang et al. 2023), which reads prompts from file names.

    Raises ValueError if a prompt cannot be the part of a file name before the first "_".
    """
    for prompt in prompts:
        if set(prompt) & set("_/\0") or len(prompt.encode()) > _LONGEST:
            raise ValueError(
                f"--layout=t2i_compbench writes prompts into file names, but {prompt!r} in {file} "
                f"contains _ or /, or has more than {_LONGEST} bytes: remove it"
            )
    texts = [prompt for prompt in prompts for _ in range(num_images)]
    return Layout([f"samples/{text}_{n:06}.png" for n, text in enumerate(texts)])


LAYOUTS: Mapping[str, Callable[[str, Sequence[str], int], Layout]] = {
    "geneval": geneval,
    "geneval2": geneval2,
    "dpg": dpg,
    "t2i_compbench": t2i_compbench,
}
"""Maps the name of a benchmark to a function of the file of prompts, the prompts, and the number of
pictures per prompt."""


def joined(images: Sequence[UInt8[np.ndarray, "H W 3"]]) -> UInt8[np.ndarray, "_ _ 3"]:
    """Join four pictures into two rows of two. Return a picture alone unchanged."""
    if len(images) == 1:
        return images[0]
    return np.concatenate([np.concatenate(images[i : i + 2], 1) for i in (0, 2)])
