"""Times the train step of a config on synthetic data, all devices together.

    python -m benchmarks.train_step --config=configs/base64_500m.py --batch=256

Prints one line of JSON. samples_per_second is from the median step after the warm-up, with the
state donated as in training; tflops uses the program's own count of floating-point operations
(before compilation, and so with rematerialised ones), of which known_tflop_per_sample holds the
analytic count of matrix products and convolutions where one is known; mfu divides by the peak
bfloat16 rate of the device, null for devices that diffusion_jax/hardware.py does not list.
"""

import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from diffusion_jax import cli, hardware, loop, sharding, train_state
from diffusion_jax.text import TextEncoder, registry
from imagen_jax import task
from imagen_jax.settings import Settings, read_settings

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file in configs/.", lock_config=True)
_BATCH = flags.DEFINE_integer("batch", None, "Global batch size.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 30, "Timed steps.", lower_bound=1)
_WARMUP = flags.DEFINE_integer("warmup", 5, "Steps before them.", lower_bound=0)

# Matrix products and convolutions of one training sample, forward and backward, by parameters.
_KNOWN_TFLOP = {
    524_897_540: 1.003,  # base64_500m
    2_171_162_116: 3.947,  # base64_2b
    408_350_468: 4.287,  # sr256_400m
    429_350_660: 4.300,  # sr256_400m_t5xxl
    568_675_844: 4.925,  # sr256_450m
    646_023_428: 1.490,  # sr256_600m
    700_610_308: 1.574,  # sr256_600m_stacked
    639_193_348: 1.477,  # sr1024_600m, on crops of 256
}


def main(argv: list[str]) -> None:
    """Compiles, warms up, measures, prints."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
    config, batch_size = _CONFIG.value, int(_BATCH.value or 0)
    with cli.bad_input():
        s = read_settings(config.to_dict())
        mesh = sharding.make_mesh(*s.mesh)
        sharding.check_batch(batch_size, s.optimizer.accumulate, mesh)
        encoder = registry.open_encoder(s.text)
    imagen = task.make_task(s, encoder)
    tx = loop.make_optimizer(s.optimizer, s.run.steps)
    create = lambda key: train_state.init_state(imagen.init(key), tx, s.optimizer.ema_decays)
    key = jax.device_put(jax.random.key(0), sharding.replicated(mesh))
    layout = sharding.shardings(jax.eval_shape(create, key), mesh, imagen.rules)
    state = jax.jit(create, out_shardings=layout)(key)
    frozen = sharding.place_all(imagen.frozen, mesh, imagen.rules)
    batch = jax.device_put(_batch(s, encoder, batch_size), sharding.batch_sharding(mesh))

    step = loop.make_step(imagen, s.optimizer, tx, layout)
    traced, trace_s = _timed(lambda: step.trace(state, frozen, batch, key))
    lowered, lower_s = _timed(traced.lower)
    compiled, compile_s = _timed(lowered.compile)
    flops = (lowered.cost_analysis() or {}).get("flops", 0.0)
    seconds, metrics = [], {}
    for _ in range(_WARMUP.value + _STEPS.value):
        start = time.perf_counter()
        state, metrics = compiled(state, frozen, batch, key)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[_WARMUP.value :])

    device = jax.devices()[0]
    memory = hardware.memory(device)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    result = {
        "config": str(config_flags.get_config_filename(flags.FLAGS["config"])),
        "parameters": parameters,
        "batch": batch_size,
        "samples_per_second": batch_size / median,
        "step_ms": 1e3 * median,
        "step_ms_min_max": [1e3 * min(seconds[_WARMUP.value :]), 1e3 * max(seconds)],
        "tflops": flops / median / 1e12,
        "tflop_per_sample": flops / batch_size / 1e12,
        "known_tflop_per_sample": _KNOWN_TFLOP.get(parameters),
        "mfu": hardware.utilization(flops, median, device.device_kind, mesh.size),
        "peak_memory_gib": memory and memory.peak / 2**30,
        "trace_s": trace_s,
        "lower_s": lower_s,
        "compile_s": compile_s,
        "device": device.device_kind,
        "devices": mesh.size,
        "jax": jax.__version__,
        "loss": float(metrics["loss"]),
    }
    print(json.dumps(result))


def _batch(s: Settings, encoder: TextEncoder, size: int) -> dict[str, jax.Array]:
    """Random pictures, and texts as long as the encoder keeps them."""
    rng = np.random.default_rng(0)
    side, tokens = s.unet.image_size, s.text.max_tokens
    images = rng.integers(0, 256, (size, side, side, 3), np.uint8)
    if s.text.encoder == "precomputed":
        texts = list(rng.standard_normal((size, tokens, s.text.width), np.float32))
    else:
        texts = [" ".join(["cat"] * (tokens - 1))] * size  # One more token ends the text.
    return jax.tree.map(jnp.asarray, {"image": images, **encoder.tokenize(texts)})


def _timed(work):
    start = time.perf_counter()
    return work(), time.perf_counter() - start


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "batch"])
    cli.run(main)
