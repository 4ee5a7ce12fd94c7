"""Define TextEncoder, which computes tokens on the host and embeddings on the devices."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Bool, Float

TextArrays = dict[str, Any]
WEIGHTS = "text_weights"
"""The name of the array [B, N L] that holds the weights of tokens in N chunks of L tokens."""
LEARNED_WORD = "learned_embedding"
"""The name of the embeddings of words that were added to a text network, float32 [N, D]."""


class LearnedTokens(NamedTuple):
    """A word to learn, the word whose embedding it starts with, and its number of tokens."""

    word: str
    initial: str
    num_vectors: int


class TextEncoder(NamedTuple):
    """A text encoder in two halves, `tokenize` and `encode`.

    `tokenize` runs in the input pipeline on the host. `encode` runs inside the jitted train step,
    which receives the encoder's weights as an argument.
    """

    name: str
    width: int
    """D, the length of an embedding."""
    max_tokens: int
    """L, the number of positions: longer texts are truncated, shorter ones are padded."""
    tokenize: Callable[[Sequence[Any]], dict[str, np.ndarray]]
    """Maps texts from the data source to arrays with one row per text, keyed by name. It runs on
    the host."""
    frozen: Any
    """The weights as a pytree; () for an encoder without weights. Leaves of type `Stored` are read
    from files when they are placed on devices."""
    encode: Callable[[Any, TextArrays], tuple[Float[Array, "B L D"], Bool[Array, "B L"]]]
    """Maps (frozen, batch) to embeddings and a mask. It runs on the devices.

    Padding comes at the end. At padding, the embeddings are 0, and the mask is False. CLIP is an
    exception: it encodes padding like other tokens, and its mask is True everywhere.
    """
    cut: bool = False
    """True if a batch's arrays [B, L] may be cut to the length of the longest text, because padding
    does not change the embeddings of tokens."""
    cut_off: Callable[[Sequence[Any]], list[str]] = lambda texts: [""] * len(texts)
    """Returns the part of each text that the encoder ignores: unknown symbols, followed by the
    truncated end. The part is "" if nothing is ignored, or if the encoder cannot determine this."""
    tokenize_weighted: Callable[[Sequence[Any], int], dict[str, np.ndarray]] | None = None
    """Tokenizes texts of any length, whose words may have weights (prompt_weights.py). The second
    argument is the smallest number of chunks. None if the encoder cannot weight texts."""
    outputs: Callable[[Any, TextArrays], Any] | None = None
    """Maps (frozen, batch) to all outputs of CLIP's text tower, a clip.TextOutputs; None for other
    encoders."""
    add_words: Callable[[Any, Mapping[str, np.ndarray]], tuple["TextEncoder", Any]] | None = None
    """Maps (frozen, the vectors [N, D] of each new word) to an encoder that replaces this one, and
    its weights. None if the encoder cannot learn words."""
    added: Mapping[str, tuple[int, str]] = {}
    """For each added word, the id of its first token, and where it comes from, for messages."""

    def unused(self, texts: TextArrays) -> list[str]:
        """Return the added words that no tokens contain. The names in `texts` do not matter."""
        found = lambda id: any((np.asarray(tokens) == id).any() for tokens in texts.values())
        return [word for word, (id, _) in self.added.items() if not found(id)]

    def warn_of_unused(self, texts: TextArrays) -> None:
        """Log each added word that no tokens of prompts and negative prompts contain."""
        for word in self.unused(texts):
            logging.warning("no prompt contains %r, the word of %s", word, self.added[word][1])


def check_fits(kind: str, folder: object, network: Any, vocab_size: int, width: int | None) -> None:
    """Check that a network has the configured width and an embedding for each token.

    Args:
        kind: the kind of network for error messages, such as "T5".
        folder: the folder of the weights, for error messages.
        network: the network, with the fields `width` and `vocab_size`.
        vocab_size: the number of tokens of the tokenizer.
        width: the config's text.width; None accepts any width.

    Raises:
        ValueError: the network has another width, or fewer tokens than the tokenizer.
    """
    if width not in (None, network.width):
        raise ValueError(
            f"text.width is {width}, but the {kind} in {folder} has width {network.width}: "
            f"set text.width={network.width}, or choose other weights"
        )
    if vocab_size > network.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {vocab_size} tokens, but the weights have only "
            f"{network.vocab_size}: use the tokenizer and the weights of the same model"
        )


def read_learned(text: str) -> LearnedTokens:
    """Read the config's text.learned_tokens. Raises ValueError if it is not WORD=INITIAL*N."""
    parts = re.fullmatch(r"(?P<word>\S+)=(?P<initial>[^\s=*]+)(\*(?P<count>[1-9]\d?))?", text)
    if not parts:
        raise ValueError(
            f"text.learned_tokens is {text!r}: write WORD=INITIAL*N with up to 99 vectors, such as <cat-toy>=toy*4"
        )
    return LearnedTokens(parts["word"], parts["initial"], int(parts["count"] or 1))


def embed(encoder: TextEncoder, texts: Sequence[Any] | TextArrays) -> tuple[Float[Array, "B L D"], Bool[Array, "B L"]]:
    """Return one embedding per token of texts, and their mask, computed in one jitted call.

    `texts` holds texts, or their tokens from `encoder.tokenize`. At padding, embeddings are 0 and
    the mask is False, except for CLIP, which encodes padding and whose mask is True everywhere.
    """
    return _run(encoder.encode, encoder, texts)


def outputs(encoder: TextEncoder, texts: Sequence[Any] | TextArrays) -> Any:
    """Return all outputs of CLIP's text tower, a clip.TextOutputs, computed in one jitted call.

    They include one embedding per text, `pooled` and `projected`. `texts` holds texts, or their
    tokens from `encoder.tokenize`.

    Raises:
        ValueError: the encoder is not CLIP.
    """
    if encoder.outputs is None:
        raise ValueError(
            f"the encoder {encoder.name} has one embedding per token and no other outputs: call embed, or load a CLIP"
        )
    return _run(encoder.outputs, encoder, texts)


def _run(function: Callable[[Any, TextArrays], Any], encoder: TextEncoder, texts: Any) -> Any:
    batch = texts if isinstance(texts, Mapping) else encoder.tokenize(texts)
    return jax.jit(function)(jax.tree.map(jnp.asarray, encoder.frozen), batch)
