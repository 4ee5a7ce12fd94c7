"""Map texts to token ids with the tokenizers of the library transformers, read from local files.

This module pads and truncates the ids itself. In transformers, padding and truncation are mutable
state of the tokenizer, which the threads of the input pipeline cannot share safely.
"""

import gzip
import html
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Encoding, Regex, Tokenizer, models, pre_tokenizers

from diffusion_jax.weights import pretrained

_PIECE = 2048  # Maximum characters that ftfy cleans at once, far more than CLIP reads.
_BPE = "bpe_simple_vocab_16e6.txt.gz"
# Splits T5's control tokens, so that their names in a caption are never read as control tokens.
_IN_CONTROL = Regex(r"(?<=</s|<pad|<unk)>")


class TextTokenizer:
    """A tokenizer, called as (texts, length) -> {"text_ids": int32, "text_mask": bool}.

    Both arrays have the shape [B, length]. Texts that are too long are truncated and still end with
    the token `end`. Calls are thread-safe.
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
        """Wrap a tokenizer.

        Args:
            tokenizer: the tokenizer.
            begin: id of a token to put before each text; None for no token.
            end: id of a token to put after each text.
            pad: id of the padding after shorter texts.
            clean: function applied to each text before it is tokenized.
            lower: whether to convert texts to lower case.
            unknown: name of the token for unknown symbols, if there is one.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer, self._clean, self._lower = tokenizer, clean, lower
        self._with_words: Callable[[str], str] = str
        self._words: dict[tuple[int, ...], list[int]] = {}
        """The ids of added words, keyed by the ids of their texts; longer ones come first."""
        self.begin, self.end, self.pad = begin, end, pad
        self._unknown = tokenizer.token_to_id(unknown)

    def add_words(self, counts: Mapping[str, int]) -> list[int]:
        """Add words that consist of several new tokens each; return the ids of these tokens.

        Upper and lower case are the same. No other thread may use the tokenizer meanwhile. Raises
        ValueError if a word was added before.
        """
        counts = {word.lower(): count for word, count in counts.items()}
        names = {word: [f"<{word} {n}>" for n in range(count)] for word, count in counts.items()}
        tokens = [name for of_word in names.values() for name in of_word]
        known = self._tokenizer.get_vocab()
        if added := [word for word, (first, *_) in names.items() if first in known]:
            raise ValueError(f"the word {added[0]!r} is in the model already: keep one of the two")
        self._tokenizer.add_tokens([AddedToken(name, normalized=False) for name in tokens])
        # Longer words first, and no parts of words: "cat" is not in "category".
        edges = lambda word: rf"{_edge('<!', word[0])}{re.escape(word)}{_edge('!', word[-1])}"
        longest = sorted(names, key=len, reverse=True)
        pattern = re.compile("|".join(map(edges, longest)), re.IGNORECASE)
        earlier, in_tokens = self._with_words, lambda match: " ".join(names[match[0].lower()])
        self._with_words = lambda text: pattern.sub(in_tokens, earlier(text))
        ids = self._tokenizer.get_vocab()
        for word, ids_of_text in zip(names, self._mended_ids([*names]), strict=True):
            self._words[tuple(ids_of_text)] = [ids[name] for name in names[word]]
        by_length = sorted(filter(None, self._words), key=len, reverse=True)
        self._words = {key: self._words[key] for key in by_length}
        return [ids[name] for name in tokens]

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id that a text can contain."""
        ids = self._tokenizer.get_vocab().values()
        return max(*ids, self.end, self.pad, self.begin or 0) + 1

    def __call__(self, texts: Sequence[Any], length: int) -> dict[str, np.ndarray]:
        """Return the ids and the mask of texts. The mask is False at padding and True elsewhere.

        Raises:
            ValueError: an element of `texts` is not a string.
        """
        ids = np.full((len(texts), length), self.pad, np.int32)
        mask = np.zeros((len(texts), length), bool)
        first = [] if self.begin is None else [self.begin]
        for row, (_, encoding) in enumerate(self._encode(texts)):
            tokens = [*[*first, *encoding.ids][: length - 1], self.end]
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = True
        return {"text_ids": ids, "text_mask": mask}

    def split(self, texts: Sequence[Any]) -> list[list[int]]:
        """Return all ids of each text, without those of begin, end and padding."""
        return [encoding.ids for _, encoding in self._encode(texts)]

    def words(self, texts: Sequence[str]) -> list[list[list[int]]]:
        """Return the ids of texts as the web UI of AUTOMATIC1111 reads them.

        Each text is a list of words: the ids of an added word, or else a single id. The texts are
        repaired by ftfy. An added word is found where the text has exactly its tokens.
        """
        return [self._joined(ids) for ids in self._mended_ids(texts)]

    def cut_off(self, texts: Sequence[Any], length: int) -> list[str]:
        """Return the part of each text that is ignored if texts are cut to `length` tokens.

        The ignored part consists of the unknown symbols before the cut, followed by the text after
        the cut.
        """
        room, ignored = length - 1 - (self.begin is not None), []
        for text, encoding in self._encode(texts):
            pairs = zip(encoding.ids[:room], encoding.offsets, strict=False)
            unknown = "".join(text[a:b] for id, (a, b) in pairs if id == self._unknown)
            end = text[encoding.offsets[room][0] :] if len(encoding.ids) > room else ""
            ignored.append(unknown + end)
        return ignored

    def _encode(self, texts: Sequence[Any]) -> Iterable[tuple[str, Encoding]]:
        cleaned = [self._with_words(self._clean(_checked(text))) for text in texts]
        # Python's lower() handles the final sigma of Greek words; the tokenizer's does not.
        lower = [text.lower() for text in cleaned] if self._lower else cleaned
        encoded = self._tokenizer.encode_batch(lower, add_special_tokens=False)
        return zip(cleaned, encoded, strict=True)

    def _mended_ids(self, texts: Sequence[str]) -> list[list[int]]:
        mended = [self._clean(_repaired(_checked(text))).lower() for text in texts]
        return [e.ids for e in self._tokenizer.encode_batch(mended, add_special_tokens=False)]

    def _joined(self, ids: list[int]) -> list[list[int]]:
        words, at = [], 0
        while at < len(ids):
            found = (word for word in self._words if tuple(ids[at : at + len(word)]) == word)
            word = next(found, (ids[at],))
            words.append(self._words.get(word, [ids[at]]))
            at += len(word)
        return words


def t5(path: str | os.PathLike[str]) -> TextTokenizer:
    """Return T5's tokenizer from spiece.model or tokenizer.json in a folder.

    Texts end with </s>, id 1. With spiece.model, the names of control tokens in a caption, such as
    "</s>", are read as plain text, as in sentencepiece.

    Raises:
        FileNotFoundError: the folder has no tokenizer.
        ValueError: the tokenizer is damaged or not T5's.
    """
    folder = _folder(path)
    if (folder / "spiece.model").is_file():
        tokenizer = _read_pieces(folder / "spiece.model")
    elif (folder / "tokenizer.json").is_file():
        tokenizer = _read_json(folder / "tokenizer.json")
    else:
        raise FileNotFoundError(
            f"{folder} holds neither spiece.model nor tokenizer.json: copy T5's tokenizer into it "
            "(all sizes and versions of T5 share one tokenizer)"
        )
    end, pad = (tokenizer.token_to_id(name) for name in ("</s>", "<pad>"))
    if end is None or pad is None:
        raise ValueError(f"the tokenizer in {folder} is not T5's: it has no </s> or no <pad>")
    return TextTokenizer(tokenizer, begin=None, end=end, pad=pad)


def clip(path: str | os.PathLike[str], *, open_clip: bool = False) -> TextTokenizer:
    """Return CLIP's byte-pair tokenizer from files in a folder.

    The files are tokenizer.json, or vocab.json and merges.txt, or OpenAI's
    bpe_simple_vocab_16e6.txt.gz, which is part of the package open_clip_torch.

    Args:
        path: the folder.
        open_clip: if True, clean texts with ftfy and pad with id 0, as in OpenCLIP. If False, pad
            with the end token, as in transformers' CLIPTokenizer. If transformers' files in the
            folder name the token of the padding, they decide: texts are padded with this token and
            not cleaned, as in transformers. With "!", as in Stable Diffusion 2, every "!" is id 0.

    Raises:
        FileNotFoundError: the folder has no tokenizer.
        ValueError: the tokenizer is damaged or not CLIP's.
    """
    folder = _folder(path)
    pad = None
    if _names_padding(folder):
        tokenizer, pad = _read_clip(folder)
    elif (folder / "tokenizer.json").is_file():
        tokenizer = _read_json(folder / "tokenizer.json")
    elif (folder / "merges.txt").is_file() and (folder / "vocab.json").is_file():
        files = str(folder / "vocab.json"), str(folder / "merges.txt")
        tokenizer = _byte_pairs(folder, *models.BPE.read_file(*files), open_clip)
    elif (folder / _BPE).is_file():
        tokenizer = _byte_pairs(folder, *_read_open_ai(folder / _BPE), open_clip)
    else:
        raise FileNotFoundError(
            f"{folder} holds no CLIP tokenizer (tokenizer.json, or vocab.json and merges.txt, or "
            f"{_BPE}): copy one into it (all CLIP models share one tokenizer)"
        )
    begin, end = (tokenizer.token_to_id(f"<|{name}oftext|>") for name in ("start", "end"))
    if begin is None or end is None:
        raise ValueError(f"the tokenizer in {folder} is not CLIP's: it has no <|startoftext|> or no <|endoftext|>")
    if open_clip and pad is None:
        return TextTokenizer(tokenizer, begin=begin, end=end, pad=0, clean=_mend, lower=True)
    return TextTokenizer(tokenizer, begin=begin, end=end, pad=end if pad is None else pad)


def bert(path: str | os.PathLike[str]) -> TextTokenizer:
    """Return BERT's WordPiece tokenizer from tokenizer.json in a folder.

    The tokens of a text are enclosed in [CLS] and [SEP].

    Raises:
        FileNotFoundError: the folder has no tokenizer.
        ValueError: the tokenizer is damaged or not BERT's.
    """
    folder = pathlib.Path(path)
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json: copy it from the model whose weights you use")
    tokenizer = _read_json(folder / "tokenizer.json")
    begin, end, pad = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]", "[PAD]"))
    if begin is None or end is None or pad is None:
        raise ValueError(f"the tokenizer in {folder} is not BERT's: it has no [CLS], no [SEP] or no [PAD]")
    return TextTokenizer(tokenizer, begin=begin, end=end, pad=pad, unknown="[UNK]")


def _folder(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return the folder of the tokenizer for the weights in a folder, usually the same folder.

    In diffusers' layout, the tokenizer of text_encoder/ is in tokenizer/, and that of
    text_encoder_2/ in tokenizer_2/.
    """
    folder = pathlib.Path(path)
    sibling = folder.parent / folder.name.replace("text_encoder", "tokenizer")
    return sibling if folder.name.startswith("text_encoder") and sibling.is_dir() else folder


