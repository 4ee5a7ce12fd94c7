"""Hashed words: ids that never change, and vectors that encode a word and its position."""

import hashlib

import numpy as np

from diffusion_jax.text import TextEncoder, embed, hashed

WIDTH, MAX_TOKENS = 256, 6
ENCODER = hashed.encoder(WIDTH, MAX_TOKENS)


def vectors(*texts):
    text, mask = embed(ENCODER, texts)
    return np.asarray(text), np.asarray(mask)


def test_an_id_is_the_first_four_bytes_of_the_blake2b_hash():
    tokens = ENCODER.tokenize(["Seven!"])
    assert tokens["text_ids"].dtype == np.uint32
    digest = hashlib.blake2b(b"seven", digest_size=4).digest()
    assert tokens["text_ids"][0, 0] == int.from_bytes(digest, "little") == 656600799
    np.testing.assert_array_equal(tokens["text_mask"], [[True] + [False] * 5])


def test_words_are_runs_of_letters_and_digits_in_lower_case():
    tokens = ENCODER.tokenize(["A red_SEVEN, on gray-paper", "a red seven on gray paper", "größe 3²"])
    np.testing.assert_array_equal(tokens["text_ids"][0], tokens["text_ids"][1])
    assert tokens["text_mask"][2].sum() == 2


def test_long_texts_are_cut_and_short_ones_padded_with_0():
    tokens = ENCODER.tokenize(["a b c d e f g h", "a b", ""])
    np.testing.assert_array_equal(tokens["text_mask"].sum(1), [6, 2, 0])
    np.testing.assert_array_equal(tokens["text_ids"][0, :2], tokens["text_ids"][1, :2])
    text, mask = vectors("a b", "")
    assert text.shape == (2, MAX_TOKENS, WIDTH) and text.dtype == np.float32
    np.testing.assert_array_equal(text[~mask], 0)
    np.testing.assert_array_equal(np.abs(text[mask]), 1)  # All values are 1 or -1.


def test_vectors_of_different_words_are_uncorrelated():
    text, _ = vectors(*(f"w{i}" for i in range(400)))
    cosines = (text[:, 0] @ text[:, 0].T / WIDTH)[np.triu_indices(400, 1)]
    assert abs(cosines.mean()) < 0.001  # 80,000 pairs of deviation 1/16: 0.0002.
    np.testing.assert_allclose(cosines.std(), WIDTH**-0.5, rtol=0.02)


def test_the_first_half_encodes_the_word_and_the_second_word_and_position():
    text, _ = vectors("dog bites man", "man bites dog")
    half = WIDTH // 2
    np.testing.assert_array_equal(text[0, 0, :half], text[1, 2, :half])
    assert abs(np.mean(text[0, 0, half:] * text[1, 2, half:])) < 4 / half**0.5
    # Averaged over tokens, only the second half depends on their order.
    mean = text[:, :3].mean(1)
    np.testing.assert_allclose(mean[0, :half], mean[1, :half], atol=1e-6)
    assert np.abs(mean[0, half:] - mean[1, half:]).mean() > 0.3


def test_sign_flips_of_the_second_half_depend_only_on_the_position():
    text, _ = vectors("a b c", "c a b")
    half = WIDTH // 2
    flips = [text[0, 0] * text[1, 1], text[0, 1] * text[1, 2]]  # Positions 0 and 1, 1 and 2.
    np.testing.assert_array_equal(flips[0][:half], 1)
    text, _ = vectors("x y z", "z x y")
    np.testing.assert_array_equal(text[0, 0] * text[1, 1], flips[0])
    np.testing.assert_array_equal(text[0, 1] * text[1, 2], flips[1])


def test_the_width_need_not_be_a_multiple_of_32():
    encoder = hashed.encoder(40, MAX_TOKENS)
    assert isinstance(encoder, TextEncoder) and encoder.width == 40
    text, mask = embed(encoder, ["one two", "three"])
    assert text.shape == (2, MAX_TOKENS, 40)
    np.testing.assert_array_equal(np.abs(np.asarray(text)[np.asarray(mask)]), 1)
