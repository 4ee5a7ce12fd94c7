"""Both CLIP towers match the references, and folders of both publishers can be read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.text import clip, clip_weights, embed
from diffusion_jax.weights import pretrained, torch_weights
from tests.diffusion_jax.text import tiny_weights
from tests.diffusion_jax.weights import torch_writer
from tests.parity import compare
from tests.parity import text as text_parity

TEXT = {"penultimate", "text_features"}
IMAGES = {"image_features", "clip_score"}


@pytest.mark.parametrize(
    ("name", "outputs", "parameters"),
    [
        ("clip", {*TEXT, *IMAGES, "hidden_2", "pooled", "last_hidden_state"}, 33104),
        ("open_clip", {*TEXT, *IMAGES, "last"}, 48832),
    ],
)
def test_both_towers_match_the_saved_reference_outputs(name, outputs, parameters):
    errors = text_parity.verify(tiny_weights.case(name))
    assert outputs <= errors.keys()
    assert compare.within(errors, text_parity.TOLERANCE)
    assert errors["parameters"] == parameters


def case_ids(case, tokenize):
    """Check the ids of texts of single letters, and return all ids."""
    ids = tokenize(["a c", "b " * 40])["text_ids"]
    assert ids[0, :4].tolist() == [38, 0, 2, 39]
    assert ids[1].tolist() == [38, *[1] * 14, 39]
    return ids


@pytest.mark.parametrize(
    ("name", "layer", "pad"), [("clip", "last", 39), ("open_clip", "penultimate", 0), ("open_clip", "last", 0)]
)
def test_the_encoder_returns_the_configured_layer(tmp_path, name, layer, pad):
    folder = tiny_weights.clip_folder(tmp_path / name, name)
    encoder = clip.encoder(folder, width=24, max_tokens=16, layer=layer, dtype="float32")
    ids = case_ids(tiny_weights.case(name), encoder.tokenize)
    assert ids[0, 4:].tolist() == [pad] * 12
    text, mask = embed(encoder, ["a c", "b " * 40])
    opened = clip_weights.open_clip(folder)
    tower, table = clip.text_tower(opened)
    state = clip_weights.tower_state(opened, table)
    params = torch_weights.to_params(state, table, clip.abstract_params(tower))
    np.testing.assert_allclose(text, getattr(jax.jit(tower.apply)(params, ids), layer), atol=1e-5)
    assert mask.all()


def test_the_penultimate_encoder_does_not_open_the_last_layers_weights(tmp_path):
    folder = tiny_weights.clip_folder(tmp_path / "clip", "open_clip")
    names = lambda layer: clip.encoder(folder, width=24, max_tokens=16, layer=layer).frozen["params"].keys()
    last, penultimate = names("last"), names("penultimate")
    assert {name.partition("_")[0] for name in last - penultimate} == {"layer", "projection"}
    assert not any(name.startswith("layer_1") for name in penultimate)


def test_bfloat16_clip_is_within_3_percent_of_float32(tmp_path):
    folder = tiny_weights.clip_folder(tmp_path / "clip", "clip")
    make = lambda dtype: clip.encoder(folder, width=24, max_tokens=16, dtype=dtype)
    exact, _ = embed(make("float32"), ["a c"])
    rounded, _ = embed(make("bfloat16"), ["a c"])
    assert rounded.dtype == jnp.float32
    difference = float(jnp.linalg.norm(exact - rounded) / jnp.linalg.norm(exact))
    assert 1e-4 < difference < 0.03


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 768}, "text.width is 768, but the CLIP in .* has width 24: set text.width=24"),
        ({"max_tokens": 77}, "text.max_tokens is 77, but the CLIP in .* has only 16 positions"),
        ({"layer": "first"}, "layer is 'first': choose 'last' or 'penultimate'"),
    ],
)
def test_a_width_length_or_layer_that_does_not_fit_is_an_error(tmp_path, fields, message):
    folder = tiny_weights.clip_folder(tmp_path / "clip", "clip")
    with pytest.raises(ValueError, match=message):
        clip.encoder(folder, **({"width": 24, "max_tokens": 16} | fields))


def test_weights_of_a_t5_and_a_missing_tokenizer_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"the model in .*t5: the weights are not CLIP's: their 13"):
        clip.encoder(tiny_weights.t5_folder(tmp_path / "t5"), width=16, max_tokens=8)
    folder = tiny_weights.clip_folder(tmp_path / "clip", "clip")
    (folder / "merges.txt").unlink()
    with pytest.raises(FileNotFoundError, match="holds no CLIP tokenizer"):
        clip.encoder(folder, width=24, max_tokens=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 12}, "num_hidden_layers is 12 in the config, but 2 in the weights"),
        ({"num_attention_heads": 5}, "the text_model's 5 attention heads do not divide its width"),
        ({"hidden_act": "tanh"}, "the activation 'tanh', which is not supported: it must be one of relu"),
    ],
)
def test_a_config_with_unsupported_values_is_an_error(change, message):
    case = tiny_weights.case("clip")
    config = tiny_weights.config(case)
    config["text_config"] |= change
    with pytest.raises(ValueError, match=message):
        clip.text_tower(clip_weights.from_state(tiny_weights.state(case), config))


def test_a_missing_image_tower_is_an_error_that_names_it():
    case = tiny_weights.case("clip")
    state = {n: a for n, a in tiny_weights.state(case).items() if not n.startswith("vis")}
    opened = clip_weights.from_state(state, tiny_weights.config(case))
    with pytest.raises(ValueError, match="have no vision_model, only text_model"):
        clip.image_tower(opened)


def test_an_unexpected_array_is_an_error_that_names_it():
    case = tiny_weights.case("clip")
    state = tiny_weights.state(case) | {"text_model.adapter.weight": np.zeros(2)}
    opened = clip_weights.from_state(state, tiny_weights.config(case))
    tower, table = clip.text_tower(opened)
    with pytest.raises(ValueError, match=r"keys left over \(1\): text_model\.adapter\.weight"):
        torch_weights.to_params(clip_weights.tower_state(opened, table), table, clip.abstract_params(tower))


@pytest.mark.parametrize(
    ("name", "pickled"), [("clip", "pytorch_model.bin"), ("open_clip", "open_clip_pytorch_model.bin")]
)
def test_pickled_weights_of_both_origins_equal_the_safetensors(tmp_path, name, pickled):
    folder = tiny_weights.clip_folder(tmp_path / name, name)
    expected = clip_weights.open_clip(folder)
    (folder / "model.safetensors").unlink()
    torch_writer.save(folder / pickled, tiny_weights.state(tiny_weights.case(name)))
    opened = clip_weights.open_clip(folder)
    assert opened.towers == expected.towers and opened.state.keys() == expected.state.keys()
    jax.tree.map(np.testing.assert_array_equal, opened.state, expected.state)


def test_open_clip_weights_without_a_config_are_an_error(tmp_path):
    folder = tiny_weights.clip_folder(tmp_path / "clip", "open_clip")
    (folder / "open_clip_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no file .*config.json"):
        clip_weights.open_clip(folder)
    assert clip_weights.is_open_clip(pretrained.open_weights(folder))
