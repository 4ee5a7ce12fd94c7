"""A store of embeddings returns written rows. Damaged and different stores are errors."""

import functools
import hashlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.config.settings import Text
from diffusion_jax.precache import index, lookup, quantize, shards, store
from diffusion_jax.text import embed, hashed
from tests.diffusion_jax.text import tiny_weights
from tests.diffusion_jax.text.tiny_weights import FIXTURES

IDENTITY = {"encoder": "t5", "width": 128, "max_tokens": 5, "weights": "1a", "tokenizer": "2b"}
TEXTS = ["a dog", "", "a cat on a mat", "ein Hund \ud83d"]
TOKENS = [3, 1, 5, 2]
RNG = np.random.default_rng(0)
ROWS = [RNG.normal(size=(n, 128)).astype(np.float32) for n in TOKENS]


@functools.cache
def quantized():
    """Return all ROWS quantized."""
    q, scales = quantize.quantize(jnp.asarray(np.concatenate(ROWS)))
    split = lambda array: np.split(np.asarray(array), np.cumsum(TOKENS)[:-1])
    return split(q), split(scales)


def as_rows(numbers, format):
    arrays, scales = [ROWS[i] for i in numbers], None
    values = np.concatenate(arrays).astype(store.FORMATS[format])
    if format == "int8":
        values, scales = (np.concatenate([of[i] for i in numbers]) for of in quantized())
    errors = np.tile(np.float32([0.005, 0.9999]), (len(values), 1))
    return shards.EmbeddingRows(np.array([len(a) for a in arrays]), values, scales, errors)


def make(path, format="int8"):
    """Write a finished store with two shards."""
    shards.start(path, IDENTITY, format)
    keys = store.keys_of(TEXTS, IDENTITY)
    halves = [[0, 1], [2, 3]]
    names = [shards.write_shard(path, keys[h], as_rows(h, format)).name for h in halves]
    index.finish(path, names)
    return path


def test_bytes_per_caption_include_rows_scales_and_index():
    assert store.bytes_per_caption(20, 1024, "int8") == 20 * (1024 + 2 * 16) + 72
    assert store.bytes_per_caption(20, 1024, "bfloat16") == 20 * 2048 + 72
    assert store.bytes_per_caption(20, 1024, "float32") == 20 * 4096 + 72


def test_a_store_of_an_earlier_version_can_be_read(tmp_path):
    """Written at commit cc541fd: the digests of weights and tokenizer must still match."""
    weights = tiny_weights.t5_folder(tmp_path / "t5")
    text = Text("t5", str(weights), str(FIXTURES / "store"), 16, 8, 32, "float32", drop_prob=0.1)
    texts = ["a dog\u2019s </s> café", "a dog", "a cat on a mat"]
    rows, mask = map(np.asarray, embed(lookup.open_encoder(text), texts))
    expected, expected_mask = map(np.asarray, embed(lookup.open_online(text), texts))
    np.testing.assert_array_equal(mask, expected_mask)
    error = np.linalg.norm(rows - expected, axis=-1)[mask]
    assert (error < 0.007 * np.linalg.norm(expected, axis=-1)[mask]).all()


@pytest.mark.parametrize(("format", "tolerance"), [("int8", 0.01), ("bfloat16", 3e-3),
                                                   ("float32", 0)])  # fmt: skip
def test_stored_texts_are_read_back_padded_with_0(tmp_path, format, tolerance):
    encoder = store.encoder(store.Store(make(tmp_path, format)))
    order = [2, 0, 3, 3, 1]
    text, mask = embed(encoder, [TEXTS[i] for i in order])
    assert (text.shape, text.dtype) == ((5, 5, 128), jnp.float32)
    np.testing.assert_array_equal(mask, np.arange(5) < np.array(TOKENS)[order, None])
    for row, i in zip(np.asarray(text), order, strict=True):
        tokens = row[: TOKENS[i]]
        error = np.linalg.norm(tokens - ROWS[i], axis=1) / np.linalg.norm(ROWS[i], axis=1)
        assert error.max() <= tolerance
        assert not row[TOKENS[i] :].any()
    assert (encoder.name, encoder.width, encoder.max_tokens) == ("t5", 128, 5)


def test_batches_hold_rows_in_their_stored_format(tmp_path):
    batch = store.Store(make(tmp_path)).read(["a dog"])
    types = {name: (array.shape, array.dtype) for name, array in batch.items()}
    assert types == {
        "text_values": ((1, 5, 128), np.int8),
        "text_scales": ((1, 5, 2), jnp.bfloat16),
        "text_mask": ((1, 5), bool),
    }


def test_a_key_is_a_hash_of_the_text_and_the_encoders_identity():
    salt = hashlib.blake2b(json.dumps(IDENTITY, sort_keys=True).encode(), digest_size=32).digest()
    expected = hashlib.blake2b(b"a dog", key=salt, digest_size=16).digest()
    assert store.keys_of(["a dog"], IDENTITY).tolist() == [expected]
    others = [store.keys_of(["a dog"], IDENTITY | {name: "x"})[0] for name in IDENTITY]
    assert len({expected, *others, store.keys_of(["a dog "], IDENTITY)[0]}) == 7


