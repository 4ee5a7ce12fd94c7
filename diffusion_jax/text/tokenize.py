"""Texts to token ids, by the `tokenizers` library that transformers is built on.

Its own padding and cutting are never used: they are state of the tokenizer, which two threads of
the input pipeline would change under each other.
"""

import gzip
import html
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding, Regex, Tokenizer, models, normalizers, pre_tokenizers

_BPE = "bpe_simple_vocab_16e6.txt.gz"
_SPLIT = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


class Tokenize:
    """tokenize(texts, length) -> {"text_ids" int32, "text_mask" bool}, both [B, length].

    A text too long keeps its beginning and still ends with `end`. Safe to call from many threads.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        begin: int | None,
        end: int,
        pad: int,
        clean: Callable[[str], str] = str,
    ) -> None:
        """`begin`, `end` and `pad` are ids; `clean` is done to each text first."""
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer, self._clean = tokenizer, clean
        self.begin, self.end, self.pad = begin, end, pad

    @property
    def vocab_size(self) -> int:
        """One more than the largest id it can give."""
        ids = self._tokenizer.get_vocab(with_added_tokens=False).values()
        return max(*ids, self.end, self.pad, self.begin or 0) + 1

    def __call__(self, texts: Sequence[Any], length: int) -> dict[str, np.ndarray]:
        """The mask is True for the text, and for what begins and ends it. ValueError if no text."""
        ids = np.full((len(texts), length), self.pad, np.int32)
        mask = np.zeros((len(texts), length), bool)
        first = [] if self.begin is None else [self.begin]
        for row, (_, encoding) in enumerate(self._encode(texts)):
            begun = [*first, *encoding.ids]
            tokens = [*begun[: length - 1], self.end]
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = True
        return {"text_ids": ids, "text_mask": mask}

    def cut_off(self, texts: Sequence[Any], length: int) -> list[str]:
        """The end that each text loses, "" where all of it fits."""
        room = length - 1 - (self.begin is not None)
        return [
            text[encoding.offsets[room][0] :] if len(encoding.ids) > room else ""
            for text, encoding in self._encode(texts)
        ]

    def _encode(self, texts: Sequence[Any]) -> Iterable[tuple[str, Encoding]]:
        cleaned = [self._clean(_checked(text)) for text in texts]
        encoded = self._tokenizer.encode_batch(cleaned, add_special_tokens=False)
        return zip(cleaned, encoded, strict=True)


def t5(path: str | os.PathLike[str]) -> Tokenize:
    """T5's pieces from spiece.model, or tokenizer.json, in a folder; they end with </s>, id 1."""
    folder = pathlib.Path(path)
    if (folder / "spiece.model").is_file():
        tokenizer = _unigram(folder / "spiece.model")
    elif (folder / "tokenizer.json").is_file():
        tokenizer = _from_json(folder / "tokenizer.json")
    else:
        raise FileNotFoundError(
            f"{folder} holds neither spiece.model nor tokenizer.json: copy T5's tokenizer beside "
            "its weights (every size and version of T5 has the same)"
        )
    control = _CONTROL if (folder / "spiece.model").is_file() else ""
    end, pad = (tokenizer.token_to_id(control + name) for name in ("</s>", "<pad>"))
    if end is None or pad is None:
        raise ValueError(f"the tokenizer in {folder} has no </s> or no <pad>: it is not T5's")
    return Tokenize(tokenizer, begin=None, end=end, pad=pad)


def clip(path: str | os.PathLike[str], *, open_clip: bool = False) -> Tokenize:
    """CLIP's byte pairs, from a folder's vocab.json and merges.txt, tokenizer.json, or OpenAI's
    bpe_simple_vocab_16e6.txt.gz, which the package open_clip_torch brings.

    OpenAI's and Hugging Face's CLIP is padded with its end token; OpenCLIP with 0, and it resolves
    HTML entities first.
    """
    folder = pathlib.Path(path)
    if (folder / "tokenizer.json").is_file():
        tokenizer = _from_json(folder / "tokenizer.json")
    elif (folder / "merges.txt").is_file() and (folder / "vocab.json").is_file():
        tokenizer = _byte_pairs(
            models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        )
    elif (folder / _BPE).is_file():
        tokenizer = _byte_pairs(_read_open_ai(folder / _BPE))
    else:
        raise FileNotFoundError(
            f"{folder} holds no CLIP tokenizer (tokenizer.json, or vocab.json and merges.txt, or "
            f"{_BPE}): copy one beside the weights (every CLIP has the same)"
        )
    begin, end = (tokenizer.token_to_id(f"<|{name}oftext|>") for name in ("start", "end"))
    if begin is None or end is None:
        raise ValueError(f"the tokenizer in {folder} has no <|startoftext|>: it is not CLIP's")
    clean = _resolve_entities if open_clip else str
    return Tokenize(tokenizer, begin=begin, end=end, pad=0 if open_clip else end, clean=clean)


