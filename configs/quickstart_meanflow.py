"""Variant of the quick start with MeanFlow: the model draws a digit in one sampling step.

A training step takes 1.4 times as long as in configs/quickstart.py, so this config has fewer steps.

python -m imagen_jax.train --config=configs/quickstart_meanflow.py --workdir=runs/meanflow
python -m imagen_jax.evaluate --workdir=runs/meanflow --guidance=1
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    c = quickstart.get_config()
    c.steps = 1_000
    # Guidance is part of what the network learns, so drawing needs none.
    c.diffusion.update(method="meanflow(omega=1.5, norm_eps=1, every=8)", p_mean=0.0, p_std=1.0, weight="none")
    c.sampler.update(name="ddim", eta=0.0, steps=1, guidance=1.0)
    c.evaluation.guidance = (1.0,)
    c.save_every, c.sample_every = 500, 500
    return c
