"""Super-resolution of emoji from 32x32 to 64x64, the stage after emoji32: an hour on two CPU cores.

3,286,321 parameters.

python -m imagen_jax.train --config=configs/emoji64_sr.py --workdir=runs/emoji64_sr
python -m imagen_jax.sample --workdir=runs/emoji32 --workdir=runs/emoji64_sr \
    --prompt="a fox, noto style, on a blue background" --num_images=4 --out=pictures
"""

from ml_collections import ConfigDict

from configs import emoji32, sr64_3m


def get_config() -> ConfigDict:
    c = emoji32.with_emoji(sr64_3m.get_config())
    c.steps = 4_000
    c.optimizer.schedule = "cosine"
    # Sampling ends at sigma 2, where the small picture determines almost everything. In an hour, a
    # network of this size does not learn to remove less noise than that. It trains around sigma 1.
    c.diffusion.p_mean = 0.0
    c.sampler.sigma_min = 2.0
    return c