def _transformers() -> Any:
    """Import transformers on first use, since this takes a second."""
    # transformers would warn that torch is not installed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers


def _names_padding(folder: pathlib.Path) -> bool:
    """Return whether transformers' files in a folder name the token of the padding.

    OpenCLIP does not read these files, so they are ignored in a folder with OpenCLIP's config.
    """
    paths = (folder / name for name in ("special_tokens_map.json", "tokenizer_config.json"))
    return not (folder / "open_clip_config.json").is_file() and any(
        path.is_file() and pretrained.read_json(path).get("pad_token") for path in paths
    )


def _read_clip(folder: pathlib.Path) -> tuple[Tokenizer, int]:
    """Return the tokenizer that transformers reads from a folder, and the id of its padding."""
    try:
        clip = _transformers().CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
        return clip.backend_tokenizer, clip.pad_token_id
    except Exception as error:  # A damaged file fails in many ways.
        raise ValueError(f"cannot read the tokenizer in {folder}: {error}: copy its files again") from error


def _read_json(path: pathlib.Path) -> Tokenizer:
    try:
        return _transformers().PreTrainedTokenizerFast(tokenizer_file=str(path)).backend_tokenizer
    except Exception as error:  # The library raises plain Exception.
        raise ValueError(f"cannot read the tokenizer {path}: {error}: copy tokenizer.json again") from error


