"""Times the train step of a config on synthetic data, all devices together.

    python -m benchmarks.train_step --config=configs/base64_500m.py --batch=256
    python -m benchmarks.train_step --config=configs/sd2_512_base.py --batch=64 --inputs=moments

--inputs is for Stable Diffusion: "cached" trains the UNet alone, on stored moments and text states,
"moments" has CLIP in the step too, "images" also the VAE. No weights are needed for any of them.

Prints one line of JSON. samples_per_second is from the median step after the warm-up, with the
state donated as in training; tflops uses the count of diffusion_jax/machine/flops.py (which holds
what is computed twice), of which known_tflop_per_sample holds the count from papers where one is
known; mfu divides by the peak bfloat16 rate of the device, null for devices that
diffusion_jax/machine/hardware.py does not list.
"""

import json
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from benchmarks import measure, sd_inputs
from diffusion_jax import cli
from diffusion_jax.machine import flops, hardware, sharding
from diffusion_jax.precache import lookup
from diffusion_jax.task import Task
from diffusion_jax.text import TextEncoder
from diffusion_jax.train import loop, optimizer
from diffusion_jax.train.state import init_state
from imagen_jax import task as imagen_task
from imagen_jax.settings import Settings, read_settings
from sd_jax.settings import Settings as SDSettings

_CONFIG = cli.define_config()
_BATCH = flags.DEFINE_integer("batch", None, "Global batch size.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 30, "Timed steps.", lower_bound=1)
_INPUTS = flags.DEFINE_enum("inputs", "cached", sd_inputs.INPUTS, "What is computed beforehand.")
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
# Of Stable Diffusion's UNet alone, by parameters and pixels; 77 tokens.
_KNOWN_SD_TFLOP = {
    (859_520_964, 512): 2.410,
    (859_520_964, 256): 0.540,
    (865_910_724, 512): 2.413,
    (865_910_724, 256): 0.543,
}


def main(argv: list[str]) -> None:
    """Compiles, warms up, measures, prints."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
    batch_size = int(_BATCH.value or 0)
    with cli.bad_input():
        s, task, rows = _open_system(_CONFIG.value.to_dict(), batch_size)
        mesh = sharding.make_mesh(*s.mesh)
        sharding.check_batch(batch_size, s.optimizer.accumulate, mesh)
    tx = optimizer.make_optimizer(s.optimizer, s.run.steps)
    create = lambda key: init_state(task.init(key), tx, s.optimizer.ema_decays)
    key = jax.device_put(jax.random.key(0), sharding.replicated(mesh))
    layout = sharding.shardings(jax.eval_shape(create, key), mesh, task.rules)
    state = jax.jit(create, out_shardings=layout)(key)
    frozen = sharding.place_all(task.frozen, mesh, task.rules)
    batch = jax.device_put(rows, sharding.batch_sharding(mesh))

    step = loop.make_step(task, s.optimizer, tx, layout)
    traced, trace_s = measure.timed(lambda: step.trace(state, frozen, batch, key))
    lowered, lower_s = measure.timed(traced.lower)
    compiled, compile_s = measure.timed(lowered.compile)
    work = flops.count(traced.jaxpr.jaxpr)
    metrics = {}

    def train() -> Any:
        nonlocal state, metrics
        state, metrics = compiled(state, frozen, batch, key)
        return metrics

    seconds = measure.rounds(train, int(_STEPS.value), int(_WARMUP.value))
    median = statistics.median(seconds)

    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    result = {
        "config": str(config_flags.get_config_filename(flags.FLAGS["config"])),
        "parameters": parameters,
        "batch": batch_size,
        "inputs": _INPUTS.value if isinstance(s, SDSettings) else None,
        "samples_per_second": batch_size / median,
        "step_ms": 1e3 * median,
        "step_ms_min_max": [1e3 * min(seconds), 1e3 * max(seconds)],
        "tflops": work / median / 1e12,
        "tflop_per_sample": work / batch_size / 1e12,
        "known_tflop_per_sample": _known_tflop(parameters, s),
        "mfu": hardware.utilization(work, median, jax.devices()[0].device_kind, mesh.size),
        "trace_s": trace_s,
        "lower_s": lower_s,
        "compile_s": compile_s,
        "devices": mesh.size,
        **measure.machine(),
        "loss": float(metrics["loss"]),
    }
    print(json.dumps(result))


def _known_tflop(parameters: int, s: Any) -> float | None:
    if isinstance(s, SDSettings):
        return _KNOWN_SD_TFLOP.get((parameters, s.latents.image_size))
    return _KNOWN_TFLOP.get(parameters)


def _open_system(config: Mapping[str, Any], size: int) -> tuple[Any, Task, dict]:
    """Settings, task and a batch of the system that a config is of."""
    if "latents" in config:
        return sd_inputs.open_system(config, size, _INPUTS.value)
    s = read_settings(config)
    encoder = lookup.open_encoder(s.text, s.data.embedded)
    return s, imagen_task.make_task(s, encoder), _batch(s, encoder, size)


def _batch(s: Settings, encoder: TextEncoder, size: int) -> dict[str, jax.Array]:
    """Random pictures, and texts as long as the encoder keeps them."""
    rng = np.random.default_rng(0)
    side, tokens = s.unet.image_size, s.text.max_tokens
    images = rng.integers(0, 256, (size, side, side, 3), np.uint8)
    if s.data.embedded:
        texts = list(rng.standard_normal((size, tokens, s.text.width), np.float32))
    else:
        texts = [" ".join(["cat"] * (tokens - 1))] * size  # One more token ends the text.
    return jax.tree.map(jnp.asarray, {"image": images, **encoder.tokenize(texts)})


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "batch"])
    cli.run(main)
