"""Saved numbers of the reference implementation (NeMo Imagen, torch, NCHW).

`diffusion_functions.npz` holds single calls, `diffusion_samplers.npz` whole trajectories
with every random draw. Both were recorded with the closed-form network `toy` below in
place of a UNet, so each trajectory here runs freely and may drift: nothing is replayed
but the noise. The tolerance is 1e-4 unless a reason stands beside another.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.diffusion import grids, guidance, noise, onestep, precond, samplers
from tests.diffusion_jax.toy import classifier_free

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
FUNCTIONS = dict(np.load(FIXTURES / "diffusion_functions.npz"))
SAMPLERS = dict(np.load(FIXTURES / "diffusion_samplers.npz"))
SIGMA_LOW_RES = 0.002  # The reference's noise augmentation at inference.

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


def images(z):
    """Transpose [..., C, H, W] to [..., H, W, C]."""
    return jnp.moveaxis(jnp.asarray(z), -3, -1)


def cubic(d, a=-0.75):
    """Return the kernel of torch's bicubic interpolation at distance d."""
    d = np.abs(d)
    near = (a + 2) * d**3 - (a + 3) * d**2 + 1
    return np.where(d <= 1, near, np.where(d < 2, a * (d**3 - 5 * d**2 + 8 * d - 4), 0))


def enlarge(low_res):
    """Enlarge [B, 2, 2, C] to [B, 8, 8, C] like torch's bicubic, with clamped borders."""
    position = (np.arange(8) + 0.5) / 4 - 0.5
    taps = np.floor(position)[:, None] + np.arange(-1, 3)  # [8, 4]
    nearest = np.clip(taps, 0, 1)[..., None] == np.arange(2)  # [8, 4, 2]
    weights = np.sum(cubic(position[:, None] - taps)[..., None] * nearest, axis=1)
    return jnp.einsum("hi,wj,bijc->bhwc", weights, weights, low_res, precision="highest")


def toy(x, time, low_res=None, low_res_time=0.0):
    """The network of the recordings without text: maps c_in * x and c_noise to F."""
    f = 0.2 * jnp.sin(2 * x) + 0.3 * x + 0.05 * time[:, None, None, None]
    low_res_time = jnp.broadcast_to(low_res_time, len(x))[:, None, None, None]
    return f + 0.02 * low_res_time + (0 if low_res is None else 0.15 * enlarge(low_res))


def text_shift(z):
    """Return the text's contribution to F, [B, 1, 1, 1]: a masked mean, 0 without text."""
    text = z["in/text_embed"] * z["in/text_mask"][..., None]
    return 0.1 * jnp.mean(text, axis=(1, 2))[:, None, None, None]


SHIFT = text_shift(FUNCTIONS)
toy_with_text = lambda x, time: toy(x, time) + SHIFT


def toy_both(x, time):
    """`toy` on pairs of rows: even rows with text, odd rows without."""
    even = (jnp.arange(len(x)) % 2 == 0)[:, None, None, None]
    return toy(x, time) + jnp.where(even, SHIFT.repeat(2, axis=0), 0)


def augment(low_res, sigma, eps):
    """Return the arguments of `toy` for a low-resolution image with noise of level sigma."""
    scale = jnp.sqrt(0.25 + sigma**2)
    return {"low_res": (low_res + sigma * eps) / scale, "low_res_time": jnp.log(sigma) / 4}


def test_edm_coefficients_match_nemo():
    scalings = precond.edm(sigma_data=0.5)(jnp.asarray(FUNCTIONS["edm/sigma"]))
    for name, value in scalings._asdict().items():
        np.testing.assert_allclose(value, FUNCTIONS[f"edm/{name}"], rtol=1e-6)
    np.testing.assert_allclose(1 / scalings.c_out, FUNCTIONS["edm/weight_sqrt"], rtol=1e-6)


def test_the_edm_denoiser_matches_nemo():
    denoise = precond.denoiser(toy_with_text, precond.edm())
    x = images(FUNCTIONS["edm/D_x"])
    close(denoise(x, jnp.array([0.3, 2.0])), images(FUNCTIONS["edm/D_y"]))
    close(denoise(x, jnp.array([0.7, 0.7])), images(FUNCTIONS["edm/D_y_scalar_sigma"]))


def test_the_edm_denoiser_with_guidance_matches_nemo():
    guided = classifier_free(precond.denoiser(toy_both, precond.edm()), 7.5)
    actual = guided(images(FUNCTIONS["edm/D_x"]), jnp.array([0.7, 0.7]))
    close(actual, images(FUNCTIONS["edm/D_y_cfg7.5_scalar_sigma"]))


