"""Objectives: what a network learns, assembled from the names in a config's `diffusion` group.

The group names the noise of training, the preconditioner that makes a denoiser of a network, the
distance from the target, and the weighting of noise levels (the table WEIGHTINGS below).
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from diffusion_jax.config import named
from diffusion_jax.diffusion import noise, precond
from diffusion_jax.diffusion.precond import DISTANCES, Distance, Images, Network, Precond, Sigma

Losses = Float[Array, "B"]
LEARNED = "uncertainty"
"""The key of a task's parameters under which a weighting keeps what it learns."""
Amount = Annotated[int | float, "[0, inf)"]


class Weighting(NamedTuple):
    """The weight of the loss at each noise level."""

    weigh: Callable[[Any, Sigma, Sigma, Losses], Losses]
    """(a task's parameters, sigma, c_out, the losses of F) to the losses that are minimised."""
    init: Callable[[], Any] | None = None
    """Makes the initial parameters of a learned weighting."""


class Objective(NamedTuple):
    """A config's `diffusion` group as functions."""

    noise: noise.Noise
    precond: Callable[[Callable[[Sigma], Sigma]], Precond]
    """Makes the preconditioner from `time`, which maps sigma to what the network sees: that of
    training, or that of a sampling grid."""
    distance: Distance
    weighting: Weighting
    offset: float

    @property
    def scalings(self) -> Precond:
        """The preconditioner of training."""
        return self.precond(self.noise.time)

    def with_learned(self, params: Mapping[str, Any]) -> Any:
        """Add the initial parameters of a learned weighting to those of the network."""
        return {**params, LEARNED: self.weighting.init()} if self.weighting.init else params

    def shifted(self, key: PRNGKeyArray, eps: Images) -> Images:
        """Add offset noise: `offset` times one normal draw per image and channel.

        Without it, a model hardly learns the mean of an image (Guttenberg 2023).
        """
        if not self.offset:
            return eps
        return eps + self.offset * jax.random.normal(key, (len(eps), 1, 1, eps.shape[-1]))

    def loss(
        self, params: Any, network: Network, x0: Images, eps: Images, sigma: Sigma,
        counts: Losses | None = None,
    ) -> tuple[Float[Array, ""], Losses]:  # fmt: skip
        """Compute the loss to minimise, and the unweighted loss of each image.

        Args:
            params: The task's parameters, which a learned weighting reads.
            network: F, with its weights and conditions.
            x0: Images in [-1, 1].
            eps: Standard normal noise.
            sigma: The noise level of each image.
            counts: Weight of each image, such as those of prior preservation; None for 1.
        """
        scalings = self.scalings
        losses = precond.loss(network, scalings, x0, eps, sigma, self.distance)
        weighed = self.weighting.weigh(params, sigma, scalings(sigma).c_out, losses)
        return (weighed if counts is None else counts * weighed).mean(), losses

    def errors(
        self, network: Network, x0: Images, eps: Images, sigma: Sigma
    ) -> tuple[Losses, Losses]:
        """Compute each image's unweighted loss and its v-loss |D - x0|^2 (1 + sigma^2) / sigma^2.

        The v-loss does not depend on what the network predicts, so it compares different runs.
        """
        residual = precond.residual(network, self.scalings, x0, eps, sigma)
        mean = lambda each: jnp.mean(each, axis=(1, 2, 3))
        to_v = self.scalings(sigma).c_out ** 2 * (1 + sigma**2) / sigma**2
        return mean(self.distance(residual)), to_v * mean(residual**2)


def make(d: Any) -> Objective:
    """Assemble the objective of a config's `diffusion` group.

    The field that names the prediction is `precond` in Imagen and `predicts` in Stable Diffusion.

    Raises:
        ValueError: For an unknown name, or eps-prediction with a noise that ends without signal.
    """
    check(d)
    predicts = _prediction_field(d)
    return Objective(
        noise.make(d),
        named.bound(f"diffusion.{predicts}", getattr(d, predicts), precond.PRECONDS, d),
        DISTANCES[d.distance],
        named.bound("diffusion.weight", d.weight, WEIGHTINGS, d)(),
        d.offset_noise,
    )


