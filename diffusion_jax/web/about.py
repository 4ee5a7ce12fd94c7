"""Describe a model for the page: prompts, captions, its README.md, and why it cannot draw yet.

All of this comes from the workdir of the model's first stage. A diffusers directory has no prompts
and no captions.
"""

import re
from collections.abc import Sequence
from typing import Any

from diffusion_jax import files, runs
from diffusion_jax.draw.model import Model
from diffusion_jax.weights import restore

_CARD = "README.md"


def describe(model: Model) -> dict[str, Any]:
    """Return a dict of texts about a model for the page.

    "prompts" lists the prompts of the config. "examples" lists examples of training captions.
    "card" is the first paragraph of the model's README.md, or "".
    """
    workdir = model.stages[0].workdir
    examples = model.vocabulary.examples if model.vocabulary else ()
    return {"prompts": _prompts(workdir), "examples": list(examples), "card": _card(workdir)}


def unknown(model: Model, prompts: Sequence[str]) -> dict[str, Any]:
    """Find the words of the prompts that the vocabulary of the training captions lacks.

    Return a dict. "words" maps each such word to words and phrases of the captions with a similar
    spelling or meaning. "meaningless" is True if there is such a word and the model's text encoder
    is "hashed", for which words that are not in the training captions have no meaning.
    """
    new = model.vocabulary.unknown(*prompts) if model.vocabulary else {}
    meaningless = bool(new) and model.stages[0].encoder.name == "hashed"
    return {"words": new, "meaningless": meaningless}


def needs_prompt(model: Model) -> bool:
    """Return whether a model cannot draw with an empty prompt.

    This is the case if its training never dropped the captions.
    """
    text = getattr(model.stages[0].settings, "text", None)
    return text is not None and not text.drop_prob


def untrained(workdirs: Sequence[str]) -> list[str]:
    """Return the workdirs that hold a run without any checkpoint."""
    return [w for w in workdirs if (files.path(w) / runs.CONFIG).is_file() and not _steps(w)]


def waiting(workdirs: Sequence[str]) -> str:
    """Return the reason why a model cannot draw yet, or "" if it can.

    `workdirs` holds the workdirs of the model's stages.
    """
    missing = untrained(workdirs)
    if not missing:
        return ""
    every = runs.load(missing[0]).get("save_every")
    when = f", at step {every:,}" if every else ""
    return f"{' and '.join(missing)} cannot draw yet: training saves its first checkpoint later{when}"


def _steps(workdir: str) -> list[int]:
    return restore.steps(restore.absolute(workdir) / runs.CHECKPOINTS)


def _prompts(workdir: str) -> list[str]:
    try:
        return list(runs.load(workdir).get("prompts") or ())
    except (OSError, ValueError):  # A diffusers directory or a file.
        return []


def _card(workdir: str) -> str:
    path = files.path(workdir) / _CARD
    if not path.is_file():
        return ""
    paragraphs = re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="replace"))
    plain = (p for p in paragraphs if p.strip() and not p.lstrip().startswith(("#", "|", "```")))
    return " ".join(next(plain, "").split())