def test_the_edm_denoiser_with_an_augmented_low_resolution_image_matches_nemo():
    eps = images(FUNCTIONS["edm/D_y_aug_infer_noise"])
    low_res = augment(images(FUNCTIONS["in/x_low_res"]), SIGMA_LOW_RES, eps)
    network = lambda x, time: toy(x, time, **low_res) + SHIFT
    denoise = precond.denoiser(network, precond.edm())
    actual = denoise(images(FUNCTIONS["edm/D_x"]), jnp.array([0.3, 2.0]))
    close(actual, images(FUNCTIONS["edm/D_y_aug_infer"]))


@pytest.mark.parametrize("distance", ["l1", "l2", "huber"])
@pytest.mark.parametrize("augmented", [0, 1])
def test_the_edm_loss_matches_nemo(distance, augmented):
    sigma, sigma_low = (jnp.asarray(FUNCTIONS[f"edm/loss_sigma_{k}"]) for k in ("main", "lowres"))
    low_res = {}
    if augmented:
        plain, eps = images(FUNCTIONS["in/x_low_res"]), images(FUNCTIONS["edm/loss_noise_aug1/1"])
        low_res = augment(plain, sigma_low[:, None, None, None], eps) | {"low_res_time": jnp.log(sigma_low) / 4}
    network = lambda x, time: toy(x, time, **low_res) + SHIFT
    x0, eps = images(FUNCTIONS["in/x0"]), images(FUNCTIONS[f"edm/loss_noise_aug{augmented}/0"])
    losses = precond.loss(network, precond.edm(), x0, eps, sigma, getattr(precond, distance))
    np.testing.assert_allclose(losses.mean(), FUNCTIONS[f"edm/loss_{distance}_aug{augmented}"], rtol=1e-5)


SCHEDULES = {"cosine": noise.cosine_log_snr, "linear": noise.linear_log_snr}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ddpm_schedules_match_nemo(schedule):
    log_snr = jax.jit(SCHEDULES[schedule])(jnp.asarray(FUNCTIONS["ddpm/t"]))
    # Relative: for cosine, cos^-2 - 1 is 1.6e-4 at t = 1e-4, so that one float32 rounding of
    # the cosine changes log-SNR by 7.5e-4 of 8.7. The reference has an error of 5e-4.
    np.testing.assert_allclose(log_snr, FUNCTIONS[f"ddpm/{schedule}/log_snr"], rtol=1e-4)
    sigma = noise.sigma_of(log_snr)
    alpha = precond.epsilon(precond.log_snr)(sigma).c_in
    close(alpha, FUNCTIONS[f"ddpm/{schedule}/alpha"])
    close(sigma * alpha, FUNCTIONS[f"ddpm/{schedule}/sigma"])
    # At t = 1, alpha is 4e-8 (cosine), so compare relatively.
    np.testing.assert_allclose(alpha[-1], FUNCTIONS[f"ddpm/{schedule}/alpha"][-1], rtol=1e-4)


