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
import math
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
_TAG = re.compile(r"\bAND\b|<\w+:[^>]+>")
_TRAILING = re.compile(r"(?s).*?(?P<weight>:\s*[-+]?(\d+\.?|\d*\.\d+))\s*")
_SIGN = re.compile(r"\\.|[()\[\]:|\\]")
_TIMED = re.compile(r"\s*[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?\]")
_CLOSED = re.compile(r"\(:?\)|\[\|*\]")
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


def schedule(prompt: str) -> str:
    """Return the first text that the web UI draws only in some steps, or "" if there is none.

    Such texts are [a:0.5], [a:b:0.5] and [a|b], in which a and b may hold closed brackets. As in
    the web UI, a prompt with | elsewhere, or with a backslash before nothing, has no such text.
    """
    first, opened = "", []  # For each open bracket, the indices of its own signs.
    for sign in _SIGN.finditer(prompt):
        if sign[0] in ("(", "["):
            opened.append([sign.start()])
        elif sign[0] == "\\" or (sign[0] == "|" and not opened):
            return ""
        elif opened and len(sign[0]) == 1:
            opened[-1].append(sign.start())
            if sign[0] in (")", "]"):
                signs = "".join(prompt[n] for n in opened[-1])
                timed = signs in ("[:]", "[::]") and _TIMED.match(prompt, opened[-1][-2] + 1)
                if timed or _CLOSED.fullmatch(signs):
                    start, *_, end = opened.pop()
                    first = first or (prompt[start : end + 1] if timed or "|" in signs else "")
                elif _has_bar(prompt, opened):
                    return ""
                else:
                    opened.clear()  # No closed bracket can hold these, so they are ordinary text.
    return "" if _has_bar(prompt, opened) else first


def tokenize(
    tokenizer: TextTokenizer, length: int, prompts: Sequence[str], num_chunks: int = 1
) -> dict[str, np.ndarray]:
    """Return the tokens of prompts, "text_ids", and their weights, "text_weights", [B, N L].

    L is the `length` of a chunk with its begin and end tokens, and N the least common multiple of
    the prompts' numbers of chunks and of `num_chunks`. Each prompt repeats all of its chunks until
    there are N. Attention to them equals attention to the chunks alone, so that a picture does not
    depend on the other prompts.

    Raises:
        ValueError: A weight is not a number, or a prompt has other syntax of the web UI, such as
            [a:b:0.5], [a|b], AND or <lora:...>.
    """
    end = tokenizer.end
    rows = [_chunks(tokenizer, length - 2, prompt) for prompt in prompts]
    size = len(rows), math.lcm(num_chunks, *map(len, rows)), length
    ids, weights = np.full(size, tokenizer.pad, np.int32), np.ones(size, np.float32)
    ids[:, :, :2] = tokenizer.begin or 0, end  # CLIP's always has a token at the beginning.
    for row, chunks in enumerate(rows):
        for n, chunk in enumerate(chunks * (size[1] // len(chunks))):
            ids[row, n, 1 : len(chunk) + 2] = [*(id for id, _ in chunk), end]
            weights[row, n, 1 : len(chunk) + 1] = [weight for _, weight in chunk]
    return {"text_ids": ids.reshape(len(rows), -1), WEIGHTS: weights.reshape(len(rows), -1)}


def weighted(embeddings: Float[Array, "N L D"], weights: Float[Array, "N L"]) -> Float[Array, "N L D"]:
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


def _has_bar(prompt: str, opened: Sequence[Sequence[int]]) -> bool:
    return any(prompt[n] == "|" for signs in opened for n in signs)


def _check(prompt: str) -> None:
    """Raise ValueError if a prompt has syntax of the web UI other than weights and BREAK."""
    tag, trailing = _TAG.search(prompt), _TRAILING.fullmatch(prompt)
    if other := (tag and tag[0]) or (trailing and trailing["weight"]) or schedule(prompt):
        raise ValueError(
            f"{other} in the prompt {prompt!r} is not supported: only weights in brackets, as in "
            "(word:1.3), and BREAK are; write \\[ for a bracket, and give LoRA files by --lora"
        )


def _chunks(tokenizer: TextTokenizer, room: int, prompt: str) -> list[list[tuple[int, float]]]:
    """Return the chunks of a prompt, lists of at most `room` token ids with their weights."""
    _check(prompt)
    parts = parse(prompt)
    [[comma, *_], *_], *texts = tokenizer.words([",", *(text for text, _ in parts)])
    chunks, chunk = [], []
    for words, part in zip(texts, parts, strict=True):
        if part == BREAK:
            chunks.append(chunk)
            chunk = []
            continue
        for word in words:
            if len(chunk) == room:
                near = [n + 1 for n in range(max(0, room - _NEAR), room) if chunk[n][0] == comma]
                start = near[-1] if near and word[0] != comma else room
                chunks.append(chunk[:start])
                chunk = chunk[start:]
            if len(chunk) + len(word) > room:
                chunks.append(chunk)
                chunk = []
            chunk += [(id, part[1]) for id in word]
    return [*chunks, chunk] if chunk or not chunks else chunks
