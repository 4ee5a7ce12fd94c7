"""Guidance and thresholds: identities, closed forms, and the layout of the batch."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffusion_jax.config import settings
from diffusion_jax.diffusion import grids, guidance, onestep, precond
from imagen_jax import settings as imagen_settings
from sd_jax import settings as sd_settings
from sd_jax.settings import Sampler
from tests.diffusion_jax.toy import classifier_free

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures"

X = jax.random.normal(jax.random.key(0), (4, 4, 4, 3))
SIGMA = jnp.array([0.1, 0.5, 2.0, 30.0])
COND, UNCOND = 2 * X, X + 1


def denoise_both(x, sigma):
    """Return 2 x on even rows (conditional) and x + 1 on odd rows (unconditional)."""
    even = (jnp.arange(len(x)) % 2 == 0)[:, None, None, None]
    return jnp.where(even, 2 * x, x + 1)


def guided(scale):
    return classifier_free(denoise_both, scale)(X, SIGMA)


def test_guidance_1_equals_the_conditional_model_bit_for_bit():
    np.testing.assert_array_equal(guided(1.0), COND)


@pytest.mark.parametrize("scale", [0.0, 7.5])
def test_guidance_extrapolates_from_the_unconditional_prediction(scale):
    np.testing.assert_allclose(guided(scale), UNCOND + scale * (COND - UNCOND), atol=2e-5)


def test_each_image_may_have_its_own_scale():
    scales = jnp.array([1.0, 2.0, 4.0, 0.0])
    each = [guided(scale)[i] for i, scale in enumerate(scales)]
    np.testing.assert_array_equal(guided(scales), jnp.stack(each))


def test_one_compiled_program_serves_every_guidance_scale():
    traces = []

    @jax.jit
    def f(scale):
        traces.append(scale)
        return guided(scale)

    np.testing.assert_allclose(f(3.0), guided(3.0), atol=1e-5)
    np.testing.assert_allclose(f(5.0), guided(5.0), atol=1e-5)
    assert len(traces) == 1


def test_conditional_and_unconditional_rows_of_an_image_have_its_noise_level():
    seen = {}

    def spy(x, sigma):
        seen.update(x=x, sigma=sigma)
        return x

    classifier_free(spy, 2.0)(X, SIGMA)
    for half in (slice(0, None, 2), slice(1, None, 2)):
        np.testing.assert_array_equal(seen["x"][half], X)
        np.testing.assert_array_equal(seen["sigma"][half], SIGMA)


S = Sampler()
LEVELS = jnp.array([30.0, 2.0, 0.5, 0.1, 0.0])
MODEL = guidance.GuidedModel(precond.velocity(precond.log_snr), LEVELS)
D = dict(zip(("cond", "negative", "empty"), jax.random.normal(jax.random.key(1), (3, 4, 4, 4, 3)), strict=True))


def combined(guiding, scale, sigma=SIGMA, **fields):
    """Return the guided D, and the guide."""
    s = S._replace(guiding=guiding, **fields)
    guide = guidance.make(s, MODEL)
    return np.float64(guide.combine(D, X, sigma, scale)), guide


def branches(x, sigma, names):
    """Return a D for each name. ROWS records how many rows per image the network sees."""
    jax.debug.callback(lambda: ROWS.append(len(names)), ordered=True)
    return {name: x * (i + 1) for i, name in enumerate(("cond", "negative")) if name in names}


ROWS = []


@pytest.mark.parametrize("fields", [{"guidance_low": 0.5, "guidance_high": 2.0}, {"guiding": "interval(0.5, 2)"}])
def test_interval_guides_only_within_its_bounds_and_skips_the_negative_outside(fields):
    guide = guidance.make(S._replace(**fields), MODEL)
    denoise = jax.jit(guidance.guided(branches, jnp.full(4, 3.0), guide))
    for level, inside in ((0.1, False), (0.5, True), (2.0, True), (30.0, False)):
        ROWS.clear()
        out = denoise(X, jnp.full(4, level))
        jax.effects_barrier()
        assert [2 if inside else 1] == ROWS  # Both bounds are inclusive.
        np.testing.assert_array_equal(out, X + 2 * (X - 2 * X) if inside else X)


def test_the_interval_of_sdxl_saves_a_third_of_the_network_rows():
    """Kynkaanniemi et al. 2024: guide from 0.28 to 5.42, with 30 Karras levels below 14.6."""
    s = S._replace(guiding="interval(0.28, 5.42)")
    denoise = guidance.guided(branches, 3.0, guidance.make(s, MODEL))
    sigmas = grids.karras_sigmas(30, 0.0292, 14.6146)
    ROWS.clear()
    jax.block_until_ready(jax.jit(lambda x: onestep.euler(denoise, x, sigmas, lambda i: X))(X))
    jax.effects_barrier()
    inside = int(((sigmas >= 0.28) & (sigmas <= 5.42)).sum())
    assert len(ROWS) == 30 and sum(ROWS) == 30 + inside
    assert 0.6 < sum(ROWS) / 60 < 0.8


def test_apg_matches_diffusers():
    """Compares with adaptive_projected_guidance of diffusers 0.42, whose scale is smaller by 1."""
    saved = dict(np.load(FIXTURES / "authors_samplers.npz"))
    d = {"cond": jnp.asarray(saved["cond"]), "negative": jnp.asarray(saved["uncond"])}
    for guiding, name in (("apg", "apg/0.0/0.0"), ("apg(eta=0.3, norm=5)", "apg/0.3/5.0")):
        guide = guidance.make(S._replace(guiding=guiding), MODEL)
        out = guide.combine(d, d["cond"], jnp.ones(2), 7.5)
        np.testing.assert_allclose(out, saved[name], atol=2e-5)


def test_apg_with_eta_1_equals_classifier_free_guidance():
    np.testing.assert_allclose(combined("apg(eta=1)", 3.0)[0], combined("cfg", 3.0)[0], atol=1e-5)


def test_rescale_of_v_predictions_matches_diffusers():
    """Compares with saved results of rescale_noise_cfg of diffusers 0.42."""
    saved = dict(np.load(FIXTURES / "authors_samplers.npz"))
    x, sigma = jnp.asarray(saved["x"]), jnp.array([0.5, 3.0])
    c_skip, c_out, *_ = (c[:, None, None, None] for c in MODEL.scalings(sigma))
    d = {"cond": c_skip * x + c_out * saved["cond"], "negative": c_skip * x + c_out * saved["uncond"]}
    guide = guidance.make(S._replace(guiding="rescale(0.7)"), MODEL)
    out = (guide.combine(d, x, sigma, 7.5) - c_skip * x) / c_out
    np.testing.assert_allclose(out, saved["rescaled"], atol=2e-4)


def test_cfg_pp_with_ddim_matches_algorithm_2_of_its_paper():
    """x' = D_lambda + sigma' eps_uncond, at each level of the grid."""
    guide = combined("cfg_pp", 0.6)[1]
    for sigma, later in itertools.pairwise(LEVELS):
        d = guide.combine(D, X, jnp.full(4, sigma), jnp.full(4, 0.6))
        stepped = d + later / sigma * (X - d)
        mixed = D["negative"] + 0.6 * (D["cond"] - D["negative"])
        expected = mixed + later * (X - D["negative"]) / sigma
        np.testing.assert_allclose(stepped, expected, atol=2e-5)


def test_perp_neg_removes_the_part_of_the_negative_along_the_prompt():
    out, guide = combined("perp_neg(weight=1.5)", 4.0)
    assert guide.needs == ("cond", "empty", "negative")
    c, n, e = (np.float64(D[name]) for name in ("cond", "negative", "empty"))
    a, b = c - e, n - e
    along = (a * b).sum((1, 2, 3), keepdims=True) / (a**2).sum((1, 2, 3), keepdims=True) * a
    np.testing.assert_allclose(out, e + 4 * (a - 1.5 * (b - along)), atol=1e-5)
    np.testing.assert_allclose(((b - along) * a).sum((1, 2, 3)), 0, atol=1e-9)


def test_pix2pix_scales_the_effect_of_the_picture_apart_from_that_of_the_text():
    """Equation 3 of Brooks et al. 2023; perp_neg then changes only the effect of the text."""
    d = {**D, "unseen": jnp.cos(X)}
    cond, negative, empty, unseen = (np.float64(d[k]) for k in ("cond", "negative", "empty", "unseen"))
    guide = guidance.make(S._replace(guiding="pix2pix(image_scale=1.2)"), MODEL)
    assert guide.needs == ("cond", "negative", "unseen")
    expected = unseen + 1.2 * (negative - unseen) + 4 * (cond - negative)
    np.testing.assert_allclose(guide.combine(d, X, SIGMA, 4.0), expected, atol=1e-5)
    joined = guidance.make(S._replace(guiding="perp_neg(weight=0)+pix2pix(2)"), MODEL)
    assert set(joined.needs) == {"cond", "negative", "empty", "unseen"}
    expected = empty + 4 * (cond - empty) + negative - unseen
    np.testing.assert_allclose(joined.combine(d, X, SIGMA, 4.0), expected, atol=1e-5)


def test_pix2pix_is_rejected_for_networks_that_see_no_picture():
    s = S._replace(guiding="rescale+pix2pix")
    guidance.check(s, sees_picture=True)
    with pytest.raises(ValueError, match=r"'rescale\+pix2pix', but pix2pix needs a network that sees"):
        guidance.check(s)


def test_guidance_names_joined_by_plus_apply_in_order():
    both = combined("apg(norm=2)+rescale(0.5)", 5.0)[0]
    c_skip, c_out, *_ = (np.float64(c)[:, None, None, None] for c in MODEL.scalings(SIGMA))
    to_f = lambda d: (d - c_skip * np.float64(X)) / c_out
    f, f_cond = to_f(combined("apg(norm=2)", 5.0)[0]), to_f(np.float64(D["cond"]))
    std = lambda x: x.std((1, 2, 3), keepdims=True)
    expected = c_skip * np.float64(X) + c_out * f * (0.5 * std(f_cond) / std(f) + 0.5)
    np.testing.assert_allclose(both, expected, rtol=1e-4, atol=1e-4)


def test_autoguidance_uses_a_second_model_in_place_of_the_negative_text():
    """Karras et al. 2024: D_guide + w (D - D_guide), both with the same text."""
    denoiser_of = lambda text: lambda x, sigma: x * text[:, None, None, None]
    guide_of = lambda text: lambda x, sigma: x * text[:, None, None, None] / 2
    conditions = {"cond": lambda: jnp.arange(4.0), "negative": lambda: 1 / 0}
    denoise = guidance.make_denoiser(S, MODEL, 3.0, denoiser_of, conditions, guide_of)
    text = jnp.arange(4.0)[:, None, None, None]
    np.testing.assert_allclose(denoise(X, SIGMA), X * text / 2 + 3 * (X * text / 2), rtol=1e-5)
    alone = guidance.make_denoiser(S, MODEL, None, denoiser_of, conditions, guide_of)
    np.testing.assert_array_equal(alone(X, SIGMA), X * text)


def test_at_scale_1_guidance_is_skipped_only_for_kinds_that_are_plain_there():
    scales = lambda guiding, scale: guidance.scale_per_image(S._replace(guiding=guiding), scale, 3)
    assert scales("cfg+rescale", 1) is None
    np.testing.assert_array_equal(scales("apg", 2), [2, 2, 2])
    for guiding in ("cfg_pp", "rescale+perp_neg(weight=2)"):
        np.testing.assert_array_equal(scales(guiding, 1), [1, 1, 1])


@pytest.mark.parametrize(
    ("guiding", "message"),
    [
        ("apgg", r"sampler.guiding is 'apgg': did you mean 'apg'\?"),
        ("cfg+apg(eta=3)", "sampler.guiding: eta is 3: it must be from 0 to 1"),
        ("rescale(phi=-1)", "sampler.guiding: phi is -1: it must be from 0 to 1"),
    ],
)
def test_an_invalid_guidance_is_a_one_line_error(guiding, message):
    for kind in (imagen_settings.Sampler, sd_settings.Sampler):
        with pytest.raises(ValueError, match=message):
            settings.read(kind, {"guiding": guiding}, "sampler")


def test_guidance_of_a_sharded_batch_needs_no_communication():
    """Both rows of an image are on one device, so the program contains no collective operation."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = NamedSharding(mesh, P("data"))
    f = classifier_free(lambda x, sigma: x * sigma[:, None, None, None], 3.0)
    jitted = jax.jit(f, in_shardings=(rows, rows), out_shardings=rows)
    text = jitted.lower(X, SIGMA).compile().as_text()
    for name in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
        assert name not in text