def ddpm_case(schedule):
    """Return x0, eps and sigma of the recorded forward process, and x = x0 + sigma * eps."""
    sigma = noise.sigma_of(SCHEDULES[schedule](jnp.asarray(FUNCTIONS[f"ddpm/{schedule}/q_t"])))
    x0, eps = images(FUNCTIONS["in/x0"]), images(FUNCTIONS[f"ddpm/{schedule}/q_eps"])
    return x0, eps, sigma, x0 + sigma[:, None, None, None] * eps


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_ddpm_forward_process_of_nemo_equals_x_times_c_in(schedule):
    _, _, sigma, x = ddpm_case(schedule)
    c_in = precond.epsilon(precond.log_snr)(sigma).c_in
    close(x * c_in[:, None, None, None], images(FUNCTIONS[f"ddpm/{schedule}/q_xt"]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_x0_from_eps_matches_nemo(schedule):
    _, eps, sigma, x = ddpm_case(schedule)
    denoise = precond.denoiser(lambda x, time: eps, precond.epsilon(precond.log_snr))
    close(denoise(x, sigma), images(FUNCTIONS[f"ddpm/{schedule}/x0_from_eps"]))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("image", [0, 1])  # Both were recorded at different times.
def test_the_ddpm_posterior_matches_nemo(schedule, image):
    x0, _, sigma, x = (value[image : image + 1] for value in ddpm_case(schedule))
    q_next = jnp.asarray(FUNCTIONS[f"ddpm/{schedule}/q_tn"][image : image + 1])
    sigmas = jnp.concatenate([sigma, noise.sigma_of(SCHEDULES[schedule](q_next))])
    alpha_next = 1 / jnp.sqrt(1 + sigmas[1] ** 2)
    step = lambda draw: onestep.ddim(lambda *_: x0, x, sigmas, lambda i: draw, eta=1.0)
    mean, one_above = (alpha_next * step(draw) for draw in (jnp.zeros_like(x), jnp.ones_like(x)))
    close(mean[0], images(FUNCTIONS[f"ddpm/{schedule}/post_mean"])[image])
    variance = FUNCTIONS[f"ddpm/{schedule}/post_var"][image]
    close((one_above - mean)[0] ** 2, np.broadcast_to(variance, x.shape[1:]))
    close(np.log(variance), FUNCTIONS[f"ddpm/{schedule}/post_logvar"][image])


@pytest.mark.parametrize("distance", ["l1", "l2", "huber"])
@pytest.mark.parametrize(("objective", "make"), [("noise", "epsilon"), ("x_start", "x0")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ddpm_losses_match_nemo(schedule, objective, make, distance):
    x0, eps, sigma, _ = ddpm_case(schedule)
    scalings = getattr(precond, make)(precond.log_snr)
    losses = precond.loss(toy_with_text, scalings, x0, eps, sigma, getattr(precond, distance))
    expected = FUNCTIONS[f"ddpm/{schedule}/loss_{distance}_{objective}"]
    np.testing.assert_allclose(losses.mean(), expected, rtol=1e-5)


THRESHOLDS = {"dynamic": guidance.dynamic, "static": guidance.static}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_thresholds_match_nemo(name):
    x = images(FUNCTIONS["thr/x"])
    threshold = THRESHOLDS[name](lambda x, sigma: x)
    close(threshold(x, jnp.ones(3)), images(FUNCTIONS[f"thr/{name}"]))


def test_the_thresholded_derivative_matches_nemo():
    """The slope (x - D) / sigma after thresholding D = x - sigma * d."""
    x, d, sigma = images(FUNCTIONS["thr/x"]), images(FUNCTIONS["thr/d"]), FUNCTIONS["thr/sigma"]
    threshold = guidance.dynamic(lambda x, _: x - sigma * d)
    slope = (x - threshold(x, jnp.full(3, sigma))) / sigma
    close(slope, images(FUNCTIONS["thr/derivative_dynamic"]))


@pytest.mark.parametrize("n", [5, 10, 18, 20, 25, 30, 50])
def test_karras_sigmas_match_nemo(n):
    levels = jax.jit(grids.karras_sigmas, static_argnums=0)(n)
    np.testing.assert_allclose(levels, SAMPLERS[f"edm_sigmas/{n}"], rtol=1e-5)


def python_scan(f, carry, inputs):
    """A plain loop in place of lax.scan, so that every call of a denoiser can be recorded."""
    for i in range(len(jax.tree.leaves(inputs)[0])):
        carry, _ = f(carry, jax.tree.map(lambda a, i=i: a[i], inputs))
    return carry, None


@pytest.fixture
def unrolled(monkeypatch):
    monkeypatch.setattr(jax.lax, "scan", python_scan)


def recorded(denoise):
    """Wrap `denoise(x, sigma, number of the call)`, and return the list of (x, sigma) calls."""
    calls = []

    def record(x, sigma):
        calls.append((x, sigma))
        return denoise(x, sigma, len(calls) - 1)

    return record, calls


def start(sigmas):
    return sigmas[0] * images(SAMPLERS["in/noise_map"])


@jax.jit
def edm_denoise(x, sigma, scale):
    guided = classifier_free(precond.denoiser(toy_both, precond.edm()), scale)
    return guidance.dynamic(guided)(x, sigma)


@jax.jit
def edm_sample(sigmas, draws, scale, churn, s_noise):
    denoise = lambda x, sigma: edm_denoise(x, sigma, scale)
    noise = lambda i: draws[i]
    return onestep.heun(denoise, start(sigmas), sigmas, noise, churn=churn, s_noise=s_noise)


def compare_calls(calls, case):
    close([sigma[0] for _, sigma in calls], SAMPLERS[f"{case}/call_sigma"], atol=0)
    inputs = [calls[i][0] for i in SAMPLERS[f"{case}/call_index"]]
    # Relative, because x starts at 240.
    close(jnp.stack(inputs), images(SAMPLERS[f"{case}/call_x"]))


EDM = ["base_s10_cfg1", "base_s10_cfg7.5", "base_s30_cfg7.5", "base_s10_cfg3_churn40"]


def edm_case(name):
    steps, scale, churn, s_noise = SAMPLERS[f"edm/{name}/meta"].tolist()
    draws = images(SAMPLERS.get(f"edm/{name}/noise", np.zeros((int(steps), 2, 3, 8, 8))))
    return grids.karras_sigmas(int(steps)), draws, scale, churn, s_noise


@pytest.mark.parametrize("name", EDM)
def test_edm_samples_match_nemo(name):
    close(edm_sample(*edm_case(name)), images(SAMPLERS[f"edm/{name}/out"]))


@pytest.mark.parametrize("name", EDM)
def test_edm_trajectories_match_nemo(name, unrolled):
    sigmas, draws, scale, churn, s_noise = edm_case(name)
    denoise, calls = recorded(lambda x, sigma, _: edm_denoise(x, sigma, scale))
    noise = lambda i: draws[i]
    onestep.heun(denoise, start(sigmas), sigmas, noise, churn=churn, s_noise=s_noise)
    compare_calls(calls, f"edm/{name}")


@jax.jit
def super_resolution_denoise(x, sigma, low_res_cond, low_res_uncond):
    def network(x, time):
        cond = toy(x[0::2], time[0::2], **low_res_cond) + SHIFT
        uncond = toy(x[1::2], time[1::2], **low_res_uncond)
        return jnp.stack([cond, uncond], axis=1).reshape(x.shape)

    guided = classifier_free(precond.denoiser(network, precond.edm()), 8.0)
    return guidance.dynamic(guided)(x, sigma)


@pytest.mark.parametrize("name", ["sr_s6_cfg8_noaug", "sr_s6_cfg8_aug"])
def test_super_resolution_trajectories_match_nemo(name, unrolled):
    """With augmentation, each network call (with and without text) has its own low-res noise."""
    low_res = images(SAMPLERS["in/x_low_res"])
    draws = images(SAMPLERS["edm/sr_s6_cfg8_aug/noise_low_res"])  # [calls, 2, 2, 2, 3]

    def denoise(x, sigma, call):
        plain = ({"low_res": low_res},) * 2
        noisy = (augment(low_res, SIGMA_LOW_RES, eps) for eps in draws[2 * call : 2 * call + 2])
        return super_resolution_denoise(x, sigma, *(plain if "noaug" in name else noisy))

    denoise, calls = recorded(denoise)
    sigmas = grids.karras_sigmas(6)
    out = onestep.heun(denoise, start(sigmas), sigmas, lambda i: jnp.zeros((2, 8, 8, 3)))
    close(out, images(SAMPLERS[f"edm/{name}/out"]))
    compare_calls(calls, f"edm/{name}")


@functools.partial(jax.jit, static_argnums=3)
def ddpm_denoise(x, sigma, scale, threshold):
    denoise = precond.denoiser(toy_both, precond.epsilon(precond.log_snr))
    denoise = classifier_free(denoise, scale)
    return (THRESHOLDS[threshold](denoise) if threshold else denoise)(x, sigma)


@pytest.mark.parametrize(
    ("name", "scale", "schedule", "threshold"),
    [
        ("cos_s8_cfg1", 1.0, "cosine", "dynamic"),
        ("cos_s8_cfg7.5", 7.5, "cosine", "dynamic"),
        ("cos_s8_cfg3_static", 3.0, "cosine", "static"),
        ("lin_s8_cfg3", 3.0, "linear", "dynamic"),
        ("cos_s8_cfg3_nothr", 3.0, "cosine", None),
    ],
)
def test_ddpm_trajectories_match_nemo(name, scale, schedule, threshold, unrolled):
    draws = images(SAMPLERS["ddpm/noise"])
    sigmas = noise.sigma_of(SCHEDULES[schedule](jnp.linspace(1, 0, 9)))
    # The reference starts from variance 1 in its coordinates. Ours are larger by 1 / alpha.
    x = jnp.sqrt(1 + sigmas[0] ** 2) * images(SAMPLERS["in/noise_map"])
    denoise, calls = recorded(lambda x, sigma, _: ddpm_denoise(x, sigma, scale, threshold))
    out = onestep.ddpm(denoise, x, sigmas, lambda i: draws[i])
    out = samplers.to_variance_preserving(out, sigmas[-1])

    # The first step divides by alpha = 4e-8 (cosine). A threshold reduces x0 to size 1;
    # without one it stays at 9e7, of which float32 holds seven digits, so compare relatively.
    expected = images(SAMPLERS[f"ddpm/{name}/out"])
    size = 1 if threshold else float(jnp.abs(expected).max())
    close(out / size, expected / size)
    in_reference = [x / jnp.sqrt(1 + sigma[0] ** 2) for x, sigma in calls[1:]]
    close(jnp.stack(in_reference) / size, images(SAMPLERS[f"ddpm/{name}/x"]) / size)
