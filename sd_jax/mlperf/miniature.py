"""Write small stand-ins for the data and the scoring networks of the MLPerf benchmark.

The pictures and captions are the coloured digits of the quick start. Inception has its real
architecture, and CLIP is tiny. Both have random weights, so FID and CLIP score have no meaning. All
files have the formats of the benchmark's files.
"""

import json
import pathlib
import string

import numpy as np

from diffusion_jax import files
from diffusion_jax.examples.digits import rendering
from diffusion_jax.metrics import inception_weights
from diffusion_jax.weights import torch_weights
from sd_jax.mlperf import coco

_FEATURE_SCALE = 10.0  # FID then falls below the target of 90 after two to four evaluations.
_WIDTH, _LAYERS, _HEADS, _PATCH, _IMAGE_SIZE, _MAX_TOKENS = 32, 1, 2, 8, 32, 77


def write(out: pathlib.Path) -> None:
    """Write captions.tsv, pictures/, inception.safetensors and clip/ into the folder `out`.

    There are 290 captions and 290 pictures. Existing files are replaced.
    """
    (out / "clip").mkdir(parents=True, exist_ok=True)
    captions = rendering.seen_prompts() + rendering.heldout_prompts()
    rows = [coco.Caption(i, i, caption) for i, caption in enumerate(captions)]
    files.write_whole(out / "captions.tsv", coco.to_tsv(rows))
    rendering.write_examples(out / "pictures", len(captions), size=16)
    torch_weights.write(out / "inception.safetensors", _inception())
    _write_clip(out / "clip")


def _inception() -> dict[str, np.ndarray]:
    """Return random weights of Inception, scaled so that FID can reach the benchmark's target."""
    state = inception_weights.random_state()
    last = ("branch1x1", "branch3x3_2", "branch3x3dbl_3", "branch_pool")
    prefixes = tuple(f"Mixed_7c.{branch}" for branch in last)
    for name in state:
        if name.startswith(prefixes) and name.endswith((".bn.weight", ".bn.bias")):
            state[name] *= np.float32(_FEATURE_SCALE)
    return state


def _write_clip(out: pathlib.Path) -> None:
    """Write a random CLIP, in OpenCLIP's format, whose tokens are single characters."""
    characters = string.digits + string.ascii_lowercase + string.punctuation
    tokens = [character + end for end in ("", "</w>") for character in characters]
    vocabulary = {token: i for i, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape) / shape[-1] ** 0.5

    def tower(prefix: str) -> dict[str, np.ndarray]:
        arrays = {}
        for i in range(_LAYERS):
            block = f"{prefix}transformer.resblocks.{i}."
            for norm in ("ln_1", "ln_2"):
                arrays |= _norm(block + norm)
            for name, rows, columns in (
                ("attn.in_proj_", 3 * _WIDTH, _WIDTH),
                ("attn.out_proj.", _WIDTH, _WIDTH),
                ("mlp.c_fc.", 4 * _WIDTH, _WIDTH),
                ("mlp.c_proj.", _WIDTH, 4 * _WIDTH),
            ):
                arrays[f"{block}{name}weight"] = normal(rows, columns)
                arrays[f"{block}{name}bias"] = np.zeros(rows)
        return arrays

    state = {
        **tower(""),
        **tower("visual."),
        **_norm("visual.ln_pre"),
        # Both towers end with the same large bias, so all cosines are close to 1, above the target.
        **_norm("ln_final", bias=1.0),
        **_norm("visual.ln_post", bias=1.0),
        "text_projection": np.eye(_WIDTH),
        "visual.proj": np.eye(_WIDTH),
        "token_embedding.weight": normal(len(vocabulary), _WIDTH),
        "positional_embedding": normal(_MAX_TOKENS, _WIDTH),
        "visual.class_embedding": normal(_WIDTH),
        "visual.positional_embedding": normal(1 + (_IMAGE_SIZE // _PATCH) ** 2, _WIDTH),
        "visual.conv1.weight": normal(_WIDTH, 3, _PATCH, _PATCH),
        "logit_scale": np.array(1.0),
    }
    vision = {
        "image_size": _IMAGE_SIZE,
        "layers": _LAYERS,
        "width": _WIDTH,
        "head_width": _WIDTH // _HEADS,
        "patch_size": _PATCH,
    }
    text = {
        "context_length": _MAX_TOKENS,
        "vocab_size": len(vocabulary),
        "width": _WIDTH,
        "heads": _HEADS,
        "layers": _LAYERS,
    }
    config = {"model_cfg": {"embed_dim": _WIDTH, "vision_cfg": vision, "text_cfg": text}}
    torch_weights.write(out / "model.safetensors", {name: array.astype(np.float32) for name, array in state.items()})
    files.write_whole(out / "open_clip_config.json", json.dumps(config))
    files.write_whole(out / "vocab.json", json.dumps(vocabulary))
    files.write_whole(out / "merges.txt", "#version: 0.2\n")


def _norm(name: str, bias: float = 0.0) -> dict[str, np.ndarray]:
    return {f"{name}.weight": np.ones(_WIDTH), f"{name}.bias": np.full(_WIDTH, bias)}
