"""Sampling with closed forms instead of networks: guidance, steps, and image-to-image."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.diffusion import grids, noise, samplers
from diffusion_jax.diffusion.samplers import SAMPLERS
from diffusion_jax.text import TextEncoder, clip, clip_weights
from diffusion_jax.weights import torch_weights
from sd_jax import masks, sampling, vae
from sd_jax.settings import Conditioning, Diffusion, Latents, Pipeline, Sampler, check_pipeline
from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import formats, names
from tests.parity.sd import ldm_vae
from tests.sd_jax import tiny

ORACLES = pathlib.Path(__file__).parents[3] / "shared" / "oracles" / "sd"
# These add noise in each step, or average v, which is not an average of eps.
SWAYED = {"ddpm", "dpm2_ancestral", "dpmpp_2m_sde", "dpmpp_3m_sde", "euler_ancestral", "lcm", "plms_v", "restart"}
TABLE = noise.ldm_log_alphas()
SAMPLER = Sampler("ddim", 4, 0.0, 3.0, "", 8, 4)
PIPELINE = Pipeline(
    UNet(channel_mult=(1,), attention_levels=(0,)),
    VAE(width=32, channel_mult=(1, 2)),
    Conditioning("empty", 0),
    Latents(8, 0.5, "symmetric"),
    Diffusion("eps"),
    SAMPLER,
)
KEYS = jax.random.split(jax.random.key(0), 3)


def levels(name, steps):
    """Return the noise levels of a sampler's steps."""
    sampler = SAMPLER._replace(name=name, steps=steps)
    return samplers.sampling_grid(PIPELINE.diffusion.objective.noise, sampler).sigmas


def half(self, params, x, method):
    """Replaces the VAE: half the size, and four channels, of which the first three are colours."""
    if method == "decode":
        return x.repeat(2, 1).repeat(2, 2)[..., :3]
    small = x[:, ::2, ::2]
    return jnp.concatenate([small, small[..., :1], jnp.full((*small.shape[:3], 4), 9.0)], -1)


def curved(x, t, text):
    return 0.8 * jnp.sin(x + text[:, :1, :, None]) + x * jnp.cos(t / 300)[:, None, None, None]


def finding(x, t, text):
    """Predicts most of the noise, so that pictures are of order 1, rounded to 1e-6."""
    return x + 0.4 * jnp.sin(x + text[:, :1, :, None])


ENCODER = TextEncoder(
    "letters",
    1,
    2,
    lambda texts: {"text_ids": np.array([[len(t), 1] for t in texts])},
    (),
    lambda frozen, batch: (batch["text_ids"][..., None].astype(np.float32), None),  # pyright: ignore[reportArgumentType]
)


@pytest.fixture
def draw(monkeypatch):
    """Return draw(network=curved, scale=3, strength=1, image=pictures, name="plms", ...)."""

    def drawn(
        network=curved, *, scale: Any = 3.0, strength=1.0, image=None, mask=None, preview=None, vae=half, **sampler
    ):
        apply = lambda self, params, x, time, text: network(x, time, text)
        monkeypatch.setattr(UNet, "apply", apply)
        monkeypatch.setattr(VAE, "apply", vae)
        p = PIPELINE._replace(strength=strength, sampler=SAMPLER._replace(**sampler))
        batch = dict(sampling.prompts(ENCODER, ["a", "bcd", ""], "ugly"))
        batch |= {} if image is None else {"image": image}
        batch |= {} if mask is None else {"mask": mask}
        scales = None if scale is None else jnp.full(3, scale)
        sample = jax.jit(sampling.make_sample(p, ENCODER, preview))
        return sample({}, {"text": (), "vae": {}}, batch, KEYS, scales)

    return drawn


