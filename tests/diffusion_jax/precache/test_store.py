"""A store of embeddings returns written rows. Damaged and different stores are errors."""

import functools
import hashlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.config.settings import Text
from diffusion_jax.data import columns
from diffusion_jax.files.safetensors_files import map_safetensors
from diffusion_jax.precache import lookup, quantize, store
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


def computed(numbers, format):
    arrays, rows = [ROWS[i] for i in numbers], {}
    rows["values"] = np.concatenate(arrays).astype(store.FORMATS[format])
    if format == "int8":
        rows["values"], rows["scales"] = (np.concatenate([of[i] for i in numbers]) for of in quantized())
    return columns.Computed(np.array([len(a) for a in arrays]), rows, np.array([0.1, 0.2, 0.9]))


def fill(path, texts, format="int8", verify=False):
    """Fill a store with chunks of two texts, and return the numbers of the texts that were new."""
    identity, new = IDENTITY | {"format": format}, []
    columns.start(path, identity, store.KIND)
    items = np.zeros(len(texts), columns.ITEM)
    items["key"], items["number"] = store.keys_of(texts, identity), np.arange(len(texts))

    def compute(numbers):
        new.extend(numbers.tolist())
        return computed(numbers % 4, format)

    work = columns.Work(lambda items: items["number"], compute, 2, verify=verify)
    return columns.fill(path, items, work), new


def make(path, format="int8"):
    """Write a finished store with two chunks."""
    fill(path, TEXTS, format)
    return path


def chunks(path):
    """Return the files of the chunks, in order."""
    return [path / name for name in columns._names(map_safetensors(path / columns.INDEX))]


def test_bytes_per_caption_include_rows_scales_and_index():
    assert store.bytes_per_caption(20, 1024, "int8") == 20 * (1024 + 2 * 16) + 56
    assert store.bytes_per_caption(20, 1024, "bfloat16") == 20 * 2048 + 56
    assert store.bytes_per_caption(20, 1024, "float32") == 20 * 4096 + 56


def test_embeddings_of_an_earlier_commit_can_be_read(tmp_path):
    """Written at commit cc541fd. The digests of weights and tokenizer must still match."""
    weights = tiny_weights.t5_folder(tmp_path / "t5")
    text = Text("t5", str(weights), str(FIXTURES / "store"), 16, 8, 32, "float32", drop_prob=0.1)
    texts = ["a dog\u2019s </s> café", "a dog", "a cat on a mat"]
    rows, mask = map(np.asarray, embed(lookup.open_encoder(text), texts))
    expected, expected_mask = map(np.asarray, embed(lookup.open_online(text), texts))
    np.testing.assert_array_equal(mask, expected_mask)
    error = np.linalg.norm(rows - expected, axis=-1)[mask]
    assert (error < 0.007 * np.linalg.norm(expected, axis=-1)[mask]).all()


@pytest.mark.parametrize(("format", "tolerance"), [("int8", 0.01), ("bfloat16", 3e-3), ("float32", 0)])
def test_stored_texts_are_read_back_padded_with_0(tmp_path, format, tolerance):
    encoder = store.Store(make(tmp_path, format)).encoder()
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
    types = {name.removeprefix("text_"): (array.shape, array.dtype) for name, array in batch.items()}
    assert types == {"values": ((1, 5, 128), np.int8), "scales": ((1, 5, 2), jnp.bfloat16), "mask": ((1, 5), bool)}


def test_a_key_is_a_hash_of_the_text_and_the_encoders_identity():
    salt = hashlib.blake2b(json.dumps(IDENTITY, sort_keys=True).encode(), digest_size=32).digest()
    expected = hashlib.blake2b(b"a dog", key=salt, digest_size=16).digest()
    assert store.keys_of(["a dog"], IDENTITY).tolist() == [expected]
    others = [store.keys_of(["a dog"], IDENTITY | {name: "x"})[0] for name in IDENTITY]
    assert len({expected, *others, store.keys_of(["a dog "], IDENTITY)[0]}) == 7


def test_the_size_of_a_store_is_that_of_its_files(tmp_path):
    filled, _ = fill(tmp_path, TEXTS)
    assert filled.bytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert filled.items == 4 and [chunk["first"][-1] for chunk in filled.chunks] == [4, 7]


@pytest.mark.parametrize(
    ("texts", "new"),
    [
        (TEXTS, []),
        (["b", *TEXTS, "b", "c", "b"], [0, 6]),  # Texts that came to the data.
        (["b"], [0]),
        (TEXTS[:2], []),
    ],
)
def test_only_new_texts_are_computed_and_no_text_is_lost(tmp_path, texts, new):
    path, expected = make(tmp_path), store.Store(make(tmp_path)).read(TEXTS)
    before = {file: file.stat().st_mtime_ns for file in chunks(path)}
    filled, computed_now = fill(path, texts)
    assert computed_now == new and filled.items == len({*texts, *TEXTS})
    assert before.items() <= {file: file.stat().st_mtime_ns for file in chunks(path)}.items()
    opened = store.Store(path)
    opened.read(texts)
    for name, array in opened.read(TEXTS).items():
        np.testing.assert_array_equal(array, expected[name])


