"""The cost of embeddings: the disk of a store, or the work of encoding in training instead."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from diffusion_jax.precache import quantize

_SETS = (1_000_000, 100_000_000, 676_000_000)  # The last is NeMo's.
_SHARD_BYTES, _INDEX_BYTES = 32, 40  # Of a text, beside its rows.
# TFLOP of a training sample without its text, from docs/benchmarks.md.
_MODELS = {"base64_500m": 1.003, "base64_2b": 3.947}


def bytes_per_caption(tokens: int | float, width: int, format: str) -> float:
    """Bytes of a store for each caption, its index included; `tokens` are the mean rows of one."""
    groups = quantize.num_groups(width)
    row = {"int8": width + 2 * groups, "bfloat16": 2 * width, "float32": 4 * width}[format]
    return float(tokens * row + _SHARD_BYTES + _INDEX_BYTES)


def table(
    lengths: Int[np.ndarray, "N"],
    *,
    width: int,
    max_tokens: int,
    format: str,
    captions: int,
    free: int | None,
    flops: float,
    parameters: int,
) -> str:
    """Lines for people; `lengths` are the rows of a sample of the captions."""
    tokens = float(lengths.mean())
    formats = ("int8", "bfloat16", "float32")
    each = [bytes_per_caption(tokens, width, f) for f in formats]
    padded = 2.0 * max_tokens * width
    rows = [["captions", *formats, "padded bf16"]]
    rows += [["1", *(f"{b:,.0f} B" for b in (*each, padded))]]
    rows += [[f"{n:,}", *(_size(n * b) for b in (*each, padded))] for n in (captions, *_SETS)]
    chosen = each[formats.index(format)]
    online = flops / 1e12
    shares = [f"{100 * online / (online + t):.0f} % of a step of {m}" for m, t in _MODELS.items()]
    return "\n".join(
        [
            f"{captions:,} captions; of {len(lengths):,} of them {tokens:.1f} tokens on average, "
            f"{lengths.max()} at most, of {max_tokens} x {width}",
            *_aligned(rows),
            f"this store: {format}, {padded / chosen:.1f} times smaller than padded bf16; at most "
            f"{_size(captions * chosen)} (each different caption once)"
            + ("" if free is None else f", {_size(free)} free"),
            f"online instead: {parameters / 1e6:,.0f} M parameters, {_flop(flops)} for each image, "
            f"every time it is seen: {', '.join(shares)}",
        ]
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = lambda row: "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True))
    return [f"  {line(row)}" for row in rows]


def _size(size: int | float) -> str:
    units = ("B", "kB", "MB", "GB", "TB")
    power = min(int(math.log10(max(size, 1)) / 3), len(units) - 1)
    return f"{size / 1000**power:.3g} {units[power]}"


def _flop(flops: float) -> str:
    return f"{flops / 1e12:.2f} TFLOP" if flops > 1e11 else f"{flops / 1e9:.3g} GFLOP"
