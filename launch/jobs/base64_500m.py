"""The 500M base model on a slice of 64 v5p chips, for GKE; see docs/launch.md for the others."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.name = "base64-500m"
    c.command = "imagen_jax.train"
    c.config = "configs/base64_500m.py"
    c.overrides = ()  # Of the config, such as "optimizer.lr=2e-4".
    c.flags = ()
    c.sweep = ()  # Such as (("seed=1",), ("seed=2",)): a run for each.

    c.accelerator = "v5p:4x4x4"  # Or v5p:4x4x4*2, h100:64; launch/accelerators.py lists them.
    c.image = ""
    c.workdir = ""
    c.secrets = ()  # Names of environment variables, such as "HF_TOKEN".
    c.env = ()  # Such as "NCCL_DEBUG=INFO".
    c.mounts = ()  # Folders for a container, beside those that config and flags name.
    c.restarts = 10  # After a crash or a hang; after a preemption always, after bad input never.

    c.gke = dict(
        namespace="default",
        service_account="",
        queue="",
        secret="imagen-sd-jax",
        spot=False,
        grace=300,
        restarts=-1,  # As below for all launchers.
        patch="",  # YAML for the manifest, such as "{metadata: {labels: {team: images}}}".
    )
    c.slurm = dict(partition="", account="", time="24:00:00", grace=300, setup="", options=())
    return c