def _from_json(path: pathlib.Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises Exception itself.
        raise ValueError(f"cannot read the tokenizer {path}: {error}") from error


def _unigram(path: pathlib.Path) -> Tokenizer:
    """A sentencepiece model: its pieces with their scores, and its map of characters."""
    pieces: list[tuple[str, float]] = []
    charsmap = b""
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1:  # A piece.
                piece = dict(_fields(value))
                score = np.frombuffer(piece.get(2, b"\0\0\0\0"), "<f4")[0]
                # Type 1, the default, are pieces of text; "</s>" and its like are not, and must
                # never be found in a caption: with a space in it nothing is.
                control = "" if piece.get(3, 1) == 1 else _CONTROL
                pieces.append((control + piece[1].decode(), float(score)))
            elif number == 3:  # The normaliser.
                charsmap = dict(_fields(value)).get(2, b"")
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=_UNKNOWN, byte_fallback=False))
        if charsmap:
            tokenizer.normalizer = normalizers.Precompiled(charsmap)
    except Exception as error:  # A damaged file fails in many ways.
        raise ValueError(f"{path} is no sentencepiece model, or damaged: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    return tokenizer


_UNKNOWN = 2  # T5's id of <unk>.
_CONTROL = " "


def _fields(message: bytes) -> list[tuple[int, Any]]:
    """(number, value) of each field of a protocol buffer: an int, or the field's bytes."""
    fields, i = [], 0
    while i < len(message):
        key, i = _varint(message, i)
        kind = key & 7
        if kind == 0:
            value, i = _varint(message, i)
            fields.append((key >> 3, value))
            continue
        if kind == 2:
            size, i = _varint(message, i)
        else:
            size = {1: 8, 5: 4}[kind]
        if i + size > len(message):
            raise ValueError("it ends too early")
        fields.append((key >> 3, message[i : i + size]))
        i += size
    return fields


def _varint(message: bytes, i: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value, shift = 0, 0
    while True:
        byte = message[i]
        value, shift, i = value | (byte & 127) << shift, shift + 7, i + 1
        if byte < 128:
            return value, i


def _byte_pairs(vocab_and_merges: tuple[dict[str, int], list[tuple[str, str]]]) -> Tokenizer:
    vocab, merges = vocab_and_merges
    model = models.BPE(
        vocab,
        merges,
        continuing_subword_prefix="",
        end_of_word_suffix="</w>",
        unk_token="<|endoftext|>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def _read_open_ai(path: pathlib.Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary that OpenAI's list of merges stands for: 49,408 tokens.

    256 bytes, the same at the end of a word, a token for each merge, and two that begin and end.
    """
    lines = gzip.decompress(path.read_bytes()).decode().split("\n")
    merges = [(a, b) for a, b in (line.split() for line in lines[1:48895] if line)]
    letters = _byte_letters()
    tokens = [*letters, *(letter + "</w>" for letter in letters)]
    tokens += [a + b for a, b in merges] + ["<|startoftext|>", "<|endoftext|>"]
    return {token: i for i, token in enumerate(tokens)}, merges


def _byte_letters() -> list[str]:
    """A printable letter for each byte, in the order of CLIP's ids: printable bytes first."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = 256 - len(printable)
    return [*map(chr, printable), *(chr(256 + i) for i in range(others))]


def _resolve_entities(text: str) -> str:
    return re.sub(r"\s+", " ", html.unescape(html.unescape(text))).strip()


def _checked(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(
            f"a text encoder that reads captions got {type(text).__name__} of shape "
            f"{np.shape(text)}: set data.text=txt, or take the encoder 'precomputed'"
        )
    return text
