"""Compute features with the vision transformers of DINOv2 (Oquab et al. 2023).

Some of them have registers, which are additional tokens (Darcet et al. 2023). FD-DINOv2 (Stein et
al. 2023) is the Fréchet distance between sets of class tokens, taken after the final layer norm of
ViT-L/14 on 224-pixel pictures. It agrees better with human judgement than FID, which uses
Inception's features.

Shape letters: B is the batch, P the number of tokens (class, registers, patches), D the width.
"""

import os
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from diffusion_jax import files
from diffusion_jax.metrics import preprocess
from diffusion_jax.metrics.extractors import Extractor
from diffusion_jax.text.transformer import Linear, attend
from diffusion_jax.weights import pretrained, torch_files, torch_weights
from diffusion_jax.weights.torch_weights import CONV, StateDict

SIZE = 224
_HEAD = 64  # Channels per attention head in all published models.
_EPS = 1e-6


class DinoV2(nn.Module):
    """A float32 vision transformer that maps a normalised 224-pixel picture to its class token."""

    width: int
    mlp_width: int
    num_heads: int
    num_layers: int
    patch: int = 14
    registers: int = 0

    @nn.compact
    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B D"]:
        """Return the class token [B, D] of each normalised image, after the final norm.

        The tokens are the class token, the registers, and the patches row by row, in this order.
        All tokens except the registers have position embeddings.
        """
        b, p, d, side = len(images), self.patch, self.width, SIZE // self.patch
        param = lambda name, *shape: self.param(name, nn.initializers.normal(0.02), shape)
        patches = images.reshape(b, side, p, side, p, 3)
        kernel, bias = param("patch/kernel", p, p, 3, d), param("patch/bias", d)
        h = jnp.einsum("byixjc,ijcd->byxd", patches, kernel).reshape(b, side**2, d) + bias
        class_token = jnp.broadcast_to(param("class_token", 1, 1, d), (b, 1, d))
        h = jnp.concatenate([class_token, h], axis=1) + param("positions", 1, 1 + side**2, d)
        if self.registers:
            registers = param("registers", 1, self.registers, d)
            registers = jnp.broadcast_to(registers, (b, *registers.shape[1:]))
            h = jnp.concatenate([h[:, :1], registers, h[:, 1:]], axis=1)  # [B, P, D]
        for i in range(self.num_layers):
            h = _Block(self.mlp_width, self.num_heads, name=f"block_{i}")(h)
        return _norm("norm")(h[:, 0])


