"""Stored embeddings: padding, and errors for wrong inputs."""

import numpy as np
import pytest

from diffusion_jax.text import embed, precomputed

ARRAY = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float16)


def test_short_embeddings_are_padded_with_0_and_long_ones_cut():
    encoder = precomputed.encoder(width=4, max_tokens=2)
    text, mask = embed(encoder, [ARRAY, ARRAY[:1], ARRAY[:0]])
    expected = np.zeros((3, 2, 4), np.float32)
    expected[0], expected[1, 0] = ARRAY[:2], ARRAY[0]
    np.testing.assert_array_equal(text, expected, strict=True)
    np.testing.assert_array_equal(mask, [[1, 1], [1, 0], [0, 0]])


def test_captions_and_embeddings_of_another_width_are_errors():
    tokenize = precomputed.encoder(width=5, max_tokens=2).tokenize
    with pytest.raises(ValueError, match=r"the data hold the caption 'a red seven': set data\.text"):
        tokenize(["a red seven"])
    with pytest.raises(ValueError, match=r"have shape \(3, 4\), but text.width=5 expects \[tokens, 5\]"):
        tokenize([ARRAY])
