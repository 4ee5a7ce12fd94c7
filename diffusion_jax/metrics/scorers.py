"""What a sweep scores pictures with: prompts, features of pictures, scores of features."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, UInt8

from diffusion_jax.data import digits
from diffusion_jax.metrics import bootstrap, frechet
from diffusion_jax.metrics import digits as judges

Features = dict[str, Float[np.ndarray, "N D"]]
_SHOWN = 42  # Pictures on a sheet.
_REAL = 4_000  # Real pictures of digits that generated ones are compared with.


@runtime_checkable
class Scorer(Protocol):
    """Prompts, and how the pictures drawn from them are scored."""

    prompts: list[str]
    shown: list[int]
    """Which prompts' pictures people see."""
    card: dict[str, Any]
    """What the scores depend on besides the pictures."""

    def caption(self, i: int) -> str:
        """What stands under the picture of prompt i."""
        ...

    def features(self, images: UInt8[np.ndarray, "B H W 3"], prompts: Sequence[str]) -> Features:
        """What is kept of the pictures of these prompts, a row each."""
        ...

    def score(self, features: Features) -> dict[str, float]:
        """Columns of the table from the features of all pictures."""
        ...


class Digits:
    """The coloured digits: a judge of prompts seen and never shown, and its features' distance."""

    def __init__(self, size: int, num_seen: int, num_heldout: int):
        """`size` is the pictures' side; the others, how many pictures a prompt gets."""
        self._judge = judges.fit_judge()
        seen = digits.seen_prompts() * num_seen
        self._num_seen = len(seen)
        self.prompts = seen + digits.heldout_prompts() * num_heldout
        every = max(1, len(seen) // 24)
        self.shown = [*range(0, len(seen), every), *range(len(seen), len(seen) + 18)]
        real = judges.accuracy_on_real(self._judge, size)
        pictures = judges.real_pictures(size, _REAL)
        self._real = frechet.reference(self._judge.features(pictures))
        self.card = {
            "extractor": "digits",
            "judge_accuracy_on_real": round(real["prompt_accuracy"], 4),
            "images_seen": len(seen),
            "images_heldout": len(self.prompts) - len(seen),
            "real_images": _REAL,
        }

    def caption(self, i: int) -> str:
        """The prompt, and whether it was held out."""
        return self.prompts[i] + (" (held out)" if i >= self._num_seen else "")

    def features(self, images: UInt8[np.ndarray, "B H W 3"], prompts: Sequence[str]) -> Features:
        """The classifier's features, and for each of digit, ink and paper whether it is right."""
        read = self._judge(images)
        asked = [digits.parse(prompt) for prompt in prompts]
        right = [[a == b for a, b in zip(*pair, strict=True)]
                 for pair in zip(read, asked, strict=True)]  # fmt: skip
        return {"digits": self._judge.features(images), "right": np.array(right, np.float64)}

    def score(self, features: Features) -> dict[str, float]:
        """Shares all right and the Fréchet distance to real pictures, of prompts seen."""
        right, n = features["right"], self._num_seen
        row = _accuracies("seen", right[:n]) | _accuracies("heldout", right[n:])
        seen = features["digits"][:n]
        return row | _distance("fd_digits", seen, self._real)


def _accuracies(group: str, right: Float[np.ndarray, "N 3"]) -> dict[str, float]:
    names = ("digit_accuracy", "ink_accuracy", "paper_accuracy")
    shares = dict(zip(names, right.mean(0).tolist(), strict=True))
    shares["prompt_accuracy"] = float(right.all(axis=1).mean())
    return {f"{group}_{name}": round(share, 4) for name, share in shares.items()}


def _distance(
    name: str, features: Float[np.ndarray, "N D"], real: frechet.Reference
) -> dict[str, float]:
    """The Fréchet distance with its interval."""
    score = lambda rows: frechet.distance(rows, real)
    ends = bootstrap.interval(score, features)
    return {name: score(features), f"{name}_low": ends.low, f"{name}_high": ends.high}
