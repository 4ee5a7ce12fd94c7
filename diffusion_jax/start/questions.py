"""Ask the user how to train on few, tall or large pictures; flags can answer in advance."""

import sys
from collections.abc import Mapping, Sequence

from absl import logging

from diffusion_jax.logs.progress import counted
from diffusion_jax.start.training_pictures import PictureSet

ASK = "ask"
"""The flag value that makes the command ask the user."""
QUESTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "finetune": (
        "How to train on few pictures",
        {
            "no": "train a new model on these pictures alone",
            "lora": "add a LoRA to this project's trained model, and keep its knowledge",
            "full": "train all weights of this project's model, and forget other words",
        },
    ),
    "tall": (
        "What to do with tall and wide pictures",
        {
            "crop": "cut off both ends of the longer side",
            "pad": "add white borders that make a square",
            "keep": "train on several shapes, so that little is cut off",
        },
    ),
    "shrink": (
        "Whether to write small copies of large pictures first",
        {"no": "read the original files in every epoch", "yes": "write small copies and read these"},
    ),
}
"""Maps each flag to its subject and the meanings of its answers. The default comes first."""
_TIMED = 32  # The smallest number of pictures whose reading takes longer than its start.
_SLOW = 50  # Pictures read per second. Two CPU cores train the smallest model about this fast.
FEW = 1_000  # With fewer pictures, a model that is trained from scratch mostly memorises them.
_TALL = 1.5  # A set is tall if the sides of a twentieth of its pictures differ by a larger factor.


def answer(flag: str, value: str, matters: bool, reason: str) -> str:
    """Return the answer to a question: `value` or, if it is ASK, what the user types.

    Without a terminal, and if the answer hardly `matters` for this data set, ASK means the default.

    Args:
        flag: the question, a key of QUESTIONS.
        value: the value of the flag.
        matters: whether to ask.
        reason: why the answer matters, in one or more sentences.
    """
    answers = QUESTIONS[flag][1]
    default = next(iter(answers))
    if value != ASK or not matters:
        return default if value == ASK else value
    print(f"\n{reason}")
    for name, meaning in answers.items():
        chosen = " (default)" if name == default else ""
        print(f"  --{flag}={name}: {meaning}{chosen}", flush=True)
    if not sys.stdin.isatty():
        return default
    prompt = f"{' / '.join(answers)} [{default}]: "
    while (reply := input(prompt).strip() or default) not in answers:
        print(f"Type one of {', '.join(answers)}.")
    return reply


def go_on(doubts: Sequence[str]) -> None:
    """Log what looks wrong in the data as warnings and, in a terminal, ask whether to go on.

    Raises ValueError if the user does not want to.
    """
    for doubt in doubts:
        logging.warning("%s", doubt)
    asked = doubts and sys.stdin.isatty()
    if asked and input("Continue? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ValueError("you did not continue: mend the data, and start again")


def method(value: str, photos: PictureSet, trained: str) -> str:
    """Return how to train: "no" (a new model), "lora" or "full".

    Args:
        value: the value of --finetune.
        photos: the pictures; the user is asked about fewer than 1,000.
        trained: the workdir of the model that can be fine-tuned; "" if there is none.

    Raises:
        ValueError: `value` is "lora" or "full", but there is no such model, or no caption.
    """
    possible = bool(trained and photos.report["words"])
    if not possible and value not in (ASK, "no"):
        raise ValueError(
            f"--finetune={value} needs captions, and the folder models/ in a checkout of this "
            "repository, and it cannot be combined with --text_weights: leave --finetune out"
        )
    return answer(
        "finetune",
        value,
        possible and len(photos.records) < FEW,
        f"A data set of {counted(len(photos.records), 'picture')} is small: a new model mostly "
        "memorises it. If the pictures "
        f"resemble emoji, this project's trained model ({trained}) learns them in minutes.",
    )


def tall(value: str, photos: PictureSet) -> str:
    """Return what to do with tall and wide pictures: "crop", "pad" or "keep".

    `value` is the value of --tall. The user is asked if at least a twentieth of the pictures are
    far from square.
    """
    aspect = photos.report["aspect"]["p95"]
    return answer(
        "tall",
        value,
        aspect > _TALL,
        "Training uses squares, but in a twentieth of the pictures the longer side is at least "
        f"{aspect:.2g} times the shorter one.",
    )


def shrink(value: str, photos: PictureSet, size: int) -> bool:
    """Return whether to write small copies of the pictures, with shorter sides of `size` pixels.

    `value` is the value of --shrink. The user is asked if most pictures are larger than `size`, and
    reading them is slow. Of a dozen pictures, the measured speed is mostly that of the start.
    """
    timed = len(photos.records) >= _TIMED
    matters = timed and photos.speed <= _SLOW and photos.side > size
    reason = (
        f"Reading is slow: {photos.speed:.2g} pictures per second, in every epoch. The pictures' "
        f"shorter sides have {photos.side:,.0f} pixels (median), but {size} are enough."
    )
    return answer("shrink", value, matters, reason) == "yes"
