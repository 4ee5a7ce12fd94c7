"""The shipped emoji model, distilled with MeanFlow so that one step draws a picture.

The model has 8,346,893 parameters. Training starts from the weights in models/emoji32 and takes
21 minutes of CPU time. configs/emoji32.py states how to prepare the pictures.

python -m imagen_jax.train --config=configs/emoji32_meanflow.py --workdir=runs/emoji32_meanflow
"""

from ml_collections import ConfigDict

from configs import base32_8m, emoji32


def get_config() -> ConfigDict:
    c = emoji32.with_emoji(base32_8m.get_config())
    c.unet.weights = "models/emoji32"
    c.steps = 800
    # The network learns guidance omega / (1 - kappa) = 2, so drawing needs none.
    c.diffusion.update(method="meanflow(omega=1, kappa=0.5, norm_eps=1, every=4)", p_mean=0.8, p_std=1.6, weight="none")
    c.sampler.update(name="ddim", eta=0.0, steps=1, guidance=1.0)
    c.evaluation.guidance = (1.0,)
    c.optimizer.update(lr=5e-4, warmup=100, schedule="cosine", ema_decays=(0.99, 0.998))
    c.log_every, c.sample_every = 20, 200
    return c