def test_a_text_in_two_chunks_is_counted_once_and_other_chunks_are_removed(tmp_path):
    path = make(tmp_path)
    first, second = chunks(path)
    columns.write_chunk(path, store.keys_of(["x"], IDENTITY), computed([0], "int8"))
    stray = set(path.glob("*.safetensors")) - {first, second, path / columns.INDEX}
    first.unlink()
    filled, new = fill(path, [TEXTS[0], "new", *TEXTS])
    assert new == [0, 1, 3] and filled.items == 5
    assert not stray & set(path.iterdir())


def test_missing_captions_are_an_error_with_the_precache_command(tmp_path):
    opened = store.Store(make(tmp_path))
    with pytest.raises(ValueError, match=r"2 of 3 captions are not in the store .*such as 'a bird'"):
        opened.read(["a dog", "a bird", "a fish"])
    with pytest.raises(ValueError, match=r"python -m diffusion_jax\.precache --config=CONFIG "):
        opened.read(["a bird"])
    with pytest.raises(ValueError, match=r"the data have ndarray of shape \(3, 128\): set data\.text=txt"):
        opened.read([ROWS[0]])


def test_missing_and_unfinished_stores_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing does not exist: check the path"):
        store.Store(tmp_path / "nothing")
    columns.start(tmp_path, IDENTITY, store.KIND)
    with pytest.raises(ValueError, match=r"is unfinished: continue with\n  python -m diffusion_jax"):
        store.Store(tmp_path)


def test_a_store_of_an_earlier_version_is_an_error_that_says_what_to_do(tmp_path):
    (tmp_path / "manifest.json").write_text('{"version": 1}')
    (tmp_path / "index.safetensors").write_bytes(b"")
    for use in (store.Store, lambda path: columns.start(path, IDENTITY, store.KIND)):
        with pytest.raises(ValueError, match="another version wrote it: make it again with\n  pyt"):
            use(tmp_path)


def test_a_truncated_or_missing_chunk_is_an_error_at_opening(tmp_path):
    chunk = chunks(make(tmp_path))[0]
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"has {len(whole) - 1} of {len(whole)} bytes: create it a"):
        store.Store(tmp_path)
    chunk.unlink()
    with pytest.raises(FileNotFoundError, match=r"\w+.safetensors is missing: create it again"):
        store.Store(tmp_path)


@pytest.mark.parametrize("format", ["int8", "bfloat16"])
def test_a_changed_byte_is_an_error_when_it_is_read(tmp_path, format):
    chunk = chunks(make(tmp_path, format))[0]
    contents = bytearray(chunk.read_bytes())
    contents[-33] ^= 1  # The end of the second text's values, before 32 bytes of keys.
    chunk.write_bytes(contents)
    opened = store.Store(tmp_path)
    opened.read(TEXTS[:1])
    with pytest.raises(ValueError, match=r"of '' in .* are damaged: compute .* again with\n.*--ver"):
        opened.read(TEXTS[1:2])
    assert fill(tmp_path, TEXTS, format)[1] == []
    assert fill(tmp_path, TEXTS, format, verify=True)[1] == [0, 1]
    store.Store(tmp_path).read(TEXTS)


@pytest.mark.parametrize("name", ["chunk", "at"])
@pytest.mark.parametrize("value", [-1, 0, 1, 2, 10**6])
def test_a_changed_index_never_returns_the_rows_of_another_text(tmp_path, name, value):
    file = make(tmp_path) / columns.INDEX
    index = {n: np.array(array) for n, array in map_safetensors(file).items()}
    index[name][:] = value
    file.write_bytes(columns._saved(index))
    opened, right = store.Store(tmp_path), dict(zip(TEXTS, TOKENS, strict=True))
    for text in TEXTS:
        try:
            assert opened.read([text])["text_mask"].sum() == right[text]
        except ValueError as error:
            assert "damaged" in str(error)
    assert fill(tmp_path, TEXTS)[1] == []
    store.Store(tmp_path).read(TEXTS)


def test_a_truncated_index_is_an_error_at_opening(tmp_path):
    file = make(tmp_path) / columns.INDEX
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"index.safetensors is damaged: create it again with\n"):
        store.Store(tmp_path)
    assert fill(tmp_path, TEXTS)[1] == []
    assert len(store.Store(tmp_path)) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "9"}, r"settings \(weights: '1a' stored, '9' requested\): set the text g"),
        ({"format": "float32"}, r"\(format: 'int8' stored, 'float32' requested\): .* --format"),
    ],
)
def test_adding_to_a_store_with_another_identity_or_format_is_an_error(tmp_path, changes, message):
    make(tmp_path)
    with pytest.raises(ValueError, match=message):
        columns.start(tmp_path, {**IDENTITY, "format": "int8", **changes}, store.KIND)


def test_fingerprints_depend_on_weights_and_token_limits():
    """`hashed` has no weights, so the test adds some."""
    encoder = hashed.encoder(32, 8)
    with_weights = lambda array: encoder._replace(frozen={"a": array})
    array = np.arange(1000.0).reshape(10, 100)
    same = store.fingerprint(with_weights(array))
    assert store.fingerprint(with_weights(array.copy())) == same
    for other in (array + 1, array.reshape(100, 10), array.astype(np.float32)):
        fingerprint = store.fingerprint(with_weights(other))
        assert fingerprint["weights"] != same["weights"] and fingerprint["tokenizer"] == same["tokenizer"]
    longer = store.fingerprint(hashed.encoder(32, 9))
    assert longer["tokenizer"] != same["tokenizer"]
