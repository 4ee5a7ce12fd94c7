"""Propose shapes for data.aspect_buckets, and check whether a model can be trained on them."""

import fractions
from collections.abc import Sequence

Shape = tuple[int, int]
"""Height and width in pixels."""


def up_to(size: int, unit: int, max_aspect: float = 2.0) -> tuple[Shape, ...]:
    """Return shapes for data.aspect_buckets that have at most size x size pixels.

    Args:
        size: Side of the model's square pictures in pixels.
        unit: The sides of all shapes are multiples of this number of pixels, if `size` is a
            multiple of it.
        max_aspect: The largest ratio of the longer to the shorter side.
    """
    wide = []
    for width in range(size, int(size * max_aspect) + 1, unit):
        height = size**2 // width // unit * unit
        if height and width <= max_aspect * height and (not wide or height < wide[-1][0]):
            wide.append((height, width))
    return tuple(sorted({*wide, *(shape[::-1] for shape in wide)}))


def check(buckets: Sequence[Sequence[int]], size: int, unit: int, *, resize: int = 0) -> None:
    """Raise ValueError if a model cannot be trained on these shapes.

    Args:
        buckets: The config's data.aspect_buckets.
        size: Height and width of the model's square pictures in pixels.
        unit: Each side must be a multiple of this number of pixels.
        resize: The config's data.resize, which must be 0 if there are buckets.
    """
    if buckets and resize:
        raise ValueError(
            f"data.resize is {resize}, but data.aspect_buckets resizes each picture until it "
            "just covers its bucket: set data.resize to 0"
        )
    for bucket in buckets:
        holds = f"data.aspect_buckets holds {bucket!r}"
        if len(bucket) != 2 or not all(isinstance(side, int) and side > 0 for side in bucket):
            raise ValueError(f"{holds}: give (height, width) in pixels, such as ({size}, {size})")
        if any(side % unit for side in bucket):
            raise ValueError(f"{holds}: this model needs sides that are multiples of {unit}")
        if bucket[0] * bucket[1] > size**2:
            raise ValueError(
                f"{holds}, which has more pixels than the model's pictures of {size}x{size}: use "
                "smaller sides, so that every bucket fits in memory"
            )
    if len({fractions.Fraction(*bucket) for bucket in buckets}) < len(buckets):
        raise ValueError(f"data.aspect_buckets is {buckets}: two buckets have the same aspect ratio, so leave one out")
