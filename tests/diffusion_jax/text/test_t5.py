"""T5 matches transformers and NeMo, also in bfloat16, and invalid folders are errors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.devices import sharding
from diffusion_jax.devices.lazy_arrays import Stored
from diffusion_jax.text import embed, t5
from diffusion_jax.weights import pretrained, torch_weights
from tests.diffusion_jax.text import tiny_weights
from tests.parity import compare
from tests.parity import text as text_parity

RULES = [(r"(kernel|embedding)$", sharding.FSDP), (r"(bias|scale)$", sharding.P())]
LONG = "A photo of a corgi riding a bike in Times Square. " * 2


@pytest.mark.parametrize(("name", "parameters"), [("t5_relu", 6640), ("t5_gated", 7304)])
def test_all_layers_match_the_saved_reference_outputs(name, parameters):
    """Including masks with holes and a text of 200 tokens. t5_gated has unusual buckets."""
    errors = text_parity.verify(tiny_weights.case(name))
    assert errors["parameters"] == parameters
    assert {"hidden_0", "hidden_1", "last_hidden_state", "long"} <= errors.keys()
    assert compare.within(errors, text_parity.TOLERANCE)


def test_distance_buckets_match_the_paper():
    """Each direction has 8 single distances and 8 ranges. The last starts at 128 / 2^0.5."""
    buckets = t5.distance_buckets(601, 32, 128)
    distances = np.array([0, -1, -7, -8, -11, -12, -16, -23, -32, -90, -91, -600, 1, 7, 16, 600])
    assert buckets[600 + distances].tolist() == [0, 1, 7, 8, 8, 9, 10, 11, 12, 14, 15, 15, 17, 23, 26, 31]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_weights.t5_folder(tmp_path_factory.mktemp("weights") / "t5")


@pytest.fixture(scope="module")
def encoder(folder):
    return t5.encoder(folder, width=16, max_tokens=8, read_tokens=40, dtype="float32")


def opened(folder, dtype=jnp.float32):
    """Return a T5 and its parameters."""
    state = pretrained.open_weights(folder)
    model, table = t5.from_state(state, tiny_weights.read_config(folder), dtype)
    return model, torch_weights.to_params(t5.used(state), table, t5.abstract_params(model))


def by_hand(folder, text, length, max_tokens):
    """Pad to `length`, encode everything, and only then cut to `max_tokens`."""
    model, params = opened(folder)
    tokens = t5.tokenize.t5(folder)([text], length)
    states = jax.jit(model.apply)(params, tokens["text_ids"], tokens["text_mask"])
    mask = tokens["text_mask"][:, :max_tokens]
    return states[:, :max_tokens] * mask[..., None], mask


@pytest.mark.parametrize("text", ["", "a red seven", LONG])
def test_a_long_text_is_encoded_whole_and_its_embedding_is_truncated(folder, encoder, text):
    actual, mask = embed(encoder, [text])
    expected, expected_mask = by_hand(folder, text, 40, 8)
    np.testing.assert_array_equal(mask, expected_mask)
    # Only the order of sums may differ, because short texts are encoded without padding.
    np.testing.assert_allclose(actual, expected, atol=2e-6 * float(jnp.abs(expected).max()))
    assert not np.asarray(actual)[~np.asarray(mask)].any()


def test_tokens_after_the_cut_influence_the_embedding(encoder):
    (one, other), mask = embed(encoder, [LONG, LONG.replace("Square", "photo")])
    assert mask.all()
    assert float(jnp.abs(one - other).max()) > 1e-3


def test_a_long_text_does_not_change_other_texts_of_its_batch(encoder):
    alone, _ = embed(encoder, ["a red seven", ""])
    together, _ = embed(encoder, ["a red seven", LONG])
    np.testing.assert_allclose(alone[0], together[0], atol=1e-6 * float(jnp.abs(alone).max()))


def test_512_tokens_are_read_by_default(folder):
    tokens = t5.encoder(folder, width=16, max_tokens=128).tokenize(["x " * 600])
    assert tokens["text_ids"].shape == (1, 512)
    assert tokens["text_ids"][0, -1] == 1


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A T5 with embeddings of about 1e6, to which a layer adds about 3e3."""
    path = tmp_path_factory.mktemp("weights") / "large"
    return tiny_weights.t5_folder(path, stream=4e6, update=3e3)


def layer_update(folder, dtype):
    """Return how the layer changes the normalized output, and the largest input of the layer."""
    model, params = opened(folder, dtype)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
    tokens = t5.tokenize.t5(folder)(["a photo of a bike"], 6)
    states = jax.jit(lambda p, i, m: model.apply(p, i, m, method="hidden_states"))
    embeddings, out = states(params, tokens["text_ids"], tokens["text_mask"])
    rms = jnp.sqrt((embeddings**2).mean(-1, keepdims=True))
    scale = params["params"]["final_norm"]["scale"].astype(jnp.float32)
    return out - embeddings / rms * scale, float(jnp.abs(embeddings).max())


