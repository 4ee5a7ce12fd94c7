"""Text encoders for the planner, which needs their shapes but not their weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax.config.settings import Text
from diffusion_jax.text import clip, precomputed, registry, t5
from diffusion_jax.text.encoder import TextArrays, TextEncoder

# T5 encoders by width: T5-11b and T5 v1.1 XXL.
_T5 = {
    1024: t5.T5Encoder(32128, 1024, 65536, 128, 128, 24),
    4096: t5.T5Encoder(32128, 4096, 10240, 64, 64, 24, activation="gelu_new", gated=True),
}
# (width, MLP width, heads, layers) by width: CLIP ViT-L/14 and OpenCLIP ViT-H/14.
_CLIP = {768: (768, 3072, 12, 12), 1024: (1024, 4096, 16, 24)}


def open_encoder(text: Text, embedded: bool = False) -> tuple[TextEncoder, tuple[str, ...]]:
    """Return the text encoder of a config, and notes for the user.

    If the weights cannot be opened, the encoder has shapes in place of weights, and a note says so.
    If the embeddings come from a store (`text.store`) or are stored with the images (`embedded`),
    the returned encoder computes nothing and passes stored embeddings on.

    Raises:
        OSError, ValueError: The weights cannot be opened, and the shape of an encoder with this
            name and width is unknown, or it learns a word.
    """
    if text.store or embedded:
        return _stored(text), ()
    try:
        return registry.make_encoder(text), ()
    except (OSError, ValueError) as error:
        shapes = {"t5": _T5, "clip": _CLIP, "clip_penultimate": _CLIP}.get(text.encoder, {})
        if text.width not in shapes or text.learned_tokens:
            raise
        reason = str(error).partition("\n")[0]
        note = f"the plan uses only the shape of the text encoder {text.encoder} ({reason})"
        return (_t5(text) if text.encoder == "t5" else _clip(text)), (note,)


def _stored(text: Text) -> TextEncoder:
    """Return an encoder that passes stored embeddings on; for planning, they are all zeros."""
    array = np.zeros((text.max_tokens, text.width), np.float32)
    encoder = precomputed.encoder(text.width, text.max_tokens)
    return encoder._replace(tokenize=lambda texts: encoder.tokenize([array] * len(texts)))


def _t5(text: Text) -> TextEncoder:
    dtype = jnp.dtype(text.dtype)
    model = _T5[text.width].clone(dtype=dtype)

    def encode(frozen: Any, batch: TextArrays):
        mask = jnp.asarray(batch["text_mask"])[:, : text.max_tokens]
        out: Any = model.apply(frozen, jnp.asarray(batch["text_ids"]), batch["text_mask"])
        return out[:, : text.max_tokens], mask

    def tokens(texts):
        shape = len(texts), text.read_tokens
        return {"text_ids": np.zeros(shape, np.int32), "text_mask": np.ones(shape, bool)}

    frozen = _as(t5.abstract_params(model), dtype)
    return TextEncoder("t5", text.width, text.max_tokens, tokens, frozen, encode)


def _clip(text: Text) -> TextEncoder:
    dtype = jnp.dtype(text.dtype)
    width, mlp, heads, layers = _CLIP[text.width]
    layers -= text.encoder == "clip_penultimate"
    tower = clip.TextTower(49408, text.max_tokens, width, mlp, heads, layers, None, "gelu", None, dtype=dtype)

    def encode(frozen: Any, batch: TextArrays):
        ids = jnp.asarray(batch["text_ids"])
        out: Any = tower.apply(frozen, ids)
        return out.last, jnp.ones(ids.shape, bool)

    tokens = lambda texts: {"text_ids": np.zeros((len(texts), text.max_tokens), np.int32)}
    frozen = _as(clip.abstract_params(tower), dtype)
    return TextEncoder("clip", text.width, text.max_tokens, tokens, frozen, encode)


def _as(shapes: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), shapes)
