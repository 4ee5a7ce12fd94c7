"""Job that trains the quick start's model with three seeds, each on one GPU."""

from ml_collections import ConfigDict

from launch.jobs import base64_500m


def get_config() -> ConfigDict:
    c = base64_500m.get_config()
    c.name = "quickstart"
    c.config = "configs/quickstart.py"
    c.sweep = (("seed=0",), ("seed=1",), ("seed=2",))
    c.accelerator = "h100:1"
    return c