@pytest.mark.parametrize("name", ["ddim", "heun", "plms", "dpmpp_3m_sde"])  # test_task.py tests all samplers.
def test_guidance_1_gives_the_samples_of_the_conditional_model(draw, name):
    conditional = draw(finding, name=name, eta=0.5, scale=None)
    guided = draw(finding, name=name, eta=0.5, scale=1.0)
    np.testing.assert_allclose(guided, conditional, atol=1e-5)  # Two programs round differently.
    assert float(jnp.abs(draw(finding, name=name, eta=0.5, scale=3.0) - conditional).max()) > 0.1
    assert conditional.shape == (3, 8, 4, 3)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_grid_has_exactly_the_requested_number_of_steps(name):
    for steps in range(1, 1001):
        leading = SAMPLERS[name].grid == "ldm"
        times = (grids.leading_times if leading else grids.even_times)(steps)
        assert len(times) == steps + 1 and times[0] <= 999 and times[-1] == 0
        assert (np.diff(times) < 0).all()
    for steps in (1, 37):
        sigmas = np.asarray(levels(name, steps))
        assert (np.diff(sigmas) < 0).all() and sigmas[-1] > 0


def test_prompt_weights_need_clip():
    read = sampling.tokenizer(SAMPLER._replace(prompt_weights=True))
    with pytest.raises(ValueError, match=r"sampler\.prompt_weights is True, but the text encoder is"):
        read(ENCODER, ["(a:1.3)"], "")


@pytest.mark.parametrize("steps", [1, 3, 101])
@pytest.mark.parametrize("name", sorted(SAMPLERS.keys() - SWAYED))
def test_with_a_network_that_predicts_0_every_number_of_steps_gives_the_closed_form(draw, name, steps):
    drawn = draw(lambda x, t, text: 0 * x, name=name, steps=steps)
    sigmas = levels(name, steps)
    eps = samplers.initial_noise(KEYS, (4, 2, 4), 1.0)[..., :3]
    expected = eps * jnp.sqrt((1 + sigmas[0] ** 2) / (1 + sigmas[-1] ** 2)) / 0.5
    np.testing.assert_allclose(drawn[:, ::2, ::2], expected, rtol=2e-4)


def test_image_to_image_starts_from_the_picture_with_added_noise(draw):
    """Takes the last two of four steps. The network predicts 0, so the added noise stays."""
    pictures = np.random.default_rng(0).integers(0, 256, (3, 8, 4, 3), np.uint8)
    drawn = draw(lambda x, t, text: 0 * x, strength=0.5, image=pictures)
    sigmas = noise.sigma_at(TABLE, jnp.array([251.0, 0.0]))
    z = 0.5 * (pictures[:, ::2, ::2] / 127.5 - 1)
    eps = samplers.initial_noise(KEYS, (4, 2, 4), 1.0)[..., :3]
    expected = (z + sigmas[0] * eps) / jnp.sqrt(1 + sigmas[1] ** 2) / 0.5
    np.testing.assert_allclose(drawn[:, ::2, ::2], expected, rtol=1e-4, atol=1e-5)


def test_with_strength_1_the_image_does_not_depend_on_the_picture(draw):
    pictures = np.random.default_rng(0).integers(0, 256, (3, 8, 4, 3), np.uint8)
    np.testing.assert_allclose(draw(finding, image=pictures), draw(finding), atol=1e-6)


def test_masked_sampling_keeps_black_pixels_and_resamples_white_ones(draw):
    """A latent with at least one white pixel is sampled as without a mask."""
    pictures = np.random.default_rng(0).integers(0, 256, (3, 8, 4, 3), np.uint8)
    mask = np.zeros((3, 8, 4), bool)
    mask[:, 1, 2] = True
    of_each = lambda x, t, text: x + 0.4 * jnp.sin(x)  # Each latent is independent.
    over = np.asarray(draw(of_each, strength=0.5, image=pictures, mask=mask))
    all_new = np.asarray(draw(of_each, strength=0.5, image=pictures))
    np.testing.assert_allclose(over[~mask], pictures[~mask] / 127.5 - 1, atol=1e-6)
    np.testing.assert_allclose(over[mask], all_new[mask], atol=1e-6)
    assert np.abs(over[mask] - (pictures[mask] / 127.5 - 1)).max() > 0.1


def inputs_of(channels, batch, x0=None):
    """Return what a UNet with `channels` inputs sees besides the latents, for three images."""
    p = PIPELINE._replace(unet=PIPELINE.unet.clone(in_channels=channels))
    texts = sampling.prompts(ENCODER, ["a", "bcd", ""], "ugly")
    system, batch = sampling.StableDiffusion(p, ENCODER), {**texts, **batch}
    _, seen = system.sampling_inputs({"vae": {}}, batch, KEYS, x0)
    return np.asarray(seen["picture"])


