"""Read weights and long prompts for CLIP as the web UI of AUTOMATIC1111 does.

| in a prompt | meaning |
|---|---|
| `(text)`, `((text))` | the weight of the text is multiplied by 1.1 per bracket |
| `[text]` | the weight is divided by 1.1 |
| `(text:1.3)` | the weight is multiplied by 1.3 |
| `\\(`, `\\)`, `\\[`, `\\]`, `\\\\` | the character itself |
| `BREAK` | the following text starts a new chunk |

A prompt is split into chunks of at most 75 tokens, which CLIP encodes separately, each between its
begin and end tokens. The chunks are joined along the tokens. Embeddings are multiplied by the
weights of their tokens, and then scaled so that the mean of each chunk stays the same.
"""

import itertools
import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from diffusion_jax.text.encoder import WEIGHTS
from diffusion_jax.text.tokenize import TextTokenizer

BREAK = ("BREAK", -1.0)
"""The part of a parsed prompt at which a new chunk starts."""
_FACTORS = {"(": 1.1, "[": 1 / 1.1}
_OPENING = {")": "(", "]": "["}
_MARK = re.compile(r"\\[()\[\]\\]?|[()\[\]]|:\s*(?P<weight>[+-]?[.\d]+)\s*\)|[^\\()\[\]:]+|:")
_MARKED = re.compile(r"(?<!\\)[(\[]|\bBREAK\b")
_OTHER = re.compile(
    r"(?<!\\)\[[^\[\]]*(\|[^\[\]]*|:\s*[.\d]+\s*)\]|\bAND\b|<(lora|lyco|hypernet):[^>]*>"
)
_BREAK = re.compile(r"\s*\bBREAK\b\s*")
_NEAR = 20  # If a full chunk has a comma among so many last tokens, the text after it moves on.


def parse(prompt: str) -> list[tuple[str, float]]:
    """Return the parts of a prompt with their weights. Neighbours differ in their weights.

    A part can be BREAK. As in the web UI, the word BREAK in brackets of another factor than 1 is
    ordinary text.

    Raises:
        ValueError: A weight such as 1.2.3 is not a number.
    """
    parts: list[tuple[str, float]] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}  # The parts after each open bracket.

    def multiply(start: int, factor: float) -> None:
        parts[start:] = [(text, weight * factor) for text, weight in parts[start:]]

    for mark in _MARK.finditer(prompt):
        text, bracket = mark[0], _OPENING.get(mark[0][-1], "")
        if text in opened:
            opened[text].append(len(parts))
        elif text[0] == "\\":
            parts.append((text[1:], 1.0))
        elif bracket and opened[bracket]:
            multiply(opened[bracket].pop(), _factor(mark, bracket))
        else:
            first, *others = _BREAK.split(text)
            parts += [(first, 1.0), *(part for text in others for part in (BREAK, (text, 1.0)))]
    for bracket, starts in opened.items():  # Brackets that are never closed.
        for start in starts:
            multiply(start, _FACTORS[bracket])
    by_weight = itertools.groupby(parts or [("", 1.0)], lambda part: part[1])
    return [("".join(text for text, _ in group), weight) for weight, group in by_weight]


def marked(prompts: Sequence[str]) -> list[str]:
    """Return the prompts that contain brackets without a backslash, or BREAK."""
    return [prompt for prompt in prompts if isinstance(prompt, str) and _MARKED.search(prompt)]


def tokenize(
    tokenizer: TextTokenizer, length: int, prompts: Sequence[str], num_chunks: int = 1
) -> dict[str, np.ndarray]:
    """Return the tokens of prompts, "text_ids", and their weights, "text_weights", [B, N L].

    L is the `length` of a chunk with its begin and end tokens, and N the largest number of chunks
    of a prompt, but at least `num_chunks`. Other prompts are filled up with empty chunks.

    Raises:
        ValueError: A weight is not a number, or a prompt has other syntax of the web UI, such as
            [a:b:0.5], [a|b], AND or <lora:...>.
    """
    end = tokenizer.end
    rows = [_chunks(tokenizer, length - 2, prompt) for prompt in prompts]
    size = len(rows), max(num_chunks, *map(len, rows)), length
    ids, weights = np.full(size, tokenizer.pad, np.int32), np.ones(size, np.float32)
    ids[:, :, :2] = tokenizer.begin or 0, end  # CLIP's always has a token at the beginning.
    for row, chunks in enumerate(rows):
        for n, chunk in enumerate(chunks):
            ids[row, n, 1 : len(chunk) + 2] = [*(id for id, _ in chunk), end]
            weights[row, n, 1 : len(chunk) + 1] = [weight for _, weight in chunk]
    return {"text_ids": ids.reshape(len(rows), -1), WEIGHTS: weights.reshape(len(rows), -1)}


def weighted(
    embeddings: Float[Array, "N L D"], weights: Float[Array, "N L"]
) -> Float[Array, "N L D"]:
    """Multiply the embeddings of chunks by their tokens' weights, and restore each chunk's mean."""
    scaled = embeddings * weights[..., None]
    mean = lambda x: jnp.mean(x, (1, 2), keepdims=True)  # [N, 1, 1]
    return scaled * (mean(embeddings) / mean(scaled))


def _factor(mark: re.Match[str], bracket: str) -> float:
    try:
        return _FACTORS[bracket] if mark["weight"] is None else float(mark["weight"])
    except ValueError as error:
        raise ValueError(
            f"the weight {mark['weight']} in the prompt {mark.string!r} is not a number: write a "
            "weight as in (word:1.3)"
        ) from error


def _chunks(tokenizer: TextTokenizer, room: int, prompt: str) -> list[list[tuple[int, float]]]:
    """Return the chunks of a prompt, lists of at most `room` token ids with their weights."""
    if other := _OTHER.search(prompt):
        raise ValueError(
            f"{other[0]} in the prompt {prompt!r} is not supported: only weights and BREAK are; "
            "write \\[ for a bracket, and give LoRA files by --lora"
        )
    parts = parse(prompt)
    [comma], *tokens = tokenizer.split([",", *(text for text, _ in parts)])
    chunks, chunk = [], []
    for ids, part in zip(tokens, parts, strict=True):
        if part == BREAK:
            chunks.append(chunk)
            chunk = []
            continue
        for id in ids:
            if len(chunk) == room:
                near = [n + 1 for n in range(max(0, room - _NEAR), room) if chunk[n][0] == comma]
                start = near[-1] if near and id != comma else room
                chunks.append(chunk[:start])
                chunk = chunk[start:]
            chunk.append((id, part[1]))
    return [*chunks, chunk] if chunk or not chunks else chunks
