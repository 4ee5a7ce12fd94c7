"""Texts to token ids, by the tokenizers of transformers, read from files on this machine.

Of transformers only the tokenizer itself is used, not its padding and cutting: they are state of
the tokenizer, which two threads of the input pipeline would change under each other.
"""

import gzip
import html
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding, Regex, Tokenizer, models, pre_tokenizers

_BPE = "bpe_simple_vocab_16e6.txt.gz"
# Inside of T5's control tokens; no piece of text reaches over these places.
_IN_CONTROL = Regex(r"(?<=</s|<pad|<unk)>")


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
        lower: bool = False,
        unknown: str = "<unk>",
    ) -> None:
        """`begin`, `end` and `pad` are ids; `clean` and `lower` are done to each text first."""
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer, self._clean, self._lower = tokenizer, clean, lower
        self.begin, self.end, self.pad = begin, end, pad
        self._unknown = tokenizer.token_to_id(unknown)

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
            tokens = [*[*first, *encoding.ids][: length - 1], self.end]
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = True
        return {"text_ids": ids, "text_mask": mask}

    def cut_off(self, texts: Sequence[Any], length: int) -> list[str]:
        """What of each text stands for nothing: unknown signs, then the end that does not fit."""
        room, lost = length - 1 - (self.begin is not None), []
        for text, encoding in self._encode(texts):
            pairs = zip(encoding.ids[:room], encoding.offsets, strict=False)
            unknown = "".join(text[a:b] for id, (a, b) in pairs if id == self._unknown)
            end = text[encoding.offsets[room][0] :] if len(encoding.ids) > room else ""
            lost.append(unknown + end)
        return lost

    def _encode(self, texts: Sequence[Any]) -> Iterable[tuple[str, Encoding]]:
        cleaned = [self._clean(_checked(text)) for text in texts]
        # Python's own lower case, which knows where a Greek word ends.
        lower = [text.lower() for text in cleaned] if self._lower else cleaned
        encoded = self._tokenizer.encode_batch(lower, add_special_tokens=False)
        return zip(cleaned, encoded, strict=True)


def t5(path: str | os.PathLike[str]) -> Tokenize:
    """T5's pieces from spiece.model, or tokenizer.json, in a folder; they end with </s>, id 1.

    With spiece.model, "</s>" and its like in a caption are letters, as for sentencepiece itself.
    """
    folder = pathlib.Path(path)
    if (folder / "spiece.model").is_file():
        tokenizer = _read_pieces(folder / "spiece.model")
    elif (folder / "tokenizer.json").is_file():
        tokenizer = _read_json(folder / "tokenizer.json")
    else:
        raise FileNotFoundError(
            f"{folder} holds neither spiece.model nor tokenizer.json: copy T5's tokenizer beside "
            "its weights (every size and version of T5 has the same)"
        )
    end, pad = (tokenizer.token_to_id(name) for name in ("</s>", "<pad>"))
    if end is None or pad is None:
        raise ValueError(f"the tokenizer in {folder} has no </s> or no <pad>: it is not T5's")
    return Tokenize(tokenizer, begin=None, end=end, pad=pad)


def clip(path: str | os.PathLike[str], *, open_clip: bool = False) -> Tokenize:
    """CLIP's byte pairs, from a folder's vocab.json and merges.txt, tokenizer.json, or OpenAI's
    bpe_simple_vocab_16e6.txt.gz, which the package open_clip_torch brings.

    OpenAI's CLIP is padded with its end token, as by transformers' CLIPTokenizer; OpenCLIP's with
    0, and its texts are mended by ftfy first, as open_clip does.
    """
    folder = pathlib.Path(path)
    if (folder / "tokenizer.json").is_file():
        tokenizer = _read_json(folder / "tokenizer.json")
    elif (folder / "merges.txt").is_file() and (folder / "vocab.json").is_file():
        files = str(folder / "vocab.json"), str(folder / "merges.txt")
        tokenizer = _byte_pairs(folder, *models.BPE.read_file(*files), open_clip)
    elif (folder / _BPE).is_file():
        tokenizer = _byte_pairs(folder, *_read_open_ai(folder / _BPE), open_clip)
    else:
        raise FileNotFoundError(
            f"{folder} holds no CLIP tokenizer (tokenizer.json, or vocab.json and merges.txt, or "
            f"{_BPE}): copy one beside the weights (every CLIP has the same)"
        )
    begin, end = (tokenizer.token_to_id(f"<|{name}oftext|>") for name in ("start", "end"))
    if begin is None or end is None:
        raise ValueError(f"the tokenizer in {folder} has no <|startoftext|>: it is not CLIP's")
    if open_clip:
        return Tokenize(tokenizer, begin=begin, end=end, pad=0, clean=_mend, lower=True)
    return Tokenize(tokenizer, begin=begin, end=end, pad=end)