def test_an_inpainting_unet_sees_the_mask_and_the_latents_of_the_masked_picture(monkeypatch):
    """As in LDM: gray in place of the masked pixels; a latent's mask is that of its first pixel."""
    monkeypatch.setattr(VAE, "apply", half)
    pictures = np.random.default_rng(0).integers(0, 256, (3, 8, 4, 3), np.uint8)
    mask = np.zeros((3, 8, 4), bool)
    mask[1, 2, 2] = mask[2, 1, 1] = True  # The first pixel of a latent, and another one.
    seen = inputs_of(9, {"image": pictures, "mask": mask})
    assert seen.shape == (3, 4, 2, 5)
    np.testing.assert_array_equal(seen[..., 0], mask[:, ::2, ::2])
    colours = np.where(mask[..., None], 0, pictures / 127.5 - 1)[:, ::2, ::2]
    np.testing.assert_allclose(seen[..., 1:4], 0.5 * colours, atol=1e-6)  # latents.scale is 0.5.


def test_without_a_picture_an_inpainting_unet_sees_a_gray_one_that_is_masked_throughout(monkeypatch):
    monkeypatch.setattr(VAE, "apply", half)
    pictures = np.random.default_rng(0).integers(0, 256, (3, 8, 4, 3), np.uint8)
    expected = np.zeros((3, 4, 2, 5))
    expected[..., 0] = 1
    np.testing.assert_array_equal(inputs_of(9, {}), expected)
    np.testing.assert_array_equal(inputs_of(9, {"image": pictures}), expected)


def test_instruct_pix2pix_sees_unscaled_latents_of_the_picture_and_zeros_without_it(monkeypatch):
    monkeypatch.setattr(VAE, "apply", half)
    pictures = np.random.default_rng(0).integers(0, 256, (3, 8, 4, 3), np.uint8)
    seen = inputs_of(8, {"image": pictures})
    np.testing.assert_allclose(seen[..., :3], pictures[:, ::2, ::2] / 127.5 - 1, atol=1e-6)
    assert seen.shape == (3, 4, 2, 4)


def test_the_held_out_loss_of_an_inpainting_model_uses_a_random_mask_of_each_key(monkeypatch):
    monkeypatch.setattr(VAE, "apply", half)
    pictures = np.zeros((3, 8, 4, 3), np.uint8)
    seen = inputs_of(9, {"image": pictures}, jnp.zeros((3, 4, 2, 4)))
    drawn = masks.random_masks(KEYS, 8, 4)
    np.testing.assert_array_equal(seen[..., 0], drawn[:, ::2, ::2])
    assert not drawn.all() and drawn.any()


def test_previews_are_a_linear_approximation_of_the_decoder(draw):
    """With a linear VAE, the previews of each evaluation are exactly its images.

    They have the size of the latents."""
    shown = []
    matrix = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    linear = lambda self, params, x, method: x @ matrix + 0.5
    show = lambda images, sigma: shown.append((np.asarray(images), float(sigma)))
    last = draw(preview=show, vae=linear, steps=3)
    jax.effects_barrier()
    sigmas = levels("ddim", 3)
    assert sorted(sigma for _, sigma in shown) == pytest.approx(sorted(sigmas[:3].tolist()))
    assert all(images.shape == (3, 4, 2, 3) for images, _ in shown)
    assert last.shape == (3, 4, 2, 3)
    colours = sampling.colours(PIPELINE, {})
    np.testing.assert_allclose(colours[0], matrix / 0.5, rtol=1e-5)
    np.testing.assert_allclose(colours[1], 0.5, rtol=1e-5)


