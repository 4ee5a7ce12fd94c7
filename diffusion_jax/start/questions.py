"""Ask the user how to train on few, tall or large pictures; flags can answer in advance."""

import sys
from collections.abc import Mapping
from typing import NamedTuple

from diffusion_jax.start import finetuned
from diffusion_jax.start.finetuned import Shipped
from diffusion_jax.start.training_pictures import PictureSet

ASK = "ask"
"""The flag value that makes the command ask the user."""
_SLOW = 50  # Pictures read per second. Two CPU cores train the smallest model about this fast.
_FEW = 1_000  # With fewer pictures, a model that is trained from scratch mostly memorises them.


class Question(NamedTuple):
    """A question about how to train, which the user answers by a flag or in the terminal."""

    flag: str
    about: str
    """The subject of the question, at the start of the flag's --help."""
    answers: Mapping[str, str]
    """The meaning of each answer; the default comes first."""


FINETUNE = Question(
    "finetune",
    "How to train on few pictures",
    {
        finetuned.NO: "train a new model on these pictures alone",
        finetuned.LORA: "add a LoRA to this project's trained model, and keep its knowledge",
        finetuned.FULL: "train all weights of this project's model, and forget other words",
    },
)
TALL = Question(
    "tall",
    "What to do with tall and wide pictures",
    {
        "crop": "cut off both ends of the longer side",
        "pad": "add white borders that make a square",
        "keep": "train on several shapes, so that little is cut off",
    },
)
SHRINK = Question(
    "shrink",
    "Whether to write small copies of large pictures first",
    {"no": "read the original files in every epoch", "yes": "write small copies and read these"},
)


def answer(question: Question, value: str, reason: str) -> str:
    """Return `value` or, if it is ASK, ask the user and return the answer.

    If the standard input is not a terminal, return the default answer, and print the reason and
    the flags for all answers.

    Args:
        question: the question.
        value: the value of the question's flag.
        reason: why the question matters for this data set, in one or more sentences.
    """
    if value != ASK:
        return value
    default, *others = question.answers
    if not sys.stdin.isatty():
        print(f"\n{reason}\n  --{question.flag}={default}: {question.answers[default]} (chosen)")
        for name in others:
            print(f"  --{question.flag}={name}: {question.answers[name]}", flush=True)
        return default
    print(f"\n{reason}")
    for name, meaning in question.answers.items():
        print(f"  {name:<6} {meaning}")
    prompt = f"{' / '.join(question.answers)} [{default}]: "
    while (reply := input(prompt).strip() or default) not in question.answers:
        print(f"Type one of {', '.join(question.answers)}.")
    return reply


def method(value: str, photos: PictureSet, shipped: Shipped | None) -> str:
    """Return how to train: finetuned.NO, finetuned.LORA or finetuned.FULL.

    `value` is the value of --finetune. If it is ASK, `answer` asks the user, but only for a set of
    fewer than 1,000 pictures with captions, and with a shipped model. In all other cases, ASK means
    finetuned.NO. Raises ValueError if `value` is LORA or FULL, but there is no shipped model or no
    caption.
    """
    count = len(photos.records)
    if not shipped or not shipped.exists() or not photos.report["words"]:
        if value not in (ASK, finetuned.NO):
            raise ValueError(
                f"--finetune={value} needs captions, and the folder models/ in a checkout of this "
                "repository, and it cannot be combined with --text_weights: leave --finetune out"
            )
        return finetuned.NO
    if value == ASK and count >= _FEW:
        return finetuned.NO
    reason = (
        f"{count:,} pictures are few: a new model mostly memorises them. If they resemble emoji, "
        f"this project's trained model ({shipped.workdir}) learns them in minutes."
    )
    return answer(FINETUNE, value, reason)


def tall(value: str, photos: PictureSet) -> str:
    """Return what to do with tall and wide pictures: "crop", "pad" or "keep".

    `value` is the value of --tall. If it is ASK and many pictures are tall or wide, `answer` asks
    the user. If it is ASK and few pictures are tall or wide, the result is "crop".
    """
    if value == ASK and not photos.is_tall:
        return next(iter(TALL.answers))
    reason = (
        f"Training uses squares, but in a twentieth of the pictures the longer side is at least "
        f"{photos.report['aspect']['p95']:.2g} times the shorter one."
    )
    return answer(TALL, value, reason)


def shrink(value: str, photos: PictureSet, size: int) -> bool:
    """Return whether to write small copies of the pictures, with shorter sides of `size` pixels.

    `value` is the value of --shrink. If it is ASK, and if most pictures are larger than `size` and
    reading them is slow, `answer` asks the user. In all other cases, ASK means "no".
    """
    if value == ASK and (photos.speed > _SLOW or photos.side <= size):
        return False
    reason = (
        f"Reading is slow: {photos.speed:.2g} pictures per second, in every epoch. The pictures' "
        f"shorter sides have {photos.side:,.0f} pixels (median), but {size} are enough."
    )
    return answer(SHRINK, value, reason) == "yes"