def _read_pieces(path: pathlib.Path) -> Tokenizer:
    """Return the tokenizer of a sentencepiece model.

    It reads the names of control tokens in a text, such as "</s>", as plain text.
    """
    options = {"extra_ids": 0, "split_special_tokens": True, "local_files_only": True}
    try:
        t5 = _transformers().T5Tokenizer.from_pretrained(str(path), **options)
    except Exception as error:  # A damaged file fails in many ways.
        raise ValueError(f"{path} is damaged or not a sentencepiece model: {error}") from error
    tokenizer = t5.backend_tokenizer
    split = pre_tokenizers.Split(_IN_CONTROL, behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tokenizer.pre_tokenizer, split])
    return tokenizer


def _byte_pairs(
    folder: pathlib.Path, vocab: dict[str, int], merges: list[tuple[str, str]], open_clip: bool
) -> Tokenizer:
    """Build CLIP's tokenizer from token ids and merges. `folder` is named in error messages.

    With `open_clip`, the names of control tokens in a text are read as plain text.
    """
    if "<|startoftext|>" not in vocab:  # transformers would add it.
        raise ValueError(f"the tokenizer in {folder} is not CLIP's: it has no <|startoftext|>")
    options = {"vocab": vocab, "merges": merges, "split_special_tokens": open_clip}
    return _transformers().CLIPTokenizer(**options).backend_tokenizer


def _read_open_ai(path: pathlib.Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Read OpenAI's list of merges, and return (ids, merges).

    `merges` is the list, and `ids` maps each of the 49,408 tokens to its id. The tokens are the 256
    bytes, the 256 bytes with a mark for the end of a word, one token per merge, and two control
    tokens.
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
    """Clean a text as OpenCLIP does: repair it, and replace all HTML entities by characters."""
    return " ".join(html.unescape(html.unescape(_repaired(text))).split())


def _repaired(text: str) -> str:
    """Repair wrongly decoded characters, and replace curly quotes, ligatures and HTML entities.

    HTML entities stay if the text contains "<".
    """
    import ftfy  # Only OpenCLIP and prompts with weights need it.

    # For texts like "&amp;amp;...", ftfy takes quadratic time in the length of the pieces it fixes.
    return ftfy.fix_text(text, max_decode_length=_PIECE)


def _edge(side: str, letter: str) -> str:
    """Return a pattern that forbids a letter or digit beside `letter`, if it is one itself."""
    return rf"(?{side}\w)" if re.match(r"\w", letter) else ""


def _checked(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(
            f"the text encoder expects captions, but the data hold {type(text).__name__} of shape "
            f"{np.shape(text)}: set data.text to the field of the captions, such as txt"
        )
    return text
