"""DINOv2 against features that transformers computed with seeded weights."""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from diffusion_jax.metrics import dinov2, extractors

FIXTURE = pathlib.Path(__file__).parents[2] / "fixtures" / "dinov2.npz"
CONFIG = {"num_attention_heads": 2, "model_type": "dinov2_with_registers"}


@pytest.fixture(scope="module")
def saved():
    """A state dict in Hugging Face's names, images, and features of Dinov2WithRegistersModel."""
    with np.load(FIXTURE) as file:
        return dict(file)


def state_of(saved):
    return {n.removeprefix("state/"): a for n, a in saved.items() if n.startswith("state/")}


def folder(tmp_path, state):
    safetensors.numpy.save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_features_match_transformers(saved, tmp_path):
    extractor = dinov2.load(folder(tmp_path, state_of(saved)))
    features = extractors.on_host(extractor)(saved["images"])
    expected = saved["features"]
    np.testing.assert_allclose(features, expected, atol=1e-5 * np.abs(expected).max())
    assert (extractor.width, extractor.preprocessing) == (expected.shape[1], "dgm_eval")
    assert extractor.official is False and extractor.name.startswith("dinov2_")


def test_weights_with_the_authors_names_load_like_hugging_faces(saved):
    """In dinov2_vitl14_reg4_pretrain.pth, one matrix holds q, k and v."""
    state = state_of(saved)
    theirs = {
        "cls_token": state["embeddings.cls_token"],
        "mask_token": state["embeddings.mask_token"],
        "register_tokens": state["embeddings.register_tokens"],
        "pos_embed": state["embeddings.position_embeddings"],
    }
    for end in ("weight", "bias"):
        theirs[f"patch_embed.proj.{end}"] = state[f"embeddings.patch_embeddings.projection.{end}"]
        theirs[f"norm.{end}"] = state[f"layernorm.{end}"]
        for i in range(2):
            source, target = f"encoder.layer.{i}", f"blocks.{i}"
            parts = [state[f"{source}.attention.attention.{n}.{end}"] for n in ("query", "key", "value")]
            theirs[f"{target}.attn.qkv.{end}"] = np.concatenate(parts)
            theirs[f"{target}.attn.proj.{end}"] = state[f"{source}.attention.output.dense.{end}"]
            for same in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
                theirs[f"{target}.{same}.{end}"] = state[f"{source}.{same}.{end}"]
    for i in range(2):
        for n in (1, 2):
            scale = state[f"encoder.layer.{i}.layer_scale{n}.lambda1"]
            theirs[f"blocks.{i}.ls{n}.gamma"] = scale
    (network, arrays), (same, expected) = dinov2.of_state(theirs), dinov2.of_state(state)
    assert network == same and arrays.keys() == expected.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("antialias", [False, True])
def test_interpolated_positions_match_torch(saved, antialias):
    """Saved from interpolate(antialias=True) to 16, and interpolate(scale_factor=16.1 / 37)."""
    positions = dinov2._positions(saved["positions"], 16, antialias=antialias)
    np.testing.assert_allclose(positions[:, 1:], saved[f"positions_{antialias}"], atol=2e-5)
    np.testing.assert_array_equal(positions[:, 0], saved["positions"][:, 0])


def test_weights_of_another_network_or_with_a_missing_tensor_are_an_error(saved, tmp_path):
    with pytest.raises(ValueError, match="not a DINOv2 with plain MLPs: pos_embed or"):
        dinov2.of_state({"embedding": np.zeros(3)})
    state = state_of(saved)
    del state["encoder.layer.1.norm2.bias"]
    with pytest.raises(ValueError, match=r"blocks\.1\.norm2\.bias"):
        dinov2.load(folder(tmp_path, state))
