"""The models of both systems' configs as shapes, without weights or data."""

import math

import jax
import pytest

from configs import base64_500m_online, sd2_512_base, sd2_mlperf, sd_quickstart_vae
from diffusion_jax.config.settings import Text
from diffusion_jax.devices import flops
from diffusion_jax.train import memory
from launch.planner import encoders, tasks


def size(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("encoder", "width", "parameters"),
    [
        ("t5", 1024, 4_864_791_552),  # The encoder of T5-11b.
        ("t5", 4096, 4_762_310_656),  # The encoder of T5 v1.1 XXL.
        ("clip", 768, 123_060_480),  # CLIP ViT-L/14.
        ("clip_penultimate", 1024, 340_387_840),  # OpenCLIP ViT-H/14 without its last layer.
    ],
)
def test_text_encoders_without_weights_have_their_published_shapes(encoder, width, parameters):
    text = Text(encoder, "nowhere/at/all", "", width, 77, 77, "bfloat16", 0.0)
    opened, notes = encoders.open_encoder(text)
    assert size(opened.frozen) == parameters
    assert {leaf.dtype for leaf in jax.tree.leaves(opened.frozen)} == {jax.numpy.dtype("bfloat16")}
    assert len(notes) == 1 and f"only the shape of the text encoder {encoder} (" in notes[0]


def test_a_text_encoder_of_unknown_shape_is_an_error():
    text = Text("t5", "nowhere/at/all", "", 500, 77, 77, "bfloat16", drop_prob=0.0)
    with pytest.raises(OSError, match="nowhere"):
        encoders.open_encoder(text)


def forward_flops(model):
    frozen = memory.shapes(model.task.frozen)
    loss = jax.make_jaxpr(model.task.loss)
    batch, key = memory.batch_of(model.example, 1), memory.abstract_keys(1)
    return flops.count(loss(model.state.params, frozen, batch, key).jaxpr)


@pytest.mark.slow
def test_flops_of_stable_diffusion_on_images_include_vae_and_text_encoder():
    model = tasks.read(sd2_512_base.get_config().to_dict())
    assert size(model.state.params) == 865_910_724
    # An independent count of the UNet, the VAE's encoder, and the text encoder with 77 tokens,
    # which also encodes the empty text once per step, for dropped captions.
    assert forward_flops(model) == pytest.approx(804.3e9 + 1117e9 + 2 * 45e9, rel=0.01)


@pytest.mark.slow
def test_flops_of_stable_diffusion_on_moments_exclude_the_vae():
    model = tasks.read(sd2_mlperf.get_config().to_dict())
    assert model.example["moments"].shape == (1, 64, 64, 8)
    assert forward_flops(model) == pytest.approx(804.3e9 + 2 * 45e9, rel=0.01)


def test_imagen_on_captions_includes_the_parameters_of_t5():
    model = tasks.read(base64_500m_online.get_config().to_dict())
    assert size(model.task.frozen) == 4_864_791_552


def test_planning_an_autoencoder_is_an_error():
    with pytest.raises(ValueError, match=r"system sd_jax\.vae, which cannot be planned"):
        tasks.read(sd_quickstart_vae.get_config().to_dict())
