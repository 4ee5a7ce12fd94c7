"""Measure how well fine-tuning on ten pictures teaches a new word, and what the model forgets.

    python -m benchmarks.finetuning pictures --out=runs/pink
    python -m benchmarks.finetuning score --workdir=runs/quickstart --workdir=runs/pink_lora

The first command writes ten captioned pictures of digits in pink, a colour that is not in the quick
start's data. The second command draws with the model of each --workdir. The quick start's
classifier, extended to recognise pink, judges the pictures. A score is the share of pictures with
the right digit, ink colour and paper colour. Prompts with the new word (50 prompts, 40 of them not
among the ten captions) and prompts with the old words have separate scores. See
docs/finetuning.md.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from diffusion_jax.examples.digits import judge as judges
from diffusion_jax.examples.digits import pictures as digits
from diffusion_jax.examples.digits.pictures import Prompt

INK, COLOUR = "pink", (250, 110, 190)
SIZE = 16
_OLD_EVERY, _NEW_IMAGES = 2, 2


def ten_prompts() -> list[Prompt]:
    """Return ten prompts with the new ink: each digit once and each paper colour twice."""
    return [Prompt(i, INK, list(digits.PAPERS)[i % len(digits.PAPERS)]) for i in range(10)]


def write_pictures(out: pathlib.Path) -> None:
    """Write the ten pictures as PNG files, with captions in text files of the same name."""
    glyphs, random = digits.load("train"), np.random.RandomState(0)
    out.mkdir(parents=True, exist_ok=True)
    for prompt in ten_prompts():
        glyph = glyphs.images[random.choice(np.flatnonzero(glyphs.digits == prompt.digit))]
        ink, paper = (np.array(rgb, np.float32) for rgb in (COLOUR, digits.PAPERS[prompt.paper]))
        image = digits.colour(digits.enlarge(glyph[None], SIZE)[0], ink, paper)
        Image.fromarray(image).save(out / f"{prompt.digit}.png")
        (out / f"{prompt.digit}.txt").write_text(f"{digits.caption(prompt)}\n")


def score(workdir: str, old: Sequence[str]) -> dict[str, float]:
    """Draw with the run in `workdir` and return the shares of correct pictures, from 0 to 1.

    "new" is the share for prompts with the new word, and "old" the share for the prompts `old`.
    "new_ink" is the share of pictures that have the new ink, for prompts with the new word.
    """
    from imagen_jax import cascade  # Slow to import; only drawing needs it.

    stages, judge = [cascade.load_model(workdir)], judges.fit_judge()
    new = [Prompt(digit, INK, paper) for digit in range(10) for paper in digits.PAPERS]
    new = [digits.caption(prompt) for prompt in new] * _NEW_IMAGES
    images = cascade.draw(stages, [*new, *old], range(len(new) + len(old)))[-1]
    read = [digits.caption(prompt) for prompt in judge(images)]
    right = np.array([a == b for a, b in zip(read, [*new, *old], strict=True)])
    inks = np.array([INK in text for text in read[: len(new)]])
    return {
        "new": float(right[: len(new)].mean()),
        "new_ink": float(inks.mean()),
        "old": float(right[len(new) :].mean()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command `pictures` or `score`, as named by the first argument."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", choices=("pictures", "score"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/pink"))
    parser.add_argument("--workdir", action="append", default=[])
    args = parser.parse_args(arguments)
    if args.command == "pictures":
        return write_pictures(args.out)
    old = digits.seen_prompts()[::_OLD_EVERY]
    digits.INKS[INK] = COLOUR  # From here on, the classifier knows the new ink.
    for workdir in args.workdir:
        print(json.dumps({"workdir": workdir, **score(workdir, old)}), flush=True)


if __name__ == "__main__":
    main()