class _Block(nn.Module):
    """A pre-norm transformer block whose attention and MLP outputs are scaled per channel."""

    mlp_width: int
    num_heads: int

    @nn.compact
    def __call__(self, h: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        b, length, d = h.shape
        linear = lambda name, width: Linear(width, True, jnp.float32, name=name)
        scale = lambda name: self.param(name, nn.initializers.ones, (d,))
        x = _norm("norm1")(h)
        q, k, v = (linear(n, d)(x).reshape(b, length, self.num_heads, -1) for n in "qkv")
        x = attend(q, k, v, None, scale=q.shape[-1] ** -0.5, dtype=jnp.float32)  # [B, P, D]
        h = h + scale("scale1") * linear("out", d)(x)
        x = jax.nn.gelu(linear("fc1", self.mlp_width)(_norm("norm2")(h)), approximate=False)
        return h + scale("scale2") * linear("fc2", d)(x)


def load(weights: str | os.PathLike[str], name: str = "") -> Extractor:
    """Load a DINOv2 model as a feature extractor.

    Args:
        weights: a Hugging Face folder or repository name, or a .pth file published by the authors.
        name: name of the model, shown in score tables as "dinov2_NAME". The default is the last
            part of `weights` without its suffix.

    Raises:
        FileNotFoundError: the weights are missing.
        ValueError: the weights are not DINOv2's, or have gated MLPs.
    """
    file = files.local(weights)
    if file.is_file():
        state, config = torch_files.read_state_dict(file), {}
    else:
        folder = pretrained.locate(weights)
        state, config = (pretrained.open_weights(folder), pretrained.read_json(folder / "config.json"))
    network, state = of_state(state, config.get("num_attention_heads"))
    shapes = abstract_params(network)
    params = torch_weights.to_params(state, table(shapes), shapes)

    def apply(params: Any, x: Array) -> Any:
        # By default, accelerators multiply float32 in TF32 or bf16.
        with jax.default_matmul_precision("highest"):
            return network.apply(params, x)

    return Extractor(
        name=f"dinov2_{name or file.stem}",
        width=network.width,
        preprocessing="dgm_eval",
        weights=pretrained.digest(params),
        official=False,
        params=params,
        prepare=preprocess.dgm_eval,
        apply=apply,
    )


def of_state(state: StateDict, num_heads: int | None = None) -> tuple[DinoV2, StateDict]:
    """Return the network that fits a state dict, and the state dict with this module's names.

    Position embeddings are interpolated to pictures of 224 pixels. If `num_heads` is None, each
    attention head has 64 channels.

    Raises:
        ValueError: the weights are not DINOv2's, or have gated MLPs.
    """
    # Split fused q, k and v into three, and drop the unused mask token.
    arrays = {}
    for name, array in state.items():
        for pattern, ours in _NAMES:
            name = re.sub(pattern, ours, name)
        fused = re.match(r"(.*\.)attn\.qkv(\..*)$", name)
        if fused:
            thirds = np.split(np.asarray(array), 3)
            arrays |= {f"{fused[1]}{n}{fused[2]}": a for n, a in zip("qkv", thirds, strict=True)}
        elif name != "mask_token":
            arrays[name] = array
    state = arrays
    if "pos_embed" not in state or "blocks.0.fc1.weight" not in state:
        raise ValueError(
            "the weights are not a DINOv2 with plain MLPs: pos_embed or blocks.0.mlp.fc1 is "
            f"missing; the first of their {len(state)} arrays are {', '.join(sorted(state)[:3])}"
        )
    width, _, patch, _ = state["patch.weight"].shape
    registers = state["registers"].shape[1] if "registers" in state else 0
    network = DinoV2(
        width=width,
        mlp_width=len(state["blocks.0.fc1.bias"]),
        num_heads=num_heads or width // _HEAD,
        num_layers=1 + max(int(n.split(".")[1]) for n in state if n.startswith("blocks.")),
        patch=patch,
        registers=registers,
    )
    positions = _positions(state["pos_embed"], SIZE // patch, antialias=registers > 0)
    return network, {**state, "pos_embed": positions}


def abstract_params(network: DinoV2) -> Any:
    """Return the network's parameter tree with jax.ShapeDtypeStructs instead of arrays."""
    image = jax.ShapeDtypeStruct((1, SIZE, SIZE, 3), jnp.float32)
    return jax.eval_shape(lambda x: network.init(jax.random.key(0), x), image)


def table(params: Any) -> list[torch_weights.Entry]:
    """Return a table that maps each parameter to its name in the state dict from `of_state`."""
    rules = [(r"block_(\d+)/(\w+)", r"blocks.\1.\2"), ("positions", "pos_embed"), ("class_token", "cls_token")]
    return torch_weights.table(params, lambda path: torch_weights.rename(path, rules), [("patch", CONV)])


# Patterns that map the authors' names, and both of Hugging Face's versions, to this module's names.
_NAMES = (
    (r"^(dinov2(_with_registers)?|model|backbone)\.", ""),
    (r"^embeddings\.", ""),
    (r"^position_embeddings$", "pos_embed"),
    (r"^register_tokens$", "registers"),
    (r"^(patch_embed\.proj|patch_embeddings\.projection)\.", "patch."),
    (r"^layernorm\.", "norm."),
    (r"^(encoder\.)?layer\.", "blocks."),
    (r"\.(attention\.attention|attention)\.(query|q_proj)\.", ".q."),
    (r"\.(attention\.attention|attention)\.(key|k_proj)\.", ".k."),
    (r"\.(attention\.attention|attention)\.(value|v_proj)\.", ".v."),
    (r"\.(attention\.output\.dense|attention\.o_proj|attn\.proj)\.", ".out."),
    (r"\.mlp\.", "."),
    (r"\.(layer_scale|ls)([12])\.(lambda1|gamma)$", r".scale\2"),
)


def _positions(positions: np.ndarray, side: int, *, antialias: bool) -> np.ndarray:
    """Interpolate position embeddings to [1, 1 + side^2, D] with torch's bicubic kernels.

    As in the authors' code, `antialias` is True for models with registers. Without it, 0.1 is added
    to the grid's size, also as in their code; this shifts the grid by up to a tenth of a patch.
    """
    grid = np.asarray(positions, np.float32)[:, 1:]
    trained = round(grid.shape[1] ** 0.5)
    if trained == side:
        return np.asarray(positions)
    matrix = preprocess.bicubic(trained, side, antialias=antialias, offset=0.1)
    grid = grid.reshape(trained, trained, -1)
    resized = np.einsum("ai,bj,ijd->abd", matrix, matrix, grid).reshape(1, side**2, -1)
    return np.concatenate([np.asarray(positions)[:, :1], resized], axis=1)


def _norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=_EPS, use_fast_variance=False, name=name)
