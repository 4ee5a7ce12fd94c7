"""Measure the latency of Stable Diffusion, from a prompt's tokens to decoded pixels, as NeMo does.

    python -m benchmarks.sd_latency --model=2

The model runs on one device with guidance. Its weights are random, which does not affect the speed.
A single compiled program encodes the text, samples and decodes. The command prints one line of JSON
per batch size (the number of images). latency_s is the program's median time in seconds over
--rounds calls; compile_s is the time to compile it. nemo_tensorrt_s and nemo_framework_s are NeMo's
latencies on an A100 for 512x512 images and 50 steps of PLMS; they are null if the settings differ.
--tiny uses a small model, for a quick trial.
"""

import statistics
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import measure
from diffusion_jax import cli
from diffusion_jax.nn.attention import IMPLEMENTATIONS
from diffusion_jax.text import TextEncoder, clip
from diffusion_jax.text.clip import TextTower
from sd_jax import sampling
from sd_jax import vae as vae_module
from sd_jax.settings import Conditioning, Diffusion, Latents, Pipeline, Sampler, check_pipeline
from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import names

flags.adopt_module_key_flags(measure)
_MODEL = flags.DEFINE_enum("model", "2", ["1", "2"], "Stable Diffusion 1.x or 2.x.")
_BATCHES = flags.DEFINE_list("batches", ["1", "2", "4"], "Batch sizes to measure.")
_SAMPLER = flags.DEFINE_string("sampler", "plms", "Sampler: plms, ddim, dpmpp_2m, euler or heun.")
_STEPS = flags.DEFINE_integer("steps", 50, "Sampling steps.", lower_bound=1)
_SIZE = flags.DEFINE_integer("size", 512, "Side of the images in pixels.", lower_bound=64)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Dtype of the computation.")
_ATTENTION = flags.DEFINE_enum("attention_impl", "auto", IMPLEMENTATIONS, "Attention implementation.")
_ROUNDS = flags.DEFINE_integer("rounds", 10, "Timed calls per batch size.", lower_bound=1)
_TINY = flags.DEFINE_bool("tiny", False, "Use a small model, for a quick trial.")

# (TensorRT, framework) latencies in seconds on an A100 80GB, by model and batch size.
_NEMO = {
    ("1", 1): (0.9, 3.3),
    ("1", 2): (1.7, 5.2),
    ("1", 4): (2.9, 9.2),
    ("2", 1): (0.9, 3.2),
    ("2", 2): (1.6, 5.0),
    ("2", 4): (2.7, 8.5),
}


def main() -> None:
    """Measure the latency for each batch size and print the results."""
    cli.start()
    with cli.bad_input():
        if not all(size.isdigit() and int(size) for size in _BATCHES.value):
            raise ValueError(f"--batches={','.join(_BATCHES.value)}: give positive integers")
        tower, p = _model()
        check_pipeline(p)

    def encode(frozen: Any, batch: Any) -> Any:
        outputs: Any = tower.apply(frozen, batch["text_ids"])
        return outputs.last, None

    encoder = TextEncoder("clip", tower.width, 77, lambda texts: {}, (), encode)
    frozen = {"text": _random(clip.abstract_params(tower)), "vae": _random(names.abstract_vae(p.vae))}
    params = _random(names.abstract_unet(p.unet, tower.width))
    sample = jax.jit(sampling.make_sample(p, encoder))
    for size in map(int, _BATCHES.value):
        measure.say(_measured(sample, params, frozen, size))


def _model() -> tuple[TextTower, Pipeline]:
    dtype, part = jnp.dtype(_DTYPE.value), 10 if _TINY.value else 1
    common: dict[str, Any] = {"width": 320 // part, "attention_impl": _ATTENTION.value, "dtype": dtype}
    text: dict[str, Any] = {"vocab_size": 49408, "max_tokens": 77, "projection": None}
    text |= {"end_id": None, "dtype": dtype}
    if _MODEL.value == "1":
        unet = UNet(num_heads=8, linear_projections=False, **common)
        tower = TextTower(width=768, mlp_width=3072, num_heads=12, num_layers=12, activation="quick_gelu", **text)
    else:
        unet = UNet(head_dim=64 // (2 if _TINY.value else 1), **common)
        tower = TextTower(width=1024, mlp_width=4096, num_heads=16, num_layers=23, activation="gelu", **text)
    vae = VAE(width=128 // (4 if _TINY.value else 1), dtype=dtype)
    if _TINY.value:
        tower = tower.clone(num_layers=2)
    sampler = Sampler(_SAMPLER.value, _STEPS.value, 0.0, 7.5, "", 0, 0)
    latents = Latents(_SIZE.value, vae_module.SCALE, "symmetric")
    diffusion = Diffusion("eps")
    return tower, Pipeline(unet, vae, Conditioning("empty", 0), latents, diffusion, sampler)


def _random(abstract: Any) -> Any:
    """Return small random parameters of these shapes: kernels in --dtype, others in float32."""

    def leaf(path, shape):
        # Python's hash of a string differs between processes.
        key = jax.random.key(zlib.crc32(jax.tree_util.keystr(path).encode()) % 2**31)
        dtype = _DTYPE.value if path[-1].key == "kernel" else "float32"
        return 0.02 * jax.random.normal(key, shape.shape, dtype)

    return jax.tree.map_with_path(leaf, abstract)


def _measured(sample: Any, params: Any, frozen: Any, size: int) -> dict[str, Any]:
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 49000, (size, 77), np.int32))
    batch = {"text_ids": ids, f"{sampling.NEGATIVE}text_ids": ids}
    keys, scales = jax.random.split(jax.random.key(0), size), jnp.full(size, 7.5)
    arguments = (params, frozen, batch, keys, scales)
    compiled, compile_s = measure.timed(lambda: sample.lower(*arguments).compile())
    seconds = measure.rounds(lambda: compiled(*arguments), int(_ROUNDS.value))
    as_nemo = (_SIZE.value, _STEPS.value, _SAMPLER.value, _TINY.value) == (512, 50, "plms", False)
    nemo = _NEMO.get((_MODEL.value, size)) if as_nemo else None
    tensorrt, framework = nemo or (None, None)
    return {
        "model": f"{_MODEL.value}.x" + " tiny" * _TINY.value,
        "batch": size,
        "latency_s": statistics.median(seconds),
        "latency_s_min_max": [min(seconds), max(seconds)],
        "nemo_tensorrt_s": tensorrt,
        "nemo_framework_s": framework,
        "compile_s": compile_s,
        "sampler": _SAMPLER.value,
        "steps": _STEPS.value,
        "size": _SIZE.value,
        "dtype": _DTYPE.value,
        "attention_impl": _ATTENTION.value,
        **measure.machine(),
    }


if __name__ == "__main__":
    cli.run(main)
