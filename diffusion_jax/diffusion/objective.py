"""Objectives: what a network learns, of whose parts a config's `diffusion` names each.

The noise levels of training, the four scalars that make a denoiser of a network, the distance from
its target, and how much an error counts at each level.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from diffusion_jax.config import named
from diffusion_jax.diffusion import noise, precond
from diffusion_jax.diffusion.precond import DISTANCES, Distance, Images, Network, Precond, Sigma

Losses = Float[Array, "B"]
LEARNED = "uncertainty"
"""The collection of a task's parameters that a weighting learns, beside the network's."""


class Weighting(NamedTuple):
    """How much an error counts at each noise level."""

    weigh: Callable[[Any, Sigma, Sigma, Losses], Losses]
    """(a task's parameters, sigma, c_out, the losses of F) to what is minimised."""
    init: Callable[[], Any] | None = None
    """The initial parameters that it learns, if any."""


class Objective(NamedTuple):
    """A config's `diffusion` group, made into functions."""

    noise: noise.Noise
    precond: Callable[[Callable[[Sigma], Sigma]], Precond]
    """Of a `time`, what the network is told of a level: training's, or a sampling grid's."""
    distance: Distance
    weighting: Weighting
    offset: float

    @property
    def scalings(self) -> Precond:
        """The scalars of training."""
        return self.precond(self.noise.time)

    def with_learned(self, params: Mapping[str, Any]) -> Any:
        """A network's parameters, and those that the weighting learns."""
        return {**params, LEARNED: self.weighting.init()} if self.weighting.init else params

    def shifted(self, key: PRNGKeyArray, eps: Images) -> Images:
        """eps, each channel of each image shifted by `offset` times a normal number.

        Offset noise (Guttenberg 2023): without it a model hardly learns an image's mean.
        """
        if not self.offset:
            return eps
        return eps + self.offset * jax.random.normal(key, (len(eps), 1, 1, eps.shape[-1]))

    def loss(
        self, params: Any, network: Network, x0: Images, eps: Images, sigma: Sigma,
        counts: Losses | None = None,
    ) -> tuple[Float[Array, ""], Losses]:  # fmt: skip
        """What is minimised, and the loss of each image as it is before it is weighed.

        `counts` says how much each image counts, if not all do the same.
        """
        scalings = self.scalings
        losses = precond.loss(network, scalings, x0, eps, sigma, self.distance)
        weighed = self.weighting.weigh(params, sigma, scalings(sigma).c_out, losses)
        return (weighed if counts is None else counts * weighed).mean(), losses

    def errors(
        self, network: Network, x0: Images, eps: Images, sigma: Sigma
    ) -> tuple[Losses, Losses]:
        """Of each image the loss before it is weighed, and |D - x0|^2 (1 + sigma^2) / sigma^2.

        The second is the v-loss, whatever the network predicts: runs of different objectives
        compare by it.
        """
        residual = precond.residual(network, self.scalings, x0, eps, sigma)
        mean = lambda each: jnp.mean(each, axis=(1, 2, 3))
        to_v = self.scalings(sigma).c_out ** 2 * (1 + sigma**2) / sigma**2
        return mean(self.distance(residual)), to_v * mean(residual**2)


def make(d: Any) -> Objective:
    """The objective of a config's `diffusion` group d; ValueError for a part that there is not.

    What the network predicts is the field `precond` of Imagen, `predicts` of Stable Diffusion.
    """
    predicts = "precond" if hasattr(d, "precond") else "predicts"
    name = lambda field: named.calls(f"diffusion.{field}", getattr(d, field))[0].name
    if name("noise") in _TO_NOISE_ALONE and name(predicts) == "eps":
        raise ValueError(
            f"diffusion.noise is {d.noise!r} and diffusion.{predicts} 'eps': no image can be told "
            "from its noise where there is nothing else; predict v, or flow"
        )
    return Objective(
        noise.make(d),
        named.bound(f"diffusion.{predicts}", getattr(d, predicts), precond.PRECONDS, d),
        DISTANCES[d.distance],
        named.bound("diffusion.weight", d.weight, WEIGHTINGS, d)(),
        d.offset_noise,
    )


_TO_NOISE_ALONE = ("zero_terminal_snr", "logit_normal", "uniform_flow")
_WEIGHTINGS = "diffusion_jax.diffusion.weightings"
# By diffusion.weight of a config; their own parameters follow `*` (see named).
WEIGHTINGS: Mapping[str, Callable[..., Weighting] | str] = {
    "min_snr": f"{_WEIGHTINGS}:min_snr",
    "p2": f"{_WEIGHTINGS}:p2",
    "edm": f"{_WEIGHTINGS}:edm",
    "uncertainty": f"{_WEIGHTINGS}:uncertainty",
}
