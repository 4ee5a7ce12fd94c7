"""Emoji at 32x32 in given styles, skin tones and background colours: an hour on two CPU cores.

8,346,893 parameters. Prepare the pictures first (docs/data.md states their sources and licences):

npm pack emoji-datasource-google
python -m diffusion_jax.data.prepare emoji --style=noto:emoji-datasource-google-16.0.0.tgz \
    --out=data/emoji
python -m imagen_jax.train --config=configs/emoji32.py --workdir=runs/emoji32
"""

from ml_collections import ConfigDict

from configs import base32_8m


def get_config() -> ConfigDict:
    c = with_emoji(base32_8m.get_config())
    c.steps = 4_000
    c.optimizer.schedule = "cosine"
    # The quick start's weighting (docs/ablations.md) at twice its sigma, since 32x32 pictures need
    # twice the noise of 16x16 ones. Little is learned below sigma 0.3, where sampling ends.
    c.diffusion.weight = "p2(k=0.25)"
    c.sampler.sigma_min = 0.3
    return c


def with_emoji(c: ConfigDict) -> ConfigDict:
    """Return a config of any image size with the emoji as its data, and prompts for samples."""
    c.data.update(source="webdataset", path="data/emoji/train", text="txt")
    c.prompts = (
        "a cat face, noto style, on a white background",
        "a smiling face with sunglasses, noto style, on a pink background",
        "a red heart, noto style, on a white background",
        "a firefighter with dark skin, noto style, on a blue background",
        "a car, noto style, on a green background",
        "a penguin, noto style, on a yellow background",
        # The prompts from here on are not in the training data.
        "a red apple, noto style, on a blue background",
        "a pizza, noto style, on a yellow background",
        "a rocket, noto style, on a purple background",
        "an astronaut with dark skin, noto style, on a yellow background",
        "a fox, noto style, on a gray background",
        "a guitar, noto style, on a blue background",
    )
    return c
