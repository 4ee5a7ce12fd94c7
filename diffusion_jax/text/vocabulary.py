"""The vocabulary of a run: the words of its training captions, and examples of the captions.

Training and `diffusion_jax.pack` write the vocabulary into a workdir as vocabulary.json:

    {"captions": 3711, "words": ["a", "apple", ...], "examples": ["a red apple, noto style", ...]}

`sample`, notebooks and the web page use it to warn about words that the model never saw, and the
web page lists the examples. A run that starts from given weights, or adapts them, adds their
vocabulary to its own. If they have none, the run writes none, because they may know more words.
"""

import collections
import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from diffusion_jax import files
from diffusion_jax.files import untrusted
from diffusion_jax.text import hashed

FILE = "vocabulary.json"
_WORDS = 50_000  # The largest number of words in a vocabulary. Rarer words are left out.
_EXAMPLES = 1_000
_LENGTH = 200  # The largest number of characters of an example.
_SIMILAR = 3  # The largest number of similar phrases for an unknown word.
_SEARCHED = 30  # The largest number of unknown words for which similar phrases are searched.
_PHRASE = 3  # The largest number of words of a similar phrase.
_ARTICLE = re.compile(r"^(an?|the) ")
_FUNCTION_WORDS = frozenset(
    ("a", "an", "the", "and", "or", "of", "on", "in", "at", "to", "from", "with", "by", "for", "as")
)
"""Words that name nothing to draw. A warning about them would not help."""


class Vocabulary(NamedTuple):
    """The words of a run's captions."""

    num_captions: int
    """The number of captions that were read."""
    words: frozenset[str]
    """The 50,000 most frequent words in lower case, or all words if there are fewer. Captions are
    split into words as by the encoder "hashed"."""
    examples: tuple[str, ...]
    """At most 1,000 captions with different beginnings. A beginning ends at the first comma."""

    def unknown(self, *texts: str) -> dict[str, list[str]]:
        """Return the words of texts that are not in `words`, each with similar known phrases.

        The result maps each such word to at most three phrases. The words after the first thirty
        get none, because a search takes up to a tenth of a second. The first phrases are words of
        the vocabulary with a similar spelling. If the package with MiniLM's weights is installed
        (the extra [words]) and there are at most 5,000 phrases, phrases with a similar meaning
        follow, such as "police officer". In this case, a word that is frequent in English is no
        typing error, so it gets only phrases with a similar meaning. Function words such as "and"
        are not reported.
        """
        known = self.words | _FUNCTION_WORDS
        words = dict.fromkeys(word for text in texts for word in hashed.words(text))
        new, sorted_words = [word for word in words if word not in known], sorted(self.words)
        similar = {word: self._similar(word, sorted_words) for word in new[:_SEARCHED]}
        return {word: similar.get(word, []) for word in new}

    def _similar(self, word: str, known: Sequence[str]) -> list[str]:
        from diffusion_jax.text import meaning  # Rarely needed, and it imports a text encoder.

        spelled = lambda cutoff: difflib.get_close_matches(word, known, n=_SIMILAR, cutoff=cutoff)
        # Compare with the beginnings of examples with at most three words, without an article, and
        # with the words that occur outside of these beginnings.
        short, outside = set[str](), set[str]()
        for example in self.examples:
            beginning, _, rest = " ".join(example.lower().split()).partition(",")
            phrase = _ARTICLE.sub("", beginning)
            if len(hashed.words(phrase)) > _PHRASE:
                rest = example
            elif phrase:
                short.add(phrase)
            outside |= set(hashed.words(rest))
        inside = {word for phrase in short for word in hashed.words(phrase)}
        phrases = frozenset(short | (self.words - inside) | (self.words & outside))
        if len(phrases) > meaning.LARGEST or not meaning.available():
            return spelled(0.7)
        meanings = meaning.among(phrases)
        # At this cutoff, "foox" is a misspelt "fox", but "canine" is not a misspelt "canoe".
        typed = [] if meanings.is_word(word) else spelled(0.8)
        return list(dict.fromkeys([*typed, *meanings.nearest(word, _SIMILAR)]))[:_SIMILAR]


def of(captions: Iterable[str]) -> Vocabulary:
    """Build a vocabulary: frequent words of captions, and at most 1,000 captions as examples."""
    counts, num_captions = collections.Counter[str](), 0
    by_beginning: dict[str, str] = {}
    for caption in captions:
        num_captions += 1
        counts.update(set(hashed.words(caption)))
        text = " ".join(caption.split())
        beginning = text.partition(",")[0].lower()
        if beginning and len(text) <= _LENGTH:
            # Keep one caption per beginning: that with the smallest hash, which favours no words.
            by_beginning[beginning] = min(by_beginning.get(beginning, text), text, key=_hash)
    examples = [by_beginning[beginning] for beginning in sorted(by_beginning)]
    spread = examples[:: -(-len(examples) // _EXAMPLES)] if examples else []
    words = frozenset(word for word, _ in counts.most_common(_WORDS))
    return Vocabulary(num_captions, words, tuple(spread))


def joined(base: Vocabulary, own: Vocabulary) -> Vocabulary:
    """Return the vocabulary of a model that learned `own` after `base`. Its examples come first."""
    examples = dict.fromkeys([*own.examples, *base.examples])
    captions = base.num_captions + own.num_captions
    return Vocabulary(captions, base.words | own.words, tuple(examples)[:_EXAMPLES])


def write(workdir: files.Path, vocabulary: Vocabulary) -> None:
    """Write vocabulary.json into a workdir."""
    content = {
        "captions": vocabulary.num_captions,
        "words": sorted(vocabulary.words),
        "examples": list(vocabulary.examples),
    }
    text = json.dumps(content, ensure_ascii=False, indent=0)
    files.write_whole(files.path(workdir) / FILE, text)


def read(workdir: files.Path) -> Vocabulary | None:
    """Return the vocabulary of a workdir, or None if it has none.

    Raises:
        ValueError: vocabulary.json does not hold a vocabulary.
    """
    path = files.path(workdir) / FILE
    if not path.is_file():
        return None
    try:
        content = untrusted.parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        words, examples = (_texts(content, name) for name in ("words", "examples"))
        return Vocabulary(int(content["captions"]), frozenset(words), tuple(examples))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is not a vocabulary ({error}): delete the file, which is not needed to draw, "
            "or, if it belongs to a packed model, pack the model again with python -m "
            "diffusion_jax.pack"
        ) from error


def warning(vocabulary: Vocabulary | None, texts: Sequence[str], encoder: str) -> str:
    """Return one line that lists the words in prompts that a vocabulary lacks, or "" if none.

    Args:
        vocabulary: The vocabulary of the model. If it is None, the result is "".
        texts: The prompts.
        encoder: The name of the model's text encoder. With "hashed", the line adds that the model
            does not know these words. The other encoders know the meaning of most words.
    """
    if not (vocabulary and (new := vocabulary.unknown(*texts))):
        return ""
    hint = lambda similar: f" (similar: {', '.join(similar)})" if similar else ""
    listed = ", ".join(f"{word!r}{hint(similar)}" for word, similar in new.items())
    words, captions = len(vocabulary.words), f"{vocabulary.num_captions:,} training captions"
    line = f"none of the {captions} contains {listed}"
    if words >= _WORDS:  # Rarer words are left out.
        line = f"the {words:,} most frequent words of the {captions} do not include {listed}"
    return f"the model does not know some words: {line}" if encoder == "hashed" else line


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _texts(content: Mapping[str, object], name: str) -> list[str]:
    texts = content[name]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} must be a list of texts")
    return texts