def test_the_manifest_states_size_and_error(tmp_path):
    manifest = store.Store(make(tmp_path)).manifest
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert manifest["bytes_per_caption"] == size / 4
    assert (manifest["captions"], manifest["tokens"]) == (4, 11)
    errors = [manifest[n] for n in ("mean_relative_error", "largest_relative_error",
                                    "least_cosine")]  # fmt: skip
    np.testing.assert_allclose(errors, [0.005, 0.005, 0.9999])


def test_a_text_in_two_shards_is_counted_once(tmp_path):
    make(tmp_path)
    keys = store.keys_of([TEXTS[0], "new"], IDENTITY)
    more = shards.write_shard(tmp_path, keys, as_rows([2, 3], "int8"))
    old = [shard["file"] for shard in store.read_manifest(tmp_path)["shards"]]
    assert index.finish(tmp_path, [*old, more.name])["captions"] == 5
    opened = store.Store(tmp_path)
    assert opened.read([TEXTS[0], "new"])["text_mask"].sum(1).tolist() == [3, 2]


def test_shards_that_the_manifest_does_not_name_are_removed(tmp_path):
    make(tmp_path)
    shards.write_shard(tmp_path, store.keys_of(["x"], IDENTITY), as_rows([0], "int8"))
    names = [shard["file"] for shard in store.read_manifest(tmp_path)["shards"]]
    index.finish(tmp_path, names)
    assert {file.name for file in tmp_path.glob("shard-*")} == set(names)


def test_missing_captions_are_an_error_with_the_precache_command(tmp_path):
    opened = store.Store(make(tmp_path))
    with pytest.raises(
        ValueError, match=r"2 of 3 captions are not in the store .*such as 'a bird'"
    ):
        opened.read(["a dog", "a bird", "a fish"])
    with pytest.raises(ValueError, match=r"python -m diffusion_jax\.precache --config=CONFIG "):
        opened.read(["a bird"])
    with pytest.raises(
        ValueError, match=r"the data have ndarray of shape \(3, 128\): set data\.text=txt"
    ):
        opened.read([ROWS[0]])


def test_missing_and_unfinished_stores_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing does not exist: check the path"):
        store.Store(tmp_path / "nothing")
    shards.start(tmp_path, IDENTITY, "int8")
    with pytest.raises(
        ValueError, match=r"is unfinished: continue with\n  python -m diffusion_jax"
    ):
        store.Store(tmp_path)


def first_shard(path):
    return path / store.read_manifest(path)["shards"][0]["file"]


def test_a_truncated_or_missing_shard_is_an_error_at_opening(tmp_path):
    shard = first_shard(make(tmp_path))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError, match=f"has {len(whole) - 1} of {len(whole)} bytes: create it a"
    ):
        store.Store(tmp_path)
    shard.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"shard-\w+.safetensors is missing: create it again"
    ):
        store.Store(tmp_path)


@pytest.mark.parametrize("format", ["int8", "bfloat16"])
def test_a_changed_byte_is_an_error_when_it_is_read(tmp_path, format):
    shard = first_shard(make(tmp_path, format))
    contents = bytearray(shard.read_bytes())
    contents[-33] ^= 1  # The end of the second text's values, before 32 bytes of keys.
    shard.write_bytes(contents)
    opened = store.Store(tmp_path)
    opened.read(TEXTS[:1])
    with pytest.raises(ValueError, match=r"the embeddings of '' in .* are damaged: .*\n.*--ver"):
        opened.read(TEXTS[1:2])
    assert shards.usable(shard, verify=False)
    assert not shards.usable(shard, verify=True)
    assert not shard.exists()


def test_a_changed_index_is_an_error_at_opening(tmp_path):
    index = make(tmp_path) / store.INDEX
    contents = bytearray(index.read_bytes())
    contents[-1] ^= 1
    index.write_bytes(contents)
    with pytest.raises(ValueError, match=r"index.safetensors is damaged, or does not belong to"):
        store.Store(tmp_path)


def test_adding_to_a_store_with_another_identity_or_format_is_an_error(tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match=r"other settings \(weights: '1a' stored, '9' requested\)"):
        shards.start(tmp_path, IDENTITY | {"weights": "9"}, "int8")
    with pytest.raises(ValueError, match="has the format 'int8', not 'float32': use the same"):
        shards.start(tmp_path, IDENTITY, "float32")


def test_fingerprints_depend_on_weights_and_token_limits():
    """`hashed` has no weights, so the test adds some."""
    encoder = hashed.encoder(32, 8)
    with_weights = lambda array: encoder._replace(frozen={"a": array})
    array = np.arange(1000.0).reshape(10, 100)
    same = store.fingerprint(with_weights(array))
    assert store.fingerprint(with_weights(array.copy())) == same
    for other in (array + 1, array.reshape(100, 10), array.astype(np.float32)):
        fingerprint = store.fingerprint(with_weights(other))
        assert (
            fingerprint["weights"] != same["weights"]
            and fingerprint["tokenizer"] == same["tokenizer"]
        )
    longer = store.fingerprint(hashed.encoder(32, 9))
    assert longer["tokenizer"] != same["tokenizer"]
