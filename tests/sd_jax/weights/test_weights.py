"""The weights command: conversion, exit codes and messages."""

from sd_jax.weights import checkpoints
from tests.imagen_jax import commands
from tests.sd_jax.cases import unet_weights
from tests.sd_jax.weights.test_checkpoints import WIDE, written


def test_convert_prints_what_it_mapped_and_verifies_the_result(tmp_path):
    file = written(tmp_path / "mlperf.npz", unet_weights(WIDE))
    target = tmp_path / "nemo.safetensors"
    flags = ("--names=nemo", "--norm_groups=16", f"--config={tmp_path / 'ldm.yaml'}")
    ended = commands.succeed("sd_jax.weights", "convert", f"--from={file}", f"--to={target}", *flags)
    assert ended.out.splitlines()[-1] == f"{target}: written and read back, the same to the last bit"
    assert ended.out.startswith("unet: 168 arrays (ldm), ")
    assert checkpoints.load(target).unet.network == WIDE.clone(norm_groups=16)
