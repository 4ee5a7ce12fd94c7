"""Describe what small models draw after training on a given number of pictures."""

_SEEN = (
    (0, "colour noise"),
    (5_000, "the right white and black backgrounds, and noise elsewhere (emoji, 5,440 pictures)"),
    (75_000, "the right digits in the right colours (the quick start, 76,800 pictures)"),
    (800_000, "what models/emoji32/README.md shows (emoji, 819,200 pictures)"),
)
"""Pairs (least number of training pictures, the picture quality that a run of this project reached
with them). The runs are in docs/data.md, docs/quickstart.md and models/emoji32/README.md."""


def described(num_images: int) -> str:
    """Return a clause that says what small models have drawn after this many training pictures."""
    drawn = [text for least, text in _SEEN if num_images >= least][-1]
    return f"with {num_images:,} training pictures, small models have drawn {drawn}"
