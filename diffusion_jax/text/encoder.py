"""The interface of every text encoder: tokens on the host, embeddings on the devices."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

Batch = dict[str, Any]


@runtime_checkable
class Network(Protocol):
    """The fields of a text network that its tokenizer and the config must agree with."""

    width: int
    vocab_size: int


class TextEncoder(NamedTuple):
    """From texts to the embeddings that a network attends to, in two halves.

    The halves are apart so that the first can run in the input pipeline, on the host, and the
    second inside the jitted train step, where its weights are an argument.
    """

    name: str
    width: int
    """D, the length of an embedding."""
    max_tokens: int
    """L, the number of positions: longer texts lose their end, shorter ones are padded."""
    tokenize: Callable[[Sequence[Any]], dict[str, np.ndarray]]
    """Host: texts (as the encoder's data hold them) to arrays for a batch."""
    frozen: Any
    """A pytree of weights, () where there are none; `Stored` ones are read when they are placed."""
    encode: Callable[[Any, Batch], tuple[Float[Array, "B L D"], Bool[Array, "B L"]]]
    """Device: (frozen, batch) to embeddings, 0 at padded positions, and which are not padded.

    Padding follows what it pads.
    """
    cut: bool = False
    """Whether all of a batch's arrays [B, L] may be cut to its longest text, with equal results."""
    cut_off: Callable[[Sequence[Any]], list[str]] = lambda texts: [""] * len(texts)
    """What each text loses, signs that stand for nothing and its end where it is too long; "" where
    nothing is lost, or where an encoder cannot tell."""


def check_fits(kind: str, folder: object, network: Network, vocab_size: int, width: int) -> None:
    """ValueError unless a folder's network is of this width and knows the tokenizer's tokens."""
    if width != network.width:
        raise ValueError(
            f"text.width is {width}, and the {kind} in {folder} is {network.width} wide: "
            f"set text.width={network.width}, or take other weights"
        )
    if vocab_size > network.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} knows {vocab_size} tokens, and its weights only "
            f"{network.vocab_size}: they are of different models; take both from one"
        )


def embed(
    encoder: TextEncoder, texts: Sequence[Any]
) -> tuple[Float[Array, "B L D"], Bool[Array, "B L"]]:
    """Both halves at once, as sampling needs them."""
    frozen = jax.tree.map(jnp.asarray, encoder.frozen)
    return jax.jit(encoder.encode)(frozen, encoder.tokenize(texts))
