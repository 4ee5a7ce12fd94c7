"""Describe a drawing in the text that the web UI of AUTOMATIC1111 stores in PNG files.

Its tab PNG Info, and many programs that list pictures, read the text under the key "parameters":

    a red fox
    Negative prompt: blurred
    Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7.5, Seed: 3, Size: 512x512
"""

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from diffusion_jax.diffusion import samplers

_PATHS = ("model", "workdir", "guide", "lora", "embedding")
"""Entries of metadata that hold paths, of which the text keeps only the names of the files."""
_PLACED = (
    "file_name",
    "text",
    "negative_prompt",
    "sampler",
    "steps",
    "grid",
    "guidance",
    "seed",
    "height",
    "width",
    "size",
    "strength",
    "model",
    "workdir",
    "image",
    "mask",
    "low_res",
    "smaller",
    "embeddings",
    "stages",
)
"""Entries of metadata that the text shows under another name, or leaves out."""


def parameters(line: Mapping[str, Any], height: int, width: int) -> str:
    """Return the text for a picture of this height and width.

    `line` is the picture's line of metadata.jsonl.
    """
    first, *later = line.get("stages") or [{}]
    card = {**first, **line}
    strength = card.get("strength")
    settings = {
        "Steps": card.get("steps"),
        "Sampler": samplers.WEB_NAMES.get(card.get("sampler", ""), card.get("sampler")),
        "Schedule type": samplers.web_schedule(card.get("grid", "")),
        "CFG scale": card.get("guidance"),
        "Seed": card["seed"],
        "Size": f"{width}x{height}",
        "Model": _named("model", card.get("model", card.get("workdir", ""))),
        "Denoising strength": strength[0] if isinstance(strength, list) else strength,
        **{name: _named(name, value) for name, value in card.items() if name not in _PLACED},
        **{
            f"Stage {n}": {name: _named(name, value) for name, value in stage.items()}
            for n, stage in enumerate(later, 2)
        },
    }
    listed = ", ".join(f"{k}: {_quoted(v)}" for k, v in settings.items() if v not in (None, ""))
    negative = card.get("negative_prompt")
    second = [f"Negative prompt: {negative}"] if negative else []
    return "\n".join([card["text"], *second, listed]).strip()


def _named(name: str, value: Any) -> Any:
    if name not in _PATHS:
        return value
    paths = value if isinstance(value, list) else [value]
    return ", ".join(os.path.basename(str(path).rstrip("/")) for path in paths)


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if re.search(r"[,:\n\"]", text) else text
