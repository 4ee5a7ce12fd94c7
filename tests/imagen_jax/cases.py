"""Cases in the format of tests/parity/imagen.py, with random weights and numpy's outputs."""

import json

import jax
import numpy as np

from diffusion_jax.weights import torch_weights
from imagen_jax.weights import nemo
from tests.imagen_jax import numpy_unet

SMALL = dict(
    embed_dim=32,
    image_size=8,
    channel_mult=[1, 2],
    num_res_blocks=1,
    per_head_channels=16,
    cond_dim=64,
    learned_sinu_pos_emb_dim=0,
    attention_resolutions=[4],
)
TINY = {"unet": SMALL | dict(image_size=4, channel_mult=[1])}
ONE_LEVEL = dict(
    image_size=8, embed_dim=32, channel_mult=(1,), num_res_blocks=1, attention_resolutions=(), head_dim=32, cond_dim=32
)
"""Fields of config.unet."""
SMALL_EFFICIENT = dict(
    embed_dim=32,
    image_size=8,
    channel_mult=[1, 2],
    num_resblocks=[1, 1],
    atnn_enabled_at=[0, 1],
    per_head_channels=16,
    learned_sinu_pos_emb_dim=0,
    skip_connection_scaling=True,
)
TINY_EFFICIENT = {
    "unet_type": "sr",
    "unet": SMALL_EFFICIENT | dict(channel_mult=[1], num_resblocks=[1], atnn_enabled_at=[0], image_size=4),
}


def random_weights(unet, text_width):
    """Return random weights: kernels keep the variance, and norms are near 1."""
    rng = np.random.default_rng(0)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), nemo.abstract_params(unet, text_width))
    table = nemo.table(zeros, unet)
    state = torch_weights.to_state_dict(zeros, table)
    for entry in table:
        w = rng.normal(size=state[entry.torch].shape)
        if entry.path.endswith(("bias", "scale")):
            w = w / 10 + entry.path.endswith("scale")
        elif w.ndim > 1:
            w = w / np.sqrt(np.prod(w.shape[1:]))
        state[entry.torch] = w.astype(np.float32)
    return state


def random_case(config, *, size=None, text_width=40):
    """Return a case in the oracles' format, with outputs computed by numpy in float64."""
    unet = nemo.unet_from_config(config)
    height, width = size or (unet.image_size, unet.image_size)
    state, rng = random_weights(unet, text_width), np.random.default_rng(1)
    inputs = {
        "x": rng.normal(size=(3, 3, height, width)),
        "time": np.array([-1.3, 0.2, 0.9]),
        "text_embed": rng.normal(size=(3, 7, text_width)),
        "text_mask": np.arange(7) < np.array([[7], [3], [0]]),
    }
    if unet.low_res:
        inputs["x_low_res"] = rng.normal(size=(3, 3, height, width))
    if unet.noise_aug:
        inputs["time_low_res"] = np.array([-0.5, 0.1, 0.4])
    double = {name: array.astype(np.float64) for name, array in state.items()}
    y = numpy_unet.forward(config, double, **inputs)
    no_text = inputs | {"text_embed": np.zeros_like(inputs["text_embed"])}
    null = numpy_unet.forward(config, double, **no_text)
    case = {"config": np.array(json.dumps(config)), "out/y": y, "out/y_cfg3": null + 3 * (y - null)}
    case |= {f"in/{name}": array for name, array in inputs.items()}
    return case | {f"sd/{name}": array for name, array in state.items()}