@pytest.mark.parametrize("percentile", [99.5, 90.0])
def test_dynamic_threshold_uses_the_percentile_of_each_image(percentile):
    actual = guidance.dynamic(lambda x, sigma: 3 * x, percentile=percentile)(X, SIGMA)
    for image, out in zip(np.float64(3 * X), actual, strict=True):
        s = np.quantile(np.abs(image), percentile / 100)
        assert s > 1
        np.testing.assert_allclose(out, np.clip(image, -s, s) / s, atol=1e-6)
    assert float(jnp.abs(actual).max()) == 1.0


def test_dynamic_threshold_does_not_change_images_within_range():
    keep = guidance.dynamic(lambda x, sigma: jnp.tanh(x))
    np.testing.assert_array_equal(keep(X, SIGMA), jnp.tanh(X))


def test_static_threshold_clips_to_minus_1_and_1():
    actual = guidance.static(lambda x, sigma: 5 * x)(X, SIGMA)
    np.testing.assert_array_equal(actual, np.clip(5 * X, -1, 1))


@pytest.mark.parametrize("name", ["restart", "dpm2", "heun", "ddim", "ddpm", "dpmpp_2m", "lcm"])
def test_cfg_pp_is_rejected_with_samplers_whose_steps_are_not_straight(name):
    s = S._replace(name=name, eta=1.0, guiding="cfg_pp")
    with pytest.raises(ValueError, match="straight steps from level to level only: choose euler"):
        guidance.check(s)


@pytest.mark.parametrize("name", ["euler", "ddim(eta=0)"])
def test_cfg_pp_accepts_samplers_with_straight_steps(name):
    guidance.check(S._replace(guiding="cfg_pp", name=name, eta=1.0))
