"""Super-resolution model for emoji from 32x32 to 64x64, to train for half an hour on two CPU cores.

The model has 3,286,321 parameters. It enlarges the pictures of emoji32.

python -m imagen_jax.train --config=configs/emoji64_sr.py --workdir=runs/emoji64_sr
python -m imagen_jax.sample --workdir=runs/emoji32 --workdir=runs/emoji64_sr \
    --prompt="a fox, noto style, on a blue background" --num_images=4 --out=pictures
"""

from ml_collections import ConfigDict

from configs import emoji32, sr64_3m


def get_config() -> ConfigDict:
    c = emoji32.with_emoji(sr64_3m.get_config())
    c.steps = 2_400
    c.optimizer.schedule = "cosine"
    return c
