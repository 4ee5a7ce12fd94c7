"""Job that trains Imagen's 64x64 base model (525M parameters) on 64 TPU v5p chips.

docs/launch.md explains how to launch jobs.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.name = "base64-500m"
    c.command = "imagen_jax.train"
    c.config = "configs/base64_500m.py"
    c.overrides = ()  # Changes to config fields, such as "optimizer.lr=2e-4".
    c.flags = ()
    c.sweep = ()  # One run per entry, for example (("seed=1",), ("seed=2",)).

    c.accelerator = "v5p:4x4x4"  # Or v5p:4x4x4*2, h100:64: see launch/accelerators.py.
    c.image = ""
    c.workdir = ""
    c.secrets = ()  # Names of environment variables, such as "HF_TOKEN".
    c.env = ()  # Environment variables, such as "NCCL_DEBUG=INFO".
    c.mounts = ()  # Folders to mount, in addition to the folders in the config and the flags.
    c.restarts = 10  # For crashes and hangs. Preempted runs always restart, invalid ones never.

    c.gke = dict(
        namespace="default",
        service_account="",
        queue="",
        secret="imagen-sd-jax",
        spot=False,
        grace=300,
        restarts=-1,  # -1: use c.restarts.
        patch="",  # YAML merged into the manifest: "{metadata: {labels: {team: images}}}".
    )
    c.slurm = dict(partition="", account="", time="24:00:00", grace=300, setup="", options=())
    return c
