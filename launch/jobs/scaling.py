"""Job that measures weak scaling of Imagen's 64x64 base model on up to 64 H100 GPUs.

docs/lab/benchmarks.md describes the benchmark.
"""

from ml_collections import ConfigDict

from launch.jobs import base64_500m


def get_config() -> ConfigDict:
    c = base64_500m.get_config()
    c.name = "scaling"
    c.command = "benchmarks.scaling"
    c.overrides = ("unet.attention_impl=cudnn", "batch_size=4096")  # 64 samples per GPU.
    c.accelerator = "h100:64"
    return c