def test_bfloat16_keeps_small_updates_of_a_large_residual_stream(large):
    """Near 1e6, bfloat16 numbers are 8,192 apart, so a sum in bfloat16 would lose 3e3."""
    exact, largest = layer_update(large, jnp.float32)
    rounded, _ = layer_update(large, jnp.bfloat16)
    assert largest > 1e6
    assert float(jnp.abs(exact).max()) > 1e-3
    error = float(jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact))
    assert error < 0.05


def test_bfloat16_is_within_2_percent_of_float32_at_a_stream_of_1e15(tmp_path):
    folder = tiny_weights.t5_folder(tmp_path / "t5", stream=1e15, update=1e15)
    make = lambda dtype: t5.encoder(folder, width=16, max_tokens=6, read_tokens=6, dtype=dtype)
    exact, _ = embed(make("float32"), ["a photo of a bike"])
    rounded, _ = embed(make("bfloat16"), ["a photo of a bike"])
    assert bool(jnp.isfinite(rounded).all())
    assert rounded.dtype == jnp.float32
    error = float(jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact))
    assert 1e-4 < error < 0.02


def test_an_encoder_sharded_over_eight_devices_gives_equal_embeddings(folder, encoder):
    mesh = sharding.make_mesh(1, 8, 1)
    frozen = sharding.place_all(encoder.frozen, mesh, RULES)
    table = frozen["params"]["token_embedding"]
    assert table.addressable_shards[0].data.size == table.size // 8
    assert table.dtype == jnp.float32
    tokens = encoder.tokenize([LONG, "a red seven"] * 4)
    tokens = jax.device_put(tokens, sharding.batch_sharding(mesh))
    actual, mask = jax.jit(encoder.encode)(frozen, tokens)
    expected, _ = embed(encoder, [LONG, "a red seven"] * 4)
    np.testing.assert_allclose(actual, expected, atol=2e-6 * float(jnp.abs(expected).max()))
    assert int(mask.sum()) == 4 * (8 + 5)


def test_opening_an_encoder_does_not_read_its_weights(encoder):
    leaves = jax.tree.leaves(encoder.frozen)
    assert all(isinstance(leaf, Stored) for leaf in leaves)
    assert len(leaves) == 11  # Without the decoder and the duplicate of the embedding.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 1024}, "text.width is 1024, but the T5 in .* has width 16: set text.width=16"),
        ({"read_tokens": 4}, "text.read_tokens is 4: it must be at least text.max_tokens, which"),
    ],
)
def test_a_width_or_length_that_does_not_fit_is_an_error(folder, fields, message):
    with pytest.raises(ValueError, match=message):
        t5.encoder(folder, **({"width": 16, "max_tokens": 8} | fields))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_layers": 24}, "num_layers is 24 in the config, but 1 in the weights"),
        ({"feed_forward_proj": "gated-gelu"}, "specifies a gated feed-forward layer, but the"),
        ({"feed_forward_proj": "rleu"}, "feed_forward_proj in config.json is 'rleu': supported are relu"),
    ],
)
def test_a_config_with_unsupported_values_is_an_error(tmp_path, config, message):
    folder = tiny_weights.t5_folder(tmp_path / "t5")
    (folder / "config.json").write_text(json.dumps(tiny_weights.read_config(folder) | config))
    with pytest.raises(ValueError, match=message):
        t5.encoder(folder, width=16, max_tokens=8)


def test_a_tokenizer_with_more_tokens_than_the_weights_is_an_error(tmp_path):
    folder = tiny_weights.t5_folder(tmp_path / "t5", vocab_size=7000)
    with pytest.raises(ValueError, match=r"the tokenizer in .* has 7500 tokens, but the weights have only 7000"):
        t5.encoder(folder, width=16, max_tokens=8)


def test_weights_of_a_clip_and_missing_files_are_errors(tmp_path):
    folder = tiny_weights.t5_folder(tmp_path / "t5")
    (folder / "spiece.model").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither spiece\.model nor tokenizer\.json"):
        t5.encoder(folder, width=16, max_tokens=8)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no file .*config.json: download it together"):
        t5.encoder(folder, width=16, max_tokens=8)
    clip = tiny_weights.clip_folder(tmp_path / "clip", "clip")
    with pytest.raises(ValueError, match=r"in .*clip: the weights are not a T5 encoder's: their \d+ arrays lack "):
        t5.encoder(clip, width=16, max_tokens=8)
