"""Draws emoji, 64x64, as emoji32 does: some hours on one GPU.

47,125,005 parameters; no GPU has trained it yet. data/emoji is made as configs/emoji32.py says;
give it more styles, a --style each, and they are asked for by their names.

python -m imagen_jax.train --config=configs/emoji64.py --workdir=runs/emoji64
"""

from ml_collections import ConfigDict

from configs import base64_47m, emoji32


def get_config() -> ConfigDict:
    return emoji32.with_emoji(base64_47m.get_config())
