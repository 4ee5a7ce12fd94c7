"""Emoji at 64x64, like emoji32, to train for a few hours on one GPU.

47,125,005 parameters. It has not been trained yet. Prepare data/emoji as in configs/emoji32.py; use
several --style flags for more styles, which prompts select by name.

python -m imagen_jax.train --config=configs/emoji64.py --workdir=runs/emoji64
"""

from ml_collections import ConfigDict

from configs import base64_47m, emoji32


def get_config() -> ConfigDict:
    return emoji32.with_emoji(base64_47m.get_config())
