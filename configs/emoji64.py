"""Text-to-image model for 64x64 emoji, to train for a few hours on one GPU.

The model has 47,125,005 parameters. It has not been trained yet. Before training, prepare
data/emoji as configs/emoji32.py describes. Repeat the flag --style for several styles; prompts
select a style by its name.

python -m imagen_jax.train --config=configs/emoji64.py --workdir=runs/emoji64
"""

from ml_collections import ConfigDict

from configs import base64_47m, emoji32


def get_config() -> ConfigDict:
    return emoji32.with_emoji(base64_47m.get_config())
