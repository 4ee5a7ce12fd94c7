"""Describe what small models draw after a given amount of training."""

_SEEN = (
    (0, "colour noise"),
    (5_000, "the right white and black backgrounds, and noise elsewhere (emoji, 5,440 pictures)"),
    (75_000, "the right digits in the right colours (the quick start, 76,800 pictures)"),
    (339_000, "two of three emoji right (339,200 pictures)"),
    (1_000_000, "what models/emoji32/README.md shows (emoji, 1,049,600 pictures)"),
)
"""Pairs (N, what a run of this project drew after training on N pictures, repeats included). The
runs are in docs/data.md, docs/quickstart.md and models/emoji32/README.md."""


def described(num_images: int) -> str:
    """Return a text on what small models have drawn after training on `num_images` pictures.

    A picture that is used several times counts each time.
    """
    drawn = [text for least, text in _SEEN if num_images >= least][-1]
    return f"after training on {num_images:,} pictures with repeats, small models drew {drawn}"