def check(d: Any) -> None:
    """Raise ValueError for eps-prediction with a noise whose last level holds no signal."""
    predicts = _prediction_field(d)
    name = lambda field: named.calls(f"diffusion.{field}", getattr(d, field))[0].name
    if name("noise") in _NO_SIGNAL_AT_THE_END and name(predicts) == "eps":
        raise ValueError(
            f"diffusion.noise is {d.noise!r} and diffusion.{predicts} is 'eps': eps-prediction is "
            "undefined at zero terminal SNR, so choose v or flow"
        )


def _prediction_field(d: Any) -> str:
    return "precond" if hasattr(d, "precond") else "predicts"


_NO_SIGNAL_AT_THE_END = ("zero_terminal_snr", "logit_normal", "uniform_flow")


def of_x0(weight: Callable[[Float[Array, "B"]], Float[Array, "B"]]) -> Weighting:
    """Weight |D - x0|^2 by a function of the signal-to-noise ratio 1 / sigma^2.

    The loss of F is |D - x0|^2 / c_out^2, so one weighting serves every prediction.
    """
    return Weighting(lambda params, sigma, c_out, losses: weight(1 / sigma**2) * c_out**2 * losses)


def min_snr(*, min_snr: Amount = 5.0) -> Weighting:
    """Min-SNR-gamma (Hang et al. 2023, section 3.4): min(snr, gamma). 0 leaves the loss unweighted.

    This is min(snr, gamma) / snr on the eps-loss and min(snr, gamma) / (snr + 1) on the v-loss.
    """
    if not min_snr:
        return Weighting(lambda params, sigma, c_out, losses: losses)
    return of_x0(lambda snr: jnp.minimum(snr, min_snr))


def p2(*, k: Amount = 1.0, gamma: Amount = 1.0) -> Weighting:
    """P2 (Choi et al. 2022, equation 8): 1 / (k + snr)^gamma on the eps-loss."""
    return of_x0(lambda snr: snr / (k + snr) ** gamma)


def edm(*, sigma_data: Annotated[int | float, "(0, inf)"] = 0.5) -> Weighting:
    """EDM's lambda(sigma) = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 (Table 1)."""
    return of_x0(lambda snr: 1 / sigma_data**2 + snr)


def uncertainty(*, channels: Annotated[int, "[1, 65536]"] = 128) -> Weighting:
    """EDM2's learned uncertainty (Karras et al. 2024): loss / e^u(sigma) + u(sigma).

    u is a learned linear function of fixed random sinusoids of ln(sigma) / 4. At its optimum it is
    ln of the expected loss at that level (Kendall et al. 2018), so all levels weigh the same. It
    starts at 0, where this equals the plain loss.
    """
    key_frequency, key_phase = jax.random.split(jax.random.key(0))

    def u(params, sigma):
        frequencies = jax.random.normal(key_frequency, (channels,))
        phases = jax.random.uniform(key_phase, (channels,))
        angles = 2 * jnp.pi * (jnp.log(sigma)[:, None] / 4 * frequencies + phases)
        return jnp.cos(angles) @ params[LEARNED]["kernel"] * (2 / channels) ** 0.5  # [B]

    def weigh(params, sigma, c_out, losses):
        log_variance = u(params, sigma)
        return losses / jnp.exp(log_variance) + log_variance

    return Weighting(weigh, lambda: {"kernel": jnp.zeros(channels)})


WEIGHTINGS: dict[str, Callable[..., Weighting] | str] = {
    "min_snr": min_snr,
    "p2": p2,
    "edm": edm,
    "uncertainty": uncertainty,
}
"""Values of diffusion.weight: functions of their own parameters, or "MODULE:FUNCTION"."""
WeightName = Annotated[str, named.checked(WEIGHTINGS)]
