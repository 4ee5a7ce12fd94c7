"""Score pictures of coloured digits: the share of correct pictures, and a Fréchet distance."""

import itertools
from collections.abc import Sequence

from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.evaluate.scorers import Reference, Scorer
from diffusion_jax.examples.digits import judge as judges
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.metrics import cards
from diffusion_jax.metrics.features import gaussian
from diffusion_jax.metrics.stats_files import Stats

_REAL = 4_000  # Number of real images that generated images are compared with.
_GUIDANCE = (1, 1.5, 2, 3, 4)


def open_scorer(size: int, num_seen: int = 1, num_heldout: int = 8, metrics: Sequence[str] = ()) -> Scorer:
    """Return the scorer of the coloured digits.

    Args:
        size: The side of the images in pixels.
        num_seen: Number of images for each training prompt.
        num_heldout: Number of images for each held-out prompt.
        metrics: Keys of metrics.table.METRICS. () chooses all metrics that the judge supports.
    """
    judge, seen_prompts = judges.fit_judge(), digits.seen_prompts() * num_seen
    prompts = seen_prompts + digits.heldout_prompts() * num_heldout
    real_prompts = list(itertools.islice(itertools.cycle(digits.seen_prompts()), _REAL))
    real = judge.features(judges.real_pictures(size, real_prompts))
    right_on_real = judges.compare_on_real(judge, size).min(axis=1).mean()
    card = cards.make_card(
        judge,
        image_size=(size, size),
        n=len(prompts),
        prompts=prompt_files.fingerprint(prompts),
        reference=f"held-out digits, n {_REAL}",
    ) | {
        "images_seen": len(seen_prompts),
        "images_heldout": len(prompts) - len(seen_prompts),
        "judge_accuracy_on_real": round(float(right_on_real), 4),
    }
    extract = lambda images, prompts: (judge.features(images), judges.compare(judge(images), prompts))
    num, every = len(seen_prompts), max(1, len(seen_prompts) // 24)
    return Scorer(
        prompts,
        {"digits": Reference(card, ("digits", "right"), extract, Stats(gaussian(real), real, card))},
        metrics,
        groups={"seen": slice(num), "heldout": slice(num, None)},
        shown=[*range(0, num, every), *range(num, num + 18)],
        real=lambda shown: (judges.real_pictures(size, shown), shown),
        guidance=_GUIDANCE,
    )