def bert(path: str | os.PathLike[str]) -> Tokenize:
    """Return BERT's word pieces from a folder's tokenizer.json; a text becomes [CLS] ... [SEP]."""
    folder = pathlib.Path(path)
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json: copy it from the model whose weights you use"
        )
    tokenizer = _read_json(folder / "tokenizer.json")
    ids = [tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]", "[PAD]")]
    if None in ids:
        raise ValueError(
            f"the tokenizer in {folder} has no [CLS], [SEP] or [PAD]: it is not BERT's"
        )
    begin, end, pad = ids
    return Tokenize(tokenizer, begin=begin, end=end, pad=pad, unknown="[UNK]")


def _transformers() -> Any:
    """The module, which takes a second to import, so that only what reads captions pays for it."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # It misses torch.
    import transformers

    return transformers


def _read_json(path: pathlib.Path) -> Tokenizer:
    try:
        return _transformers().PreTrainedTokenizerFast(tokenizer_file=str(path)).backend_tokenizer
    except Exception as error:  # The library raises Exception itself.
        raise ValueError(f"cannot read the tokenizer {path}: {error}") from error


def _read_pieces(path: pathlib.Path) -> Tokenizer:
    """A sentencepiece model, in which control tokens are never found in a text."""
    options = {"extra_ids": 0, "split_special_tokens": True, "local_files_only": True}
    try:
        t5 = _transformers().T5Tokenizer.from_pretrained(str(path), **options)
    except Exception as error:  # A damaged file fails in many ways.
        raise ValueError(f"{path} is no sentencepiece model, or damaged: {error}") from error
    tokenizer = t5.backend_tokenizer
    apart = pre_tokenizers.Split(_IN_CONTROL, behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tokenizer.pre_tokenizer, apart])
    return tokenizer


def _byte_pairs(
    folder: pathlib.Path, vocab: dict[str, int], merges: list[tuple[str, str]], open_clip: bool
) -> Tokenizer:
    """CLIP's tokenizer; OpenCLIP's knows its control tokens by other names, not in captions."""
    if "<|startoftext|>" not in vocab:  # transformers would add it.
        raise ValueError(f"the tokenizer in {folder} has no <|startoftext|>: it is not CLIP's")
    options = {"vocab": vocab, "merges": merges, "split_special_tokens": open_clip}
    return _transformers().CLIPTokenizer(**options).backend_tokenizer


def _read_open_ai(path: pathlib.Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary that OpenAI's list of merges stands for: 49,408 tokens.

    256 bytes, the same at the end of a word, a token for each merge, and two that begin and end.
    """
    _transformers()
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    lines = gzip.decompress(path.read_bytes()).decode().split("\n")
    merges = [(a, b) for a, b in (line.split() for line in lines[1:48895] if line)]
    letters = list(bytes_to_unicode().values())
    tokens = [*letters, *(letter + "</w>" for letter in letters)]
    tokens += [a + b for a, b in merges] + ["<|startoftext|>", "<|endoftext|>"]
    return {token: i for i, token in enumerate(tokens)}, merges


def _mend(text: str) -> str:
    """A text without wrong decodings, curly quotes, HTML entities and needless spaces."""
    import ftfy  # Only OpenCLIP's captions need it.

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())


def _checked(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(
            f"a text encoder that reads captions got {type(text).__name__} of shape "
            f"{np.shape(text)}: set data.text=txt"
        )
    return text
