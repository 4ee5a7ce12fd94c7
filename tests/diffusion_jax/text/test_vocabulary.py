"""The vocabulary of a run's captions: unknown words, similar words, and its file."""

import json
import pathlib
import types

import numpy as np
import pytest

from diffusion_jax.data import pictures
from diffusion_jax.data.captions import Captions
from diffusion_jax.text import meaning, vocabulary
from diffusion_jax.train import loop, train_command

CAPTIONS = [
    "A fox, noto style, on a gray background",
    "a fox, noto style, on a blue background",
    "a cat face, noto style,  on a gray background",
]


@pytest.fixture(autouse=True)
def _without_minilm(monkeypatch):
    monkeypatch.setattr(meaning, "available", lambda: False)


def test_unknown_words_are_reported_with_similar_words():
    words = vocabulary.of(CAPTIONS)
    assert words.unknown("a foox, NOTO style, zebra") == {"foox": ["fox"], "zebra": []}
    assert words.unknown("Cat, face!") == {}
    assert words.unknown("The cat and an ox") == {"ox": ["fox"]}  # Function words are not reported.


def test_words_of_similar_spelling_come_before_phrases_of_similar_meaning(monkeypatch):
    words = vocabulary.of(CAPTIONS)
    # "cat" and "face" are not offered alone, because captions say "cat face".
    phrases = {"fox", "cat face", "a", "noto", "style", "on", "gray", "blue", "background"}
    meant = {"kitty": ["cat face", "fox"], "foox": ["cat face", "gray", "blue"], "fax": ["gray"]}

    def among(known):
        assert known == phrases
        return meaning.Meanings(lambda word, n: meant[word][:n], {"kitty", "fax"}.__contains__)

    monkeypatch.setattr(meaning, "available", lambda: True)
    monkeypatch.setattr(meaning, "among", among)
    assert words.unknown("a kitty, foox, fax") == {
        "kitty": ["cat face", "fox"],
        "foox": ["fox", "cat face", "gray"],
        "fax": ["gray"],  # "fax" is a real word, so "fox" of similar spelling is not offered.
    }
    monkeypatch.setattr(meaning, "LARGEST", len(phrases) - 1)
    assert words.unknown("kitty") == {"kitty": []}


@pytest.mark.skipif(not meaning.available(), reason="needs the extra [words]")
def test_minilm_finds_emoji_words_of_similar_meaning(monkeypatch):
    monkeypatch.undo()
    words = vocabulary.read(pathlib.Path(__file__).parents[3] / "models" / "emoji32")
    expected = {"kitty": "cat", "automobile": "car", "lorry": "truck", "physician": "doctor", "sofa": "chair"}
    expected |= {"bunny": "rabbit face", "policeman": "police officer", "moth": "butterfly"}
    expected |= {"turquoise": "blue", "pengin": "penguin"}
    new = words.unknown(" ".join(expected))
    assert {word: similar[0] for word, similar in new.items()} == expected
    assert all(len(similar) <= 3 for similar in new.values())


def test_vocabulary_examples_are_one_caption_for_each_first_word():
    words = vocabulary.of(CAPTIONS)
    assert words.num_captions == 3
    assert words.examples == ("a cat face, noto style, on a gray background", "a fox, noto style, on a blue background")
    assert vocabulary.of(reversed(CAPTIONS)).examples == words.examples
    many = vocabulary.of(f"{n:04} things, of a kind" for n in range(2_500))
    assert len(many.examples) == 834  # Every third caption, so that at most 1,000 are stored.
    assert many.examples[1] == "0003 things, of a kind"
    assert vocabulary.of(["a" * 201]).examples == ()


def test_the_warning_about_unknown_words_is_one_line_per_encoder():
    words, texts = vocabulary.of(CAPTIONS), ["a foox", "a blue zebra", "a foox"]
    of_captions = "none of the 3 training captions contains 'foox' (similar: fox), 'zebra'"
    assert vocabulary.warning(words, texts, "t5") == of_captions
    assert vocabulary.warning(words, texts, "hashed") == (f"the model does not know some words: {of_captions}")
    assert vocabulary.warning(words, ["a blue cat"], "hashed") == ""
    assert vocabulary.warning(None, texts, "hashed") == ""


def test_the_warning_says_if_only_frequent_words_are_stored(monkeypatch):
    monkeypatch.setattr(vocabulary, "_WORDS", 5)
    words = vocabulary.of(CAPTIONS)
    assert words.words == {"a", "noto", "style", "on", "background"}
    warning = "the 5 most frequent words of the 3 training captions do not include 'cat'"
    assert vocabulary.warning(words, ["a cat"], "t5") == warning


