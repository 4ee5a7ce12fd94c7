"""Training objectives, built from the names in a config's `diffusion` group.

The group names the noise distribution, the preconditioner that turns a network into a denoiser, the
distance between prediction and target, and the weighting of noise levels.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, Shaped

from diffusion_jax.config.named import Table
from diffusion_jax.config.ranges import Interval
from diffusion_jax.diffusion import noise, precond
from diffusion_jax.diffusion.precond import DISTANCES, Denoiser, Distance, Images, Network, Precond, Sigma

if TYPE_CHECKING:
    from diffusion_jax.diffusion.groups import Diffusion

Losses = Float[Array, "B"]
Net = Callable[..., Network]
"""Maps (params, condition) to the network F, or (params, condition, h) if F reads MeanFlow's span.
"""
LEARNED_WEIGHTING = "uncertainty"
"""The key under which a task's parameters hold the parameters of a learned weighting."""
NonNegative = Annotated[int | float, Interval("[0, inf)")]
Positive = Annotated[int | float, Interval("(0, inf)")]


class Weighting(NamedTuple):
    """The weight of the loss at each noise level."""

    weigh: Callable[[Any, Sigma, Sigma, Losses], Losses]
    """Maps (the task's parameters, sigma, c_out, losses) to the weighted losses. `losses` holds the
    loss of the network F for each image."""
    init: Callable[[], Any] | None = None
    """Returns the initial parameters of a learned weighting. If None, the weighting is fixed."""


class Conditions(NamedTuple):
    """Inputs of the network besides x and time: trees of arrays with one row per image."""

    mixed: Any
    """With the empty text for the images whose text is dropped."""
    text: Any
    """With each image's own text."""
    empty: Any
    """With the empty text for all images."""


class Noised(NamedTuple):
    """A micro batch with the random draws of a training step, from which the loss is computed."""

    x0: Images
    """Clean images in [-1, 1], or their latents if the model works on latents."""
    eps: Images
    """Normal noise, which is scaled by sigma and added to x0."""
    sigma: Callable[[int], Sigma]
    """Draws noise levels: sigma(0) is the first level of each image, sigma(1) a second one."""
    conditions: Conditions
    kept: Bool[Array, "B"]
    """True for the images whose text is not dropped."""
    weights: Losses | None
    """A further weight of each image, for prior preservation; None: 1."""
    mask: Shaped[Array, "B H W"] | None
    """255 times the weight of each pixel; None: 255."""


