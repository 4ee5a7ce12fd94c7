"""Encoding texts in batches of equal length gives the same embeddings as encoding them alone."""

import functools

import jax
import numpy as np
import pytest

from diffusion_jax.devices import sharding
from diffusion_jax.precache import encode
from diffusion_jax.text import clip, embed, t5
from tests.diffusion_jax.text import tiny_weights

TEXTS = ["a red seven on gray paper", "", "paper " * 40, "a blue three", "gray " * 14, "seven " * 90]


@pytest.fixture(scope="module")
def t5_encoder(tmp_path_factory):
    folder = tiny_weights.t5_folder(tmp_path_factory.mktemp("weights") / "t5", width=64)
    return t5.encoder(folder, width=64, max_tokens=48, read_tokens=192, dtype="float32")


@pytest.fixture(scope="module")
def reference(t5_encoder):
    """Return the embeddings as in training: padded to read_tokens, encoded, cut to max_tokens."""
    text, mask = embed(t5_encoder, TEXTS)
    return [np.asarray(row)[m] for row, m in zip(text, np.asarray(mask), strict=True)]


def encoder_of(encoder, format, batch_tokens=64, devices=2):
    mesh = sharding.make_mesh(1, -1, 1, jax.devices()[:devices])
    frozen = sharding.place_all(encoder.frozen, mesh, [("", sharding.FSDP)])
    return encode.make_encode(encoder, frozen, mesh, format, batch_tokens)


@pytest.fixture(scope="module")
def encode_float32(t5_encoder):
    return encoder_of(t5_encoder, "float32")


def test_short_batches_give_the_same_embeddings_as_padded_ones(encode_float32, reference):
    """Up to 1e-5 of the largest value, because sums are in another order."""
    rows = encode_float32(TEXTS)
    assert rows.tokens.tolist() == [len(r) for r in reference]
    assert rows.scales is None
    expected = np.concatenate(reference)
    np.testing.assert_allclose(rows.values, expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(rows.errors[:, 0], 0)


def test_an_embedding_does_not_depend_on_its_batch(encode_float32):
    rows = encode_float32(TEXTS)
    order = [4, 0, 3, 5, 1, 2]
    again = encode_float32([TEXTS[i] for i in order])
    split = lambda r: np.split(r.values, np.cumsum(r.tokens)[:-1])
    for i, values in zip(order, split(again), strict=True):
        np.testing.assert_array_equal(values, split(rows)[i])


def test_int8_embeddings_have_an_error_below_1_percent(t5_encoder, reference):
    rows = encoder_of(t5_encoder, "int8")(TEXTS)
    assert (rows.values.dtype, rows.scales.shape) == (np.int8, (len(rows.values), 1))
    signed = rows.values.astype(float) * np.abs(rows.values.astype(float)) / 127**2
    values, expected = signed * np.asarray(rows.scales, float), np.concatenate(reference)
    norm = functools.partial(np.linalg.norm, axis=1)
    relative = norm(values - expected) / norm(expected)
    assert relative.max() < 0.01
    np.testing.assert_allclose(rows.errors[:, 0], relative, atol=2e-5)
    assert rows.errors[:, 1].min() > 0.9999


def test_batches_contain_every_text_and_are_filled_up_for_the_devices():
    lengths = np.array([3, 17, 16, 300, 1, 20, 2])
    batches = [(part.tolist(), length) for part, length in encode._batches(lengths, 64, 2)]
    assert batches == [([4, 6, 0, 4, 4, 4, 4, 4], 8), ([2, 2, 2, 2], 16), ([1, 5], 24), ([3, 3], 320)]
    ladder = {length for _, length in encode._batches(np.arange(1, 257), 1, 1)}
    assert sorted(ladder) == [*range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]


def test_clip_embeddings_keep_all_positions(tmp_path):
    folder = tiny_weights.clip_folder(tmp_path / "clip", "clip")
    width = clip_width(folder)
    encoder = clip.encoder(folder, width=width, max_tokens=16, dtype="float32")
    rows = encoder_of(encoder, "float32")(["a b", "c"])
    text, _ = embed(encoder, ["a b", "c"])
    assert rows.tokens.tolist() == [16, 16]
    np.testing.assert_allclose(rows.values, np.reshape(text, (32, width)), atol=1e-5)
    assert encode.lengths_of(encoder, ["a b"]).tolist() == [16]


def clip_width(folder):
    config = tiny_weights.read_config(folder)
    return config.get("text_config", config)["hidden_size"]