def test_the_vocabulary_is_stored_in_the_workdir(tmp_path):
    assert vocabulary.read(tmp_path) is None
    words = vocabulary.of(["один кот", *CAPTIONS])
    vocabulary.write(tmp_path, words)
    assert vocabulary.read(tmp_path) == words
    content = json.loads((tmp_path / vocabulary.FILE).read_text())
    assert content["captions"] == 4 and content["words"][:2] == ["a", "background"]


@pytest.mark.parametrize("content", ["[]", "{", '{"captions": 1, "words": "a", "examples": []}', '{"captions": 1}'])
def test_a_damaged_vocabulary_is_an_error_with_its_path(tmp_path, content):
    (tmp_path / vocabulary.FILE).write_text(content)
    with pytest.raises(ValueError, match=r"vocabulary\.json is not a vocabulary .*delete the file"):
        vocabulary.read(tmp_path)


class Texts(pictures.Pictures):
    """Pictures that only support reading texts."""

    def __init__(self, texts):
        self._texts, self.rows = texts, []

    def __len__(self):
        return len(self._texts)

    def read(self, indices, places=None):
        raise AssertionError

    def texts(self, indices):
        self.rows += indices.tolist()
        return [self._texts[row] for row in indices]


def inputs(texts, **changes):
    """Return a run's inputs with these texts, and a list that records which rows are read."""
    data = Texts(texts)
    batches = types.SimpleNamespace(pictures=data)
    return loop.RunInputs(None, batches, **{"open_prompts": print} | changes), data.rows


def test_training_stores_the_words_of_evenly_spaced_captions(tmp_path, monkeypatch):
    monkeypatch.setattr(train_command, "_CAPTIONS", 5)
    monkeypatch.setattr(train_command, "_CHUNK", 2)
    run_inputs, rows = inputs([f"word{n}" if n % 4 else np.zeros(3) for n in range(9)])
    train_command.keep_vocabulary(tmp_path, run_inputs)
    assert sorted(rows) == [0, 2, 4, 6, 8]
    stored = vocabulary.read(tmp_path)
    assert stored and stored.words == {"word2", "word6"} and stored.num_captions == 2
    before = len(rows)
    train_command.keep_vocabulary(tmp_path, run_inputs)  # A resumed run reads nothing.
    assert len(rows) == before


def test_the_vocabulary_includes_all_captions_of_a_picture(tmp_path):
    train_command.keep_vocabulary(tmp_path, inputs([Captions(("one", "two"), (0.9, 0.1)), "three"])[0])
    stored = vocabulary.read(tmp_path)
    assert stored and stored.words == {"one", "two", "three"} and stored.num_captions == 3


@pytest.mark.parametrize("origin", ["{}/base", "{}/base@20"])
def test_a_run_that_starts_from_a_run_knows_its_words_and_the_new_ones(tmp_path, origin):
    (tmp_path / "base").mkdir()
    vocabulary.write(tmp_path / "base", vocabulary.of(["a fox", "a cat, noto style"]))
    train_command.keep_vocabulary(tmp_path, inputs(["a zorb", "a cat"])[0], origin.format(tmp_path))
    stored = vocabulary.read(tmp_path)
    examples = ("a cat", "a zorb", "a cat, noto style", "a fox")
    assert stored == (4, {"a", "fox", "cat", "noto", "style", "zorb"}, examples)
    assert vocabulary.warning(stored, ["a zorb and a fox, noto style"], "hashed") == ""


def test_runs_without_prompts_and_from_weights_of_unknown_words_store_no_vocabulary(tmp_path):
    train_command.keep_vocabulary(tmp_path, inputs(["a fox"], open_prompts=None)[0])
    train_command.keep_vocabulary(tmp_path, inputs(["a fox"])[0], "weights/sd-v1-5")
    assert vocabulary.read(tmp_path) is None


def test_slow_storage_limits_the_vocabulary_to_one_chunk_of_captions(tmp_path, monkeypatch):
    monkeypatch.setattr(train_command, "_SECONDS", -1)
    run_inputs, rows = inputs([f"word{n}" for n in range(1000)])
    train_command.keep_vocabulary(tmp_path, run_inputs)
    assert rows == list(range(0, 1000, 4))


def test_only_the_first_thirty_unknown_words_are_searched(monkeypatch):
    words, searched = vocabulary.of(["a fox"]), []
    similar = lambda self, word, known: searched.append(word) or ["fox"]
    monkeypatch.setattr(vocabulary.Vocabulary, "_similar", similar)
    new = words.unknown(" ".join(f"z{i}" for i in range(50)), "z0 z1 fox")
    assert len(new) == 50 and searched == [f"z{i}" for i in range(30)]
    assert new["z29"] == ["fox"] and new["z30"] == []
