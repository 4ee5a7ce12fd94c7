"""Super-resolution model for emoji, 32x32 to 64x64, to train in 20 minutes of one CPU core.

The model has 3,203,889 parameters and takes 1.5 GFLOP per training image. With emoji32, it draws
emoji of 64x64 pixels (models/emoji64_sr/README.md). configs/emoji32.py states how to prepare the
pictures.

python -m imagen_jax.train --config=configs/emoji64_sr.py --workdir=runs/emoji64_sr
"""

from ml_collections import ConfigDict

from configs import emoji32, sr64_3m


def get_config() -> ConfigDict:
    c = emoji32.with_emoji(sr64_3m.get_config())
    c.steps = 1_000
    c.batch_size = 64
    c.optimizer.update(name="muon", lr=2e-3, schedule="wsd", warmup=100)
    c.log_every, c.sample_every = 50, 0
    return c
