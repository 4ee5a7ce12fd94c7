"""The words of a run's captions: which are new, what resembles them, and where they are kept."""

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


def test_words_that_are_in_no_caption_come_with_similar_words():
    words = vocabulary.of(CAPTIONS)
    assert words.unknown("a foox, NOTO style, zebra") == {"foox": ["fox"], "zebra": []}
    assert words.unknown("Cat, face!") == {}
    assert words.unknown("The cat and an ox") == {"ox": ["fox"]}  # Function words are not reported.


def test_typing_errors_come_before_phrases_of_similar_meaning(monkeypatch):
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
        "fax": ["gray"],  # A word, although its spelling is similar to "fox".
    }
    monkeypatch.setattr(meaning, "LARGEST", len(phrases) - 1)
    assert words.unknown("kitty") == {"kitty": []}


@pytest.mark.skipif(not meaning.available(), reason="needs the extra [words]")
def test_minilm_finds_the_emoji_models_words_by_meaning(monkeypatch):
    monkeypatch.undo()
    words = vocabulary.read(pathlib.Path(__file__).parents[3] / "models" / "emoji32")
    expected = {
        "kitty": "cat", "automobile": "car", "lorry": "truck", "physician": "doctor",
        "bunny": "rabbit face", "sofa": "chair", "policeman": "police officer", "moth": "butterfly",
        "turquoise": "blue", "pengin": "penguin",
    }  # fmt: skip
    new = words.unknown(" ".join(expected))
    assert {word: similar[0] for word, similar in new.items()} == expected
    assert all(len(similar) <= 3 for similar in new.values())


def test_examples_are_one_caption_for_each_beginning():
    words = vocabulary.of(CAPTIONS)
    assert words.num_captions == 3
    assert words.examples == (
        "a cat face, noto style, on a gray background",
        "a fox, noto style, on a blue background",
    )
    assert vocabulary.of(reversed(CAPTIONS)).examples == words.examples
    many = vocabulary.of(f"{n:04} things, of a kind" for n in range(2_500))
    assert len(many.examples) == 834  # Every third one, of which at most 1,000 are kept.
    assert many.examples[1] == "0003 things, of a kind"
    assert vocabulary.of(["a" * 201]).examples == ()


def test_a_warning_is_one_line_that_depends_on_the_encoder():
    words, texts = vocabulary.of(CAPTIONS), ["a foox", "a blue zebra", "a foox"]
    of_captions = "none of the 3 training captions contains 'foox' (similar: fox), 'zebra'"
    assert vocabulary.warning(words, texts, "t5") == of_captions
    assert vocabulary.warning(words, texts, "hashed") == (
        f"the model does not know some words: {of_captions}"
    )
    assert vocabulary.warning(words, ["a blue cat"], "hashed") == ""
    assert vocabulary.warning(None, texts, "hashed") == ""


def test_a_warning_says_if_the_vocabulary_has_the_frequent_words_only(monkeypatch):
    monkeypatch.setattr(vocabulary, "_WORDS", 5)
    words = vocabulary.of(CAPTIONS)
    assert words.words == {"a", "noto", "style", "on", "background"}
    assert vocabulary.warning(words, ["a cat"], "t5") == (
        "the 5 most frequent words of the 3 training captions do not include 'cat'"
    )


def test_a_workdir_keeps_the_vocabulary(tmp_path):
    assert vocabulary.read(tmp_path) is None
    words = vocabulary.of(["один кот", *CAPTIONS])
    vocabulary.write(tmp_path, words)
    assert vocabulary.read(tmp_path) == words
    content = json.loads((tmp_path / vocabulary.FILE).read_text())
    assert content["captions"] == 4 and content["words"][:2] == ["a", "background"]


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"captions": 1, "words": "a", "examples": []}', '{"captions": 1}']
)
def test_a_damaged_vocabulary_is_refused_with_its_path(tmp_path, content):
    (tmp_path / vocabulary.FILE).write_text(content)
    with pytest.raises(ValueError, match=r"vocabulary\.json is not a vocabulary .*delete the file"):
        vocabulary.read(tmp_path)


class Texts(pictures.Pictures):
    """Pictures of which only the texts are read."""

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
    """Inputs of a run on pictures with these texts, and the rows that are read of them."""
    data = Texts(texts)
    batches = types.SimpleNamespace(pictures=data)
    return loop.RunInputs(None, batches, **{"open_prompts": print} | changes), data.rows


def test_training_keeps_the_words_of_an_even_sample_of_captions(tmp_path, monkeypatch):
    monkeypatch.setattr(train_command, "_CAPTIONS", 5)
    monkeypatch.setattr(train_command, "_CHUNK", 2)
    given, rows = inputs([f"word{n}" if n % 4 else np.zeros(3) for n in range(9)])
    train_command.keep_vocabulary(tmp_path, given)
    assert sorted(rows) == [0, 2, 4, 6, 8]
    kept = vocabulary.read(tmp_path)
    assert kept and kept.words == {"word2", "word6"} and kept.num_captions == 2
    before = len(rows)
    train_command.keep_vocabulary(tmp_path, given)  # A run that continues reads nothing.
    assert len(rows) == before


def test_all_captions_of_a_picture_count(tmp_path):
    train_command.keep_vocabulary(
        tmp_path, inputs([Captions(("one", "two"), (0.9, 0.1)), "three"])[0]
    )
    kept = vocabulary.read(tmp_path)
    assert kept and kept.words == {"one", "two", "three"} and kept.num_captions == 3


@pytest.mark.parametrize("changes", [{"start": print}, {"open_prompts": None}])
def test_a_run_that_starts_from_weights_or_draws_no_prompts_has_none(tmp_path, changes):
    train_command.keep_vocabulary(tmp_path, inputs(["a fox"], **changes)[0])
    assert vocabulary.read(tmp_path) is None


def test_slow_storage_ends_the_reading_after_a_chunk_of_the_whole_range(tmp_path, monkeypatch):
    monkeypatch.setattr(train_command, "_SECONDS", -1)
    given, rows = inputs([f"word{n}" for n in range(1000)])
    train_command.keep_vocabulary(tmp_path, given)
    assert rows == list(range(0, 1000, 4))
