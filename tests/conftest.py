"""Every test sees eight CPU devices; compiled programs are kept between runs.

Several processes (pytest -n) share the tests by file or by the mark xdist_group, so that each
program is compiled once, and begin with what takes longest.
"""

import os
import pathlib

import jax
import pytest

from tests.imagen_jax import commands

ROOT = pathlib.Path(__file__).parent.parent

os.environ["XLA_FLAGS"] = f"{commands.XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

# The groups that take longest, by what they took of a processor: a group that starts last should
# be a short one. The rest, in the order of their paths, take less than ten seconds each.
LONGEST = (
    "imagen_jax/test_train.py", "parity/test_imagen.py", "sd_jax/test_train.py",
    "diffusion_jax/test_processes.py", "imagen_jax/test_unet.py", "imagen_jax/test_cascade.py",
    "imagen_jax/test_two_commands.py", "sd_jax/test_drawing.py", "imagen_jax/test_task.py",
    "sd_jax/test_train_vae.py", "diffusion_jax/evaluate/test_command.py", "sd_jax/test_task.py",
    "sd_jax/mlperf/test_mlperf.py", "imagen_jax/test_sample.py", "imagen_jax/test_evaluate.py",
    "sd_jax/test_sample.py", "diffusion_jax/train/test_checkpoint.py",
    "imagen_jax/test_meshes.py", "parity/test_sd.py", "launch/test_gke.py",
    "diffusion_jax/diffusion/test_samplers.py", "sd_jax/test_evaluate.py",
    "imagen_jax/test_efficient_unet.py", "diffusion_jax/train/test_loop.py",
    "diffusion_jax/train/test_state.py", "imagen_jax/weights/test_nemo.py",
    "diffusion_jax/test_oracles.py", "sd_jax/test_networks.py",
    "imagen_jax/test_super_resolution.py", "diffusion_jax/precache/test_precache.py",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    return (os.cpu_count() or 1) + 1  # Those with processes of their own mostly wait for them.


def pytest_configure(config):
    config.option.loadscopereorder = False  # Xdist would begin with the groups of most tests.


@pytest.hookimpl(tryfirst=True)  # Before xdist reads the marks.
def pytest_collection_modifyitems(items):
    rank = {str(ROOT / "tests" / path): place for place, path in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(str(item.path), len(rank)))
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(ROOT))))
