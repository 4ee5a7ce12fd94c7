"""Workdirs of runs at step 0, written without training, with random numbers in every parameter."""

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax import runs
from diffusion_jax.train import checkpoint, optimizer
from diffusion_jax.train.state import init_state
from diffusion_jax.weights import finetune, pretrained


class Start:
    """The position at the start of any data."""

    def get_state(self):
        return b'{"samples": 0}'

    def set_state(self, state):
        del state


def random_params(init, seed=0):
    """Random numbers in every parameter that `init` makes: its zeros would hide bugs."""
    rng, shapes = np.random.default_rng(seed), jax.eval_shape(init, jax.random.key(0))
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.2, jnp.float32)
    return jax.tree.map(draw, shapes)


def write(workdir, config, read_settings, init, seed=0, base=None):
    """A run of this config whose parameters, which are returned, are also its averages.

    `base` are the weights that a LoRA adapts.
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
