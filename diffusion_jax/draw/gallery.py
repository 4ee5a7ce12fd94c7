"""What the drawing commands read and write: prompts, a sheet and metadata.jsonl."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import UInt8

from diffusion_jax.machine import files, sheets
from diffusion_jax.text import TextEncoder


def read_prompts(given: Sequence[str], path: str | None) -> list[str]:
    """The prompts of flags, and the lines of a file that are not blank; OSError if there is none.

    ValueError if it is not UTF-8.
    """
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines() if path else []
    return [*given, *(line for line in lines if line.strip())]


def warn_of_cuts(encoder: TextEncoder, prompts: Sequence[str]) -> None:
    """Logs what each prompt loses that is longer than the encoder reads."""
    for prompt, lost in zip(prompts, encoder.cut_off(prompts), strict=True):
        if lost:
            kept = encoder.max_tokens
            logging.warning(
                "%r is longer than %d tokens, and its end is not read: %r", prompt, kept, lost
            )


def write_index(
    out: pathlib.Path,
    lines: Sequence[Mapping[str, Any]],
    images: Sequence[UInt8[np.ndarray, "H W 3"]],
    captions: Sequence[str],
) -> None:
    """metadata.jsonl, a line an image, and sheet.png with all images over their captions."""
    files.write_whole(out / "metadata.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    sheets.write_png(out / "sheet.png", sheets.contact_sheet(np.stack(images), captions))
    logging.info("wrote %d images, sheet.png and metadata.jsonl to %s", len(images), out)