def test_padding_tokens_are_embedded_as_zeros():
    p = PIPELINE._replace(conditioning=Conditioning("empty", 5))
    text = sampling.attended(p, ENCODER, {"text": ()}, ENCODER.tokenize(["abc"]))
    assert text.tolist() == [[[3], [1], [0], [0], [0]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 1001}, "sampler.steps is 1001: it must be from 1 to 1000"),
        ({"height": 9}, "sampler.height is 9: it must be a multiple of 2, because latents are 2 times"),
        ({"width": 2047}, "sampler.width is 2047: it must be a multiple of 2"),
    ],
)
def test_invalid_sampler_settings_are_errors(change, message):
    with pytest.raises(ValueError, match=message):
        check_pipeline(PIPELINE._replace(sampler=SAMPLER._replace(**change)))


@pytest.mark.parametrize("strength", [0.0, 0.1, 1.5])
def test_a_strength_that_takes_no_step_is_an_error(strength):
    why = ", which takes 0 of 4 samp" if strength == 0.1 else ": it must be above 0 and at most 1"
    with pytest.raises(ValueError, match=f"strength is {strength}{why}"):
        check_pipeline(PIPELINE._replace(strength=strength))


@pytest.mark.parametrize(("channels", "family"), [(7, "an upscaler"), (5, "a depth model")])
def test_a_unet_with_extra_input_channels_is_an_error_that_names_its_family(channels, family):
    unet = PIPELINE.unet.clone(in_channels=channels)
    with pytest.raises(ValueError, match=f"^the UNet reads {channels} channels, as {family}"):
        check_pipeline(PIPELINE._replace(unet=unet))


@pytest.mark.oracles
@pytest.mark.skipif(not ORACLES.exists(), reason="the saved cases beside the project are not here")
def test_text_to_image_matches_the_reference_from_end_to_end(monkeypatch):
    """Uses OpenCLIP, MLPerf's UNet that predicts v, 4 DDIM steps at guidance 3, and the VAE."""
    case, of_vae, of_text = (torch_weights.read(ORACLES / f"{name}.npz") for name in ("e2e", "vae", "openclip_text"))
    weights = lambda case: {n[2:]: w.astype(np.float32) for n, w in case.items() if n[:2] == "w/"}
    meta, of_vae_meta = (json.loads(c["__meta__"].item()) for c in (case, of_vae))
    unet = formats.unet_from_ldm(meta["config"], meta["norm_groups"])
    autoencoder = ldm_vae(of_vae_meta["config"])
    clip_model = clip_weights.from_state(weights(of_text), json.loads(of_text["__meta__"].item())["config"])
    tower, table = clip.text_tower(clip_model, skip=1)
    state = clip_weights.tower_state(clip_model, table)
    frozen = {
        "text": torch_weights.to_params(state, table, clip.abstract_params(tower)),
        "vae": names.vae_from_torch(weights(of_vae), autoencoder),
    }
    encoder = TextEncoder(
        "clip", 48, 77, lambda texts: {}, (), lambda frozen, batch: (tower.apply(frozen, batch["text_ids"]).last, None)
    )
    p = Pipeline(
        unet,
        autoencoder,
        Conditioning("empty", 0),
        Latents(32, vae.SCALE, "symmetric"),
        Diffusion("v"),
        SAMPLER._replace(height=32, width=32, steps=meta["steps"]),
    )
    images = lambda name: jnp.moveaxis(jnp.asarray(case[name]), 1, -1)
    monkeypatch.setattr(samplers, "initial_noise", lambda keys, shape, s: s * images("xT"))
    ids = jnp.asarray(of_text["ids"])
    batch = {"text_ids": ids[1:], "negative_text_ids": ids[:1].repeat(2, 0)}
    params = names.unet_from_torch(weights(case), unet, 48)
    sample = jax.jit(sampling.make_sample(p, encoder))
    drawn = sample(params, frozen, batch, KEYS[:2], jnp.full(2, meta["scale"]))
    expected = images("decoded")
    np.testing.assert_allclose(drawn, expected, atol=3e-5 * float(jnp.abs(expected).max()))


def test_eps_with_the_cosine_schedule_must_not_start_without_a_signal():
    with pytest.raises(ValueError, match="sampling starts at noise level 2e7, where x has no"):
        tiny.settings(diffusion__noise="cosine")
    tiny.settings(diffusion__noise="cosine", diffusion__predicts="v")
    tiny.settings(diffusion__noise="cosine", sampler__grid="karras", sampler__sigma_max=80.0)
