"""MeanFlow against the authors' code, and on data whose mean velocity is known.

`meanflow.npz` was written by running github.com/Gsunshine/meanflow (d70cb55) on this toy network.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.diffusion import meanflow, objective, onestep, precond
from diffusion_jax.nn import ops

SAVED = dict(np.load(pathlib.Path(__file__).parents[2] / "fixtures" / "meanflow.npz"))
WEIGHTS = {k[2:]: jnp.asarray(v) for k, v in SAVED.items() if k.startswith("w/")}
method = functools.partial(meanflow.MeanFlow, every=1)
CASES = {
    "plain": method(),
    "cfg": method(omega=2.0, norm_eps=30.0),
    "mixed": method(omega=0.2, kappa=0.9, low=0.1, high=0.7),
    "power": method(omega=1.5, kappa=0.3, norm_p=0.75, norm_eps=1e-3),
}
LABELLED = jnp.arange(8) >= 2
INPUTS = [jnp.asarray(SAVED[key]) for key in ("x0", "eps", "t", "r")]


LABELS, EMPTY = jnp.asarray(SAVED["labels"]), jnp.full(8, 4)
CONDITIONS = objective.Conditions(jnp.where(LABELLED, LABELS, EMPTY), LABELS, EMPTY)


def velocity(params, label, z, t, h):
    """The toy network, conditioned on two times and a label. Label 4 means no label."""
    hidden = z.reshape(len(z), -1) @ params["pixels"] + params["label"][label]
    hidden += t[:, None] * params["time"] + h[:, None] * params["step"]
    return (jnp.tanh(hidden) @ params["out"]).reshape(z.shape)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_match_the_authors_code(name):
    def loss(params):
        each, v_loss = meanflow.losses(velocity, params, *INPUTS, CONDITIONS, LABELLED, CASES[name])
        return each.mean(), v_loss

    (value, v_loss), grads = jax.value_and_grad(loss, has_aux=True)(WEIGHTS)
    np.testing.assert_allclose(value, SAVED[f"{name}/loss"], rtol=1e-5)
    np.testing.assert_allclose(v_loss, SAVED[f"{name}/v_loss"], rtol=1e-5)
    for key, grad in grads.items():
        expected = SAVED[f"{name}/grad/{key}"]
        np.testing.assert_allclose(grad, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("every", [2, 3])  # 3 does not divide the batch of 8, so all rows have a derivative.
def test_with_every_n_only_each_nth_image_has_an_interval_instead_of_one_time(every):
    x0, eps, t, r = INPUTS
    losses = lambda start, s: meanflow.losses(velocity, WEIGHTS, x0, eps, t, start, CONDITIONS, LABELLED, s)[0]
    some = losses(r, method(every=every))
    chosen = np.arange(8) % every == 0
    for start, rows in ((r, chosen), (t, ~chosen)):
        expected = losses(start, method())
        np.testing.assert_allclose(some[rows], expected[rows], rtol=1e-5)


def gaussian(scalings):
    """A network F with the exact mean velocity u of images from N(0, 0.25) (a linear flow)."""

    def network(params, condition, h):
        return lambda x, time: predicted(x, time, h)

    def predicted(x, t, h):
        deviation = lambda t: jnp.sqrt((1 - t) ** 2 / 4 + t**2)
        z = x * meanflow._each(1 - t)
        end = meanflow._each(deviation(t - h) / deviation(t)) * z
        u = (z - end) / meanflow._each(jnp.where(h > 0, h, 1))
        c = scalings(t / (1 - t))
        d = z - meanflow._each(t) * u
        return (d - meanflow._each(c.c_skip) * x) / meanflow._each(c.c_out)

    return network


@pytest.mark.parametrize("predicts", ["x0", "flow", "v"])
def test_the_exact_mean_velocity_has_zero_loss_and_samples_in_one_step(predicts):
    scalings = precond.PRECONDS[predicts](meanflow.time_of)  # type: ignore[operator]
    raw = lambda sigma: scalings(sigma)._replace(c_in=jnp.ones_like(sigma))
    u = functools.partial(meanflow.velocity_of(gaussian(raw), raw), None, None)
    t, h = jnp.array([0.9, 0.5]), jnp.array([0.7, 0.2])
    z = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 3)), jnp.float32)

    # u satisfies the MeanFlow identity for the velocity of the mean flow, dz/dt.
    v = u(z, t, jnp.full(2, 1e-3))  # Backward difference of the flow.
    along = lambda z, t, r: u(z, t, t - r)
    change = meanflow.derivative(along, (z, t, t - h), (v, jnp.ones(2), jnp.zeros(2)))
    mean = u(z, t, h)
    np.testing.assert_allclose(mean, v - meanflow._each(h) * change, atol=5e-3)

    # One DDIM step to the next level reaches the end of the flow.
    sigmas = jnp.array([4.0, 0.25])
    span = meanflow.spans(sigmas)
    d = lambda x, sigma: precond.denoiser(gaussian(raw)(None, None, span(sigma)), raw)(x, sigma)
    x = 5 * z
    drawn = onestep.ddim(d, x, sigmas, lambda i: jnp.zeros_like(x), eta=0.0) / 1.25
    deviation = lambda t: np.sqrt((1 - t) ** 2 / 4 + t**2)
    np.testing.assert_allclose(drawn, z * deviation(0.2) / deviation(0.8), rtol=1e-5, atol=1e-6)


def test_the_derivative_supports_functions_without_a_jvp():
    x = jnp.linspace(-1, 1, 64).reshape(1, 1, 2, 32)
    along = jnp.ones_like(x).at[..., 0].set(3)
    norm = lambda x: ops.group_norm(x, jnp.ones(32), jnp.zeros(32), groups=8)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(norm, (x,), (along,))
    step = 1e-2
    expected = (norm(x + step * along) - norm(x - step * along)) / (2 * step)
    np.testing.assert_allclose(meanflow.derivative(norm, (x,), (along,)), expected, atol=5e-3)
