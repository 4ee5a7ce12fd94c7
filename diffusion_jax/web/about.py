"""Describe a model on the page before it draws: prompts to try, training captions, and its card.

All of these come from the workdir of the model's first stage. A diffusers directory has no prompts
and no captions.
"""

import re
from collections.abc import Sequence
from typing import Any

from diffusion_jax import runs
from diffusion_jax.draw.loaded import Loaded
from diffusion_jax.machine import files
from diffusion_jax.weights import restore

_CARD = "README.md"


def describe(model: Loaded) -> dict[str, Any]:
    """Return the prompts of the config, examples of captions, and the first words of the card."""
    workdir = model.stages[0].workdir
    examples = model.vocabulary.examples if model.vocabulary else ()
    return {"prompts": _prompts(workdir), "examples": list(examples), "card": _card(workdir)}


def unknown(model: Loaded, prompts: Sequence[str]) -> dict[str, Any]:
    """Describe the words of the prompts that the vocabulary of the training captions lacks.

    Return {"words", "meaningless"}. "words" maps each such word to words and phrases of the
    captions with a similar spelling or meaning. "meaningless" is True if there is such a word and
    the model's text encoder is "hashed", to which a new word means nothing.
    """
    new: dict[str, list[str]] = {}
    for prompt in prompts:
        new |= model.vocabulary.unknown(prompt) if model.vocabulary else {}
    meaningless = bool(new) and model.stages[0].encoder.name == "hashed"
    return {"words": new, "meaningless": meaningless}


def needs_prompt(model: Loaded) -> bool:
    """Return whether a model cannot draw an empty prompt, because training never dropped a text."""
    text = getattr(model.stages[0].settings, "text", None)
    return text is not None and not text.drop_prob


def untrained(workdirs: Sequence[str]) -> list[str]:
    """Return the workdirs that hold a run without any checkpoint."""
    return [w for w in workdirs if (files.path(w) / runs.CONFIG).is_file() and not _steps(w)]


def waiting(workdirs: Sequence[str]) -> str:
    """Return a sentence that says why a model cannot draw yet, or "" if it can."""
    missing = untrained(workdirs)
    if not missing:
        return ""
    every = runs.load(missing[0]).get("save_every")
    when = f", at step {every:,}" if every else ""
    return (
        f"{' and '.join(missing)} cannot draw yet: training saves its first checkpoint later{when}"
    )


def _steps(workdir: str) -> list[int]:
    return restore.steps(restore.absolute(workdir) / runs.CHECKPOINTS)


def _prompts(workdir: str) -> list[str]:
    try:
        return list(runs.load(workdir).get("prompts") or ())
    except (OSError, ValueError):  # A diffusers directory or a file.
        return []


def _card(workdir: str) -> str:
    """Return the first paragraph of the model's README.md below its title, or ""."""
    path = files.path(workdir) / _CARD
    if not path.is_file():
        return ""
    paragraphs = re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="replace"))
    plain = (p for p in paragraphs if p.strip() and not p.lstrip().startswith(("#", "|", "```")))
    return " ".join(next(plain, "").split())
