"""Name power-function averages of parameters, and combine stored ones into others.

After t steps, the average with exponent gamma is the mean of the parameters of steps k = 1 ... t,
weighted with k^(gamma + 1) - (k - 1)^(gamma + 1). This sequence of weights is called the profile.
It excludes the initial parameters, and its width grows with the run. In contrast, the profile of an
EMA with a constant decay spans a fixed number of steps. The relative width sigma_rel is the
standard deviation of the profile divided by t; 0.05 and 0.10 are common. See Karras et al. 2024,
"Analyzing and Improving the Training Dynamics of Diffusion Models", section 3 and appendix C.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

POWER = "power-"
"""The prefix in the name of a power-function average. Its relative width follows: "power-0.05"."""
WIDEST = 0.28
"""The largest relative width. The plain mean over all steps (gamma = 0) has 12^-0.5 = 0.2887."""


def power_name(width: float) -> str:
    """Return the name of the average with this relative width: "power-0.1" for 0.10."""
    return f"{POWER}{float(width)}"


def width_of(name: str) -> float | None:
    """Return the relative width in a name such as "power-0.05" or "0.05".

    The result is None if the name holds no number above 0 and up to WIDEST.
    """
    try:
        width = float(name.removeprefix(POWER))
    except ValueError:
        return None
    return width if 0 < width <= WIDEST else None


def canonical(name: str, stored: Sequence[str]) -> str:
    """Return the full name of an average: "power-0.05" for the relative width "0.05".

    A name in `stored`, or a name that is not a relative width, is returned unchanged.
    """
    width = None if name in stored else width_of(name)
    return name if width is None else power_name(width)


def order(name: str) -> tuple[bool, float]:
    """Return the sort key of an average's name: power functions by width, then EMAs by decay."""
    return not name.startswith(POWER), float(name.removeprefix(POWER))


def exponent(width: float) -> float:
    """Return the exponent gamma of a power-function average with a given relative width.

    gamma solves width^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)). It is the largest root of a
    cubic polynomial (Karras et al. 2024, equation 126).
    """
    t = width**-2.0
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


def combination(
    steps: Sequence[int], widths: Sequence[float], step: int, width: float, begun: Sequence[int] | None = None
) -> tuple[Float[np.ndarray, "N"], float]:
    """Return coefficients that combine stored averages into a target average, and the error.

    The coefficients are a least-squares fit of the target's profile by the stored profiles (Karras
    et al. 2024, algorithm 3), under the constraint that they sum to 1. So the weights of the
    combined profile sum to 1, even with few averages.

    Args:
        steps: The step of each stored average.
        widths: The relative width of each stored average.
        step: The step of the target average.
        width: The relative width of the target average.
        begun: The step at which each stored average began, at the parameters of this step. Their
            weight is that of all steps until then. By default, all began at step 0.

    Returns:
        The coefficients, and the relative error: the norm of the difference between the combined
        and the target profile, divided by the norm of the target profile.
    """
    if not step:  # At step 0, all averages are the initial weights.
        return np.eye(len(steps))[0], 0.0
    stored = _Profiles(
        np.asarray(steps, np.float64),
        np.array([exponent(w) for w in widths]),
        np.asarray(begun or np.zeros(len(steps)), np.float64),
    )
    wanted = _Profiles(np.array([float(step)]), np.array([exponent(width)]), np.zeros(1))
    inner = _products(stored, stored)  # [N, N]
    target = _products(stored, wanted)  # [N, 1]
    ones = np.ones((len(steps), 1))
    bordered = np.block([[inner, ones], [ones.T, np.zeros((1, 1))]])  # With a Lagrange multiplier.
    solution = np.linalg.lstsq(bordered, np.append(target, [[1.0]], 0), rcond=None)[0]
    coefficients = solution[:-1, 0]
    norm = _products(wanted, wanted).item()  # Squared.
    error = norm - 2 * coefficients @ target[:, 0] + coefficients @ inner @ coefficients
    return coefficients, float(np.sqrt(max(error, 0.0) / norm))


class _Profiles(NamedTuple):
    """Profiles of averages: their steps, their exponents, and the steps at which they began."""

    times: Float[np.ndarray, "N"]
    gammas: Float[np.ndarray, "N"]
    begun: Float[np.ndarray, "N"]


def _products(left: _Profiles, right: _Profiles) -> Float[np.ndarray, "A B"]:
    """Return the inner product of each profile of `left` with each profile of `right`.

    For profiles that began at step 0, see Karras et al. 2024, equation 151. Others have density
    from their beginning on, where the mass of all steps until then is concentrated in one step.
    """
    a, b = left.gammas[:, None], right.gammas[None]
    times_a, times_b = left.times[:, None], right.times[None]
    begun_a, begun_b = left.begun[:, None], right.begun[None]
    density_a = lambda x: (a + 1) / times_a * (np.minimum(x, times_a) / times_a) ** a
    density_b = lambda x: (b + 1) / times_b * (np.minimum(x, times_b) / times_b) ** b
    integral = lambda x: x * density_a(x) * density_b(x) / (a + b + 1)  # From 0 to x.
    end = np.minimum(times_a, times_b)
    mass_a, mass_b = (begun_a / times_a) ** (a + 1), (begun_b / times_b) ** (b + 1)
    products = integral(end) - integral(np.minimum(np.maximum(begun_a, begun_b), end))
    products += mass_a * density_b(begun_a) * ((begun_b < begun_a) & (begun_a <= times_b))
    products += mass_b * density_a(begun_b) * ((begun_a < begun_b) & (begun_b <= times_a))
    return products + mass_a * mass_b * (begun_a == begun_b)
