"""Power-function averages of parameters: their names, their profiles, and any from those stored.

After t steps the average of exponent gamma is the mean of the parameters of steps k = 1 ... t,
weighted with k^(gamma + 1) - (k - 1)^(gamma + 1): a profile that grows with the run, where a
constant decay spans a fixed number of steps, and of which the initial weights are no part. Its
width is the standard deviation of the profile relative to t, sigma_rel: 0.05 and 0.10 are usual
(Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3
and appendix C).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

POWER = "power-"
"""How the name of a power-function average begins; its width follows: "power-0.05"."""
WIDEST = 12**-0.5
"""The width of the mean over all steps, whose exponent is 0: no average is as wide."""


def power_name(width: float) -> str:
    """The name of the average of a relative width: 0.10 -> "power-0.1"."""
    return f"{POWER}{float(width)}"


def width_of(name: str) -> float | None:
    """The relative width of "power-0.05" and of "0.05"; None of every other name."""
    try:
        width = float(name.removeprefix(POWER))
    except ValueError:
        return None
    return width if 0 < width < WIDEST else None


def canonical(name: str, kept: Sequence[str]) -> str:
    """The name itself if it is "raw", "ema", or `kept`; "power-0.05" of a width, "0.05"."""
    width = None if name in kept else width_of(name)
    return name if width is None else power_name(width)


def order(name: str) -> tuple[bool, float]:
    """Sorts names of averages: power functions by their widths, then decays."""
    return not name.startswith(POWER), float(name.removeprefix(POWER))


def exponent(width: float) -> float:
    """gamma of a relative width: width^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)).

    The largest root of the paper's cubic (equation 126).
    """
    t = width**-2.0
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


def combination(
    steps: Sequence[int], widths: Sequence[float], step: int, width: float
) -> tuple[Float[np.ndarray, "N"], float]:
    """What each stored average counts in one of another width and step, and how far it is off.

    The stored are of these steps and widths. Least squares over the profiles (the paper's
    algorithm 3), among counts that add up to 1: where few are stored the result is still a mean of
    weights. The distance is that of the profiles, relative to the wanted one's length. At step 0
    all averages are the initial weights.
    """
    if not step:
        return np.eye(len(steps))[0], 0.0
    gammas, gamma = np.array([exponent(w) for w in widths]), np.array([exponent(width)])
    times, time = np.asarray(steps, np.float64), np.array([float(step)])
    inner = _products(times, gammas, times, gammas)  # [N, N]
    wanted = _products(times, gammas, time, gamma)  # [N, 1]
    ones = np.ones((len(times), 1))
    bordered = np.block([[inner, ones], [ones.T, np.zeros((1, 1))]])  # Lagrange's condition.
    counts = np.linalg.lstsq(bordered, np.append(wanted, [[1.0]], 0), rcond=None)[0][:-1, 0]
    length = _products(time, gamma, time, gamma).item()
    squared = length - 2 * counts @ wanted[:, 0] + counts @ inner @ counts
    return counts, float(np.sqrt(max(squared, 0.0) / length))


def _products(times_a, gammas_a, times_b, gammas_b) -> Float[np.ndarray, "A B"]:
    """The inner products of two lists of profiles: the paper's equation 151, of its integrals."""
    a, b = gammas_a[:, None], gammas_b[None]
    ratio, later = times_a[:, None] / times_b, np.maximum(times_a[:, None], times_b)
    power = ratio ** np.where(ratio < 1, b, -a)
    return (a + 1) * (b + 1) * power / ((a + b + 1) * later)
