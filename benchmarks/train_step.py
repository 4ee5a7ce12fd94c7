"""Measure the speed of a config's train step on synthetic data, with all devices.

    python -m benchmarks.train_step --config=configs/base64_500m.py --batch=256
    python -m benchmarks.train_step --config=configs/sd2_512_base.py --batch=64 --inputs=moments

--inputs selects what a Stable Diffusion step reads. With "cached", it reads latent moments and text
embeddings, and runs only the UNet. With "moments", it reads latent moments and texts, and also runs
CLIP. With "images", it reads images and texts, and also runs CLIP and the VAE. All weights are
random.

The command prints one line of JSON:
- samples_per_second: the batch size divided by the median time of the last hundred steps, or of the
  last half if fewer ran; first_samples_per_second is the same for the first steps. Steps are timed
  for --seconds. As in training, a step starts before the previous one has ended, and its input
  state is donated, so that the new state can use its memory.
- watts, mhz: the power and the clock of the first GPU during the second half of the steps.
- tflops: TFLOP/s, with FLOPs counted by diffusion_jax/devices/flops.py, including recomputation.
- known_tflop_per_sample: an independent count without recomputation; null for models without one.
- mfu: the achieved share of the devices' peak bfloat16 rate; null for devices that
  diffusion_jax/devices/hardware.py does not list.
- kernels: with --profile, the milliseconds of a GPU's kernels per step, by operation.
- planned: the planner's estimates for this device, samples/s at 40 % MFU and memory in GiB; null
  for several devices, and for devices that launch/accelerators.py does not list.
"""

from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh
from ml_collections import config_flags

from benchmarks import measure, step
from diffusion_jax import cli
from diffusion_jax.devices import hardware, sharding
from launch import accelerators
from launch.planner import estimate, tasks

flags.adopt_module_key_flags(measure)
flags.adopt_module_key_flags(step)
_CONFIG = cli.define_config()
_BATCH = flags.DEFINE_integer(
    "batch",
    None,
    "Global batch size; default: the config's; 0: the largest multiple of 8 that fits "
    "into one device's memory by the planner's estimate.",
    lower_bound=0,
)

_MFU = 0.4  # The utilization that launch.plan assumes by default.
# TFLOP of matrix products and convolutions per training sample, forward and backward, by number of
# parameters.
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
# TFLOP per training sample of Stable Diffusion's UNet with 77 tokens, by (parameters, image size).
_KNOWN_SD_TFLOP = {
    (859_520_964, 512): 2.410,
    (859_520_964, 256): 0.540,
    (865_910_724, 512): 2.413,
    (865_910_724, 256): 0.543,
}


def main() -> None:
    """Compile the train step, measure it, and print the result."""
    cli.start()
    config: dict[str, Any] = _CONFIG.value.to_dict()
    if _BATCH.value is not None:
        config["batch_size"] = int(_BATCH.value) or 8
    with cli.bad_input():
        model, inputs = step.read(config)
        if _BATCH.value == 0:
            config["batch_size"] = _largest_batch(model)
            model, inputs = step.read(config)
        batch = model.run.batch_size
        mesh = sharding.make_mesh(*model.mesh)
        sharding.check_batch(batch, model.optimizer.micro_batch, mesh)
    planned = _planned(model, mesh)
    timing = step.run(model, mesh)
    parameters = tasks.parameters(model)
    known_tflop = _KNOWN_TFLOP.get(parameters)
    if inputs:
        known_tflop = _KNOWN_SD_TFLOP.get((parameters, config["latents"]["image_size"]))
    measure.say(
        {
            "config": str(config_flags.get_config_filename(flags.FLAGS["config"])),
            "parameters": parameters,
            "batch": batch,
            "inputs": inputs,
            "samples_per_second": batch / timing.median,
            "first_samples_per_second": batch / timing.first,
            "steps": len(timing.seconds),
            "seconds": sum(timing.seconds),
            "deterministic": model.run.deterministic,
            "step_ms": 1e3 * timing.median,
            "step_ms_min_max": [1e3 * min(timing.seconds), 1e3 * max(timing.seconds)],
            "tflops": timing.flops / timing.median / 1e12,
            "tflop_per_sample": timing.flops / batch / 1e12,
            "known_tflop_per_sample": known_tflop,
            "mfu": timing.utilization(mesh.size),
            "planned": planned,
            "trace_s": timing.trace_s,
            "lower_s": timing.lower_s,
            "compile_s": timing.compile_s,
            "micro_batches": timing.passes,
            "devices": mesh.size,
            **measure.machine(),
            **timing.gpu,
            "loss": timing.loss,
            "kernels": timing.kernels,
        }
    )


def _largest_batch(model: tasks.PlannedTask) -> int:
    """Return the largest multiple of 8 that the planner expects to fit; ValueError if none fits."""
    mesh, limit = accelerators.mesh_over(model.mesh, 1), hardware.limit(jax.local_devices()[0])
    batch = estimate.largest_batch(estimate.trace(model), mesh, limit) // 8 * 8
    if not batch:
        raise ValueError(f"--batch=0: not even 8 samples fit into {limit / 2**30:.1f} GiB")
    return batch


def _planned(model: tasks.PlannedTask, mesh: Mesh) -> dict[str, float] | None:
    """Return the planner's estimates for the current device, or None if it does not know it."""
    kind = jax.local_devices()[0].device_kind.lower()
    name = next((name for name in accelerators.KINDS if name.partition("-")[0] in kind), None)
    if name is None or mesh.size > 1:
        return None
    target = accelerators.parse(f"{name}:1")
    figures = estimate.plan(model, estimate.trace(model), target, mfu=_MFU, pictures=0)
    rate, need = figures["samples_per_second"]["exposed"], figures["bytes_per_device"]["total"]
    return {"samples_per_second": rate, "memory_gib": need / 2**30}


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.run(main)