class Objective(NamedTuple):
    """The training objective that a config's `diffusion` group describes."""

    noise: noise.Noise
    make_precond: Callable[[Callable[[Sigma], Sigma]], Precond]
    """Builds the preconditioner from `time`, a function from sigma to the network's time input.
    Training passes noise.time. Sampling passes the function `time` of its Grid."""
    distance: Distance
    weighting: Weighting
    offset: float
    """The strength of offset noise, the noise that all pixels of a channel share."""
    method: "Denoise"

    @property
    def scalings(self) -> Precond:
        """The preconditioner that training uses."""
        return self.make_precond(self.noise.time)

    def with_learned(self, params: Mapping[str, Any]) -> Any:
        """Return `params`, with the initial parameters of the weighting added if it is learned."""
        init = self.weighting.init
        return {**params, LEARNED_WEIGHTING: init()} if init else params

    def shifted(self, keys: Key[Array, "B"], eps: Images) -> Images:
        """Return eps plus offset noise: `offset` times one normal draw per image and channel.

        Offset noise helps the model to learn the mean brightness of images (Guttenberg 2023).
        """
        if not self.offset:
            return eps
        draw = lambda key: jax.random.normal(key, (1, 1, eps.shape[-1]))
        return eps + self.offset * jax.vmap(draw)(keys)

    def masked(self, mask: Shaped[Array, "B H W"]) -> "Objective":
        """Return the objective that multiplies the loss of each pixel by mask / 255.

        The mask is shrunk to the size of the network's output by averaging areas. The loss stays
        the mean over all pixels, so a small mask makes it small (as in kohya's sd-scripts).
        """

        def distance(residual):
            b, h, w, _ = residual.shape
            areas = mask.reshape(b, h, mask.shape[1] // h, w, mask.shape[2] // w) / 255
            return areas.mean((2, 4))[..., None] * self.distance(residual)

        return self._replace(distance=distance)

    def loss(
        self, params: Any, network: Network, x0: Images, eps: Images, sigma: Sigma, weights: Losses | None = None
    ) -> tuple[Float[Array, ""], Losses]:
        """Compute the mean weighted loss, to be minimised, and each image's unweighted loss.

        Args:
            params: The task's parameters. A learned weighting takes its parameters from them.
            network: The network F, as a function with its weights and conditions bound.
            x0: Clean images in [-1, 1], or their latents if the model works on latents.
            eps: Standard normal noise, which is scaled by sigma and added to x0.
            sigma: The noise level of each image.
            weights: A further weight of each image, for prior preservation; by default, 1.
        """
        scalings = self.scalings
        losses = precond.loss(network, scalings, x0, eps, sigma, self.distance)
        weighed = self.weighting.weigh(params, sigma, scalings(sigma).c_out, losses)
        return (weighed if weights is None else weights * weighed).mean(), losses

    def errors(self, network: Network, x0: Images, eps: Images, sigma: Sigma) -> tuple[Losses, Losses]:
        """Compute each image's unweighted loss and its v-loss |D - x0|^2 (1 + sigma^2) / sigma^2.

        D is the denoiser of `network`. Its v-loss has the same meaning whether the network predicts
        eps, x0, v or flow. So it can be compared between runs whose networks predict different
        quantities.
        """
        residual = precond.residual(network, self.scalings, x0, eps, sigma)
        mean = lambda each: jnp.mean(each, axis=(1, 2, 3))
        to_v = self.scalings(sigma).c_out ** 2 * (1 + sigma**2) / sigma**2
        return mean(self.distance(residual)), to_v * mean(residual**2)


class Denoise:
    """Train a denoiser, whose sampling takes several steps.

    Other training methods are subclasses, such as meanflow.MeanFlow.
    """

    own_loss = False
    """Whether the method's own loss ignores the objective's distance and weighting."""
    takes_mask = True
    """Whether the loss can have a mask."""
    straight = False
    """Whether D suits only samplers with straight steps, such as `euler`."""

    def loss(
        self, objective: Objective, net: Net, params: Any, noised: Noised
    ) -> tuple[Float[Array, ""], Losses, Sigma]:
        """Return the loss to minimise, and each image's unweighted loss and noise level."""
        sigma, network = noised.sigma(0), net(params, noised.conditions.mixed)
        if noised.mask is not None:
            objective = objective.masked(noised.mask)
        arguments = noised.x0, noised.eps, sigma, noised.weights
        return *objective.loss(params, network, *arguments), sigma

    def measured(self, net: Net, params: Any, text: Any, empty: Callable[[], Any], sigma: Sigma) -> Network:
        """Return the network whose held-out loss is measured at the noise levels `sigma`.

        `text` is the condition with the images' own texts, and empty() that with the empty text.
        """
        del empty, sigma
        return net(params, text)

    def denoiser(
        self, net: Net, params: Any, scalings: Precond, sigmas: Float[Array, "levels"]
    ) -> Callable[[Any], Denoiser]:
        """Return a function that maps a condition to D, for a sampler with the levels `sigmas`."""
        del sigmas
        return lambda condition: precond.denoiser(net(params, condition), scalings)


def make(d: "Diffusion") -> Objective:
    """Build the objective that a config's `diffusion` group describes.

    Raises:
        ValueError: A name is unknown, or fields do not fit together.
    """
    make_noise, prediction, make_weighting = bound(d)
    distance = DISTANCES.bound("diffusion.distance", d.distance)
    with jax.ensure_compile_time_eval():  # The objective outlives a trace that builds it.
        return Objective(make_noise(), prediction, distance, make_weighting(), d.offset_noise, d.training)


def bound(d: "Diffusion") -> tuple[functools.partial, ...]:
    """Return the functions that noise, predicts and weight of a `diffusion` group name.

    Raises:
        ValueError: A name is unknown, or fields do not fit together. The latter has two cases. The
            network predicts eps, but x has no signal at the last noise level, so that
            eps-prediction is undefined there. Or the method has a loss of its own, which would
            ignore the config's distance or weighting.
    """
    make_noise = noise.NOISES.bound("diffusion.noise", d.noise, d)
    prediction = precond.PRECONDS.bound("diffusion.predicts", d.predicts, d)
    make_weighting = WEIGHTINGS.bound("diffusion.weight", d.weight, d)
    if make_noise.func in _NO_SIGNAL_AT_THE_END and prediction.func is precond.epsilon:
        raise ValueError(
            f"diffusion.noise is {d.noise!r}, whose last noise level has no signal, and there the "
            "prediction 'eps' of diffusion.predicts is undefined (zero terminal SNR): set "
            "diffusion.predicts to v or flow"
        )
    if d.training.own_loss and (d.distance, d.weight) != ("l2", "none"):
        raise ValueError(
            f"diffusion.method is {d.method!r}, whose own loss ignores diffusion.distance and "
            "diffusion.weight: set them to l2 and none, their defaults"
        )
    return make_noise, prediction, make_weighting


_NO_SIGNAL_AT_THE_END = (noise.zero_terminal_snr, noise.logit_normal, noise.uniform_flow)


def x0_weighting(weight: Callable[[Float[Array, "B"]], Float[Array, "B"]]) -> Weighting:
    """Build a weighting of |D - x0|^2 from a function of the signal-to-noise ratio 1 / sigma^2.

    The weighted loss does not depend on what the network F predicts: the loss of F is
    |D - x0|^2 / c_out^2, and the weighting multiplies it by weight(1 / sigma^2) * c_out^2.
    """
    return Weighting(lambda params, sigma, c_out, losses: weight(1 / sigma**2) * c_out**2 * losses)


def none() -> Weighting:
    """Do not weight the loss of F."""
    return Weighting(lambda params, sigma, c_out, losses: losses)


def min_snr(*, gamma: Positive) -> Weighting:
    """Build Min-SNR-gamma (Hang et al. 2023, section 3.4): |D - x0|^2 has weight min(snr, gamma).

    Relative to the eps-loss, the weight is min(snr, gamma) / snr. Relative to the v-loss, it is
    min(snr, gamma) / (snr + 1).
    """
    return x0_weighting(lambda snr: jnp.minimum(snr, gamma))


def p2(*, k: NonNegative = 1.0, gamma: NonNegative = 1.0) -> Weighting:
    """Build P2 (Choi et al. 2022, equation 8): the eps-loss has weight 1 / (k + snr)^gamma."""
    return x0_weighting(lambda snr: snr / (k + snr) ** gamma)


def edm(*, sigma_data: Positive = 0.5) -> Weighting:
    """Build EDM's weighting of |D - x0|^2 (Karras et al. 2022, Table 1).

    The weight is lambda(sigma) = (sigma^2 + sigma_data^2) / (sigma * sigma_data)^2.
    """
    return x0_weighting(lambda snr: 1 / sigma_data**2 + snr)


def flow(*, floor: Annotated[int | float, Interval("(0, 1)")] = 0.05) -> Weighting:
    """Build the loss of rectified flow: |D - x0|^2 has weight 1 / t^2, t = sigma / (1 + sigma).

    The loss is the squared difference between (x_t - D) / t, the flow that D implies, and eps - x0.
    The divisor t is at least `floor`, as in JiT (Li & He 2025). Without this, the weight would be
    unbounded at low noise levels.
    """
    return x0_weighting(lambda snr: 1 / jnp.maximum(1 / (1 + jnp.sqrt(snr)), floor) ** 2)


def uncertainty(*, channels: Annotated[int, Interval("[1, 65536]")] = 128) -> Weighting:
    """Build EDM2's learned weighting (Karras et al. 2024): loss / e^u(sigma) + u(sigma).

    u is a learned linear function of `channels` fixed random sinusoids of ln(sigma) / 4. The
    optimal u(sigma) is the logarithm of the expected loss at sigma (Kendall et al. 2018), so that
    all levels contribute equally. u starts at 0, so the loss is not weighted at first.
    """
    key_frequency, key_phase = jax.random.split(jax.random.key(0))

    def u(params, sigma):
        frequencies = jax.random.normal(key_frequency, (channels,))
        phases = jax.random.uniform(key_phase, (channels,))
        angles = 2 * jnp.pi * (jnp.log(sigma)[:, None] / 4 * frequencies + phases)
        return jnp.cos(angles) @ params[LEARNED_WEIGHTING]["kernel"] * (2 / channels) ** 0.5  # [B]

    def weigh(params, sigma, c_out, losses):
        log_variance = u(params, sigma)
        return losses / jnp.exp(log_variance) + log_variance

    return Weighting(weigh, lambda: {"kernel": jnp.zeros(channels)})


WEIGHTINGS = Table(none=none, min_snr=min_snr, p2=p2, edm=edm, flow=flow, uncertainty=uncertainty)
"""The functions that diffusion.weight can name in configs. An entry "MODULE:FUNCTION" is imported
on use."""
WeightName = Annotated[str, WEIGHTINGS]
