"""Write workdirs of runs at step 0 without training, with random parameters."""

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax import runs
from diffusion_jax.train import checkpoint, optimizer
from diffusion_jax.train.state import init_state
from diffusion_jax.weights import finetune, pretrained


class Start:
    """A data iterator at its start."""

    def get_state(self):
        return b'{"samples": 0}'

    def set_state(self, state):
        del state


def random_params(init, seed=0):
    """Return random numbers for all parameters of `init`, because zeros would hide bugs."""
    rng, shapes = np.random.default_rng(seed), jax.eval_shape(init, jax.random.key(0))
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.2, jnp.float32)
    return jax.tree.map(draw, shapes)


def write(workdir, config, read_settings, init, seed=0, base=None):
    """Write a run of this config, and return its parameters, which are also its averages.

    `base` holds the weights that a LoRA adapts.
    """
    s, params = read_settings(config.to_dict()), random_params(init, seed)
    tx = optimizer.make_optimizer(s.optimizer, s.run.steps)
    state = init_state(params, tx, s.optimizer.ema_decays)
    runs.claim(workdir, config.to_dict())
    finetune.keep_base(workdir, pretrained.digest(base) if base else "")
    checkpoints = checkpoint.Checkpointer(workdir / runs.CHECKPOINTS, keep_last=1)
    checkpoints.save(0, state, Start(), config.to_dict())
    checkpoints.close()
    return params
