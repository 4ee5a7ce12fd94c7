"""Folders of tiny pretrained encoders, in the layouts of Hugging Face and OpenCLIP."""

import json
import lzma
import pathlib

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

ROOT = pathlib.Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures"
PIECES = 7500  # The first pieces of the real spiece.model.
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def case(name):
    """Return the arrays of a fixture."""
    with np.load(FIXTURES / f"text_{name}.npz") as arrays:
        return dict(arrays)


def state(case):
    """Return the float32 weights of a case, by name."""
    return {n[2:]: a.astype(np.float32) for n, a in case.items() if n.startswith("w/")}


def config(case):
    return json.loads(str(case["__meta__"]))


def t5_folder(path, *, width=16, vocab_size=PIECES + 4, stream=1.0, update=1.0):
    """Write a random one-layer T5 with a decoder and a tokenizer, and return its folder.

    `stream` scales the embeddings, and `update` what the layer adds to them.
    """
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)
    block = "encoder.block.0.layer"
    arrays = {
        "shared.weight": stream * draw(vocab_size, width),
        f"{block}.0.SelfAttention.relative_attention_bias.weight": draw(32, 2),
        f"{block}.0.layer_norm.weight": draw(width) + 1,
        f"{block}.1.layer_norm.weight": draw(width) + 1,
        f"{block}.1.DenseReluDense.wi.weight": draw(24, width),
        f"{block}.1.DenseReluDense.wo.weight": update * draw(width, 24),
        "encoder.final_layer_norm.weight": draw(width) + 1,
        "decoder.final_layer_norm.weight": draw(width),
        "lm_head.weight": draw(3, width),
    }
    arrays |= {f"{block}.0.SelfAttention.{n}.weight": draw(8, width) for n in "qkv"}
    arrays[f"{block}.0.SelfAttention.o.weight"] = update * draw(width, 8)
    sizes = {"d_model": width, "d_ff": 24, "d_kv": 4, "num_heads": 2, "num_layers": 1}
    write(path, arrays, {"vocab_size": vocab_size, "feed_forward_proj": "relu", **sizes})
    (path / "spiece.model").write_bytes(spiece())
    return path


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def write(path, arrays, config):
    """Write model.safetensors and config.json."""
    path.mkdir(exist_ok=True)
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    safetensors.numpy.save_file(arrays, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))


def write_bfloat16(path, arrays):
    """Write a safetensors file by hand: some versions of the library lack bfloat16 in numpy."""
    header, data = {}, b""
    for name, array in arrays.items():
        raw = np.asarray(array, jnp.bfloat16).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def spiece():
    return lzma.decompress((FIXTURES / "t5_spiece_7500.model.xz").read_bytes())


def clip_folder(path, name):
    """Write the CLIP of a fixture, with a tokenizer that knows single letters only."""
    arrays = case(name)
    meta = config(arrays)
    write(path, state(arrays), meta.get("config", meta))
    if name == "open_clip":
        (path / "config.json").rename(path / "open_clip_config.json")
    tokens = [*(f"{letter}</w>" for letter in LETTERS), *(f"-{i}" for i in range(12))]
    vocab = {token: i for i, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    (path / "vocab.json").write_text(json.dumps(vocab))
    (path / "merges.txt").write_text("#version: 0.2\n")
    return path
