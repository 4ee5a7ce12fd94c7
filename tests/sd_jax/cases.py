"""Cases in the format of tests/parity/sd.py, with random weights and numpy's outputs."""

import json

import jax
import numpy as np

from sd_jax.weights import formats, names
from tests.parity.sd import ldm_vae
from tests.sd_jax import numpy_models

TEXT_WIDTH = 24
# 1.x: a number of heads, 1x1 convolutions.
TINY = dict(
    model_channels=32,
    channel_mult=[1, 2],
    num_res_blocks=1,
    attention_resolutions=[1],
    num_heads=4,
    context_dim=TEXT_WIDTH,
)
TINY_VAE = dict(ch=32, ch_mult=[1, 2], num_res_blocks=1, z_channels=4, in_channels=3, out_ch=3)


def random_weights(table, abstract):
    """Return a random state dict: kernels keep the variance, and norms are near 1."""
    rng = np.random.default_rng(0)
    leaves = jax.tree.leaves_with_path(abstract)
    shapes = {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in leaves}
    state = {}
    for entry in sorted(table, key=lambda e: e.torch):
        shape = entry.layout.to_torch(np.broadcast_to(np.float32(0), shapes[entry.path])).shape
        w = rng.normal(size=shape)
        if entry.path.endswith(("bias", "scale")):
            w = w / 10 + entry.path.endswith("scale")
        else:
            w = w / np.sqrt(np.prod(w.shape[1:]))
        state[entry.torch] = w.astype(np.float32)
    return state


def unet_weights(unet, dialect="ldm"):
    abstract = names.abstract_unet(unet, TEXT_WIDTH)
    return random_weights(names.unet_table(abstract, unet, dialect), abstract)


def vae_weights(vae, dialect="ldm"):
    abstract = names.abstract_vae(vae)
    return random_weights(names.vae_table(abstract, vae, dialect), abstract)


def unet_case(config, norm_groups=32, size=(4, 4)):
    """Return inputs x, t, ctx and t_frac, with numpy's outputs y and y_frac."""
    state = unet_weights(formats.unet_from_ldm(config, norm_groups))
    rng = np.random.default_rng(1)
    case = {
        "x": rng.normal(size=(2, 4, *size)).astype(np.float32),
        "t": np.array([3, 981]),
        "t_frac": np.array([3.25, 958.04], np.float32),
        "ctx": rng.normal(size=(2, 5, TEXT_WIDTH)).astype(np.float32),
    }
    double = {name: array.astype(np.float64) for name, array in case.items()}
    weights = {name: array.astype(np.float64) for name, array in state.items()}
    for name, t in (("y", "t"), ("y_frac", "t_frac")):
        args = (double["x"], double[t], double["ctx"])
        case[name] = numpy_models.unet(config, weights, *args, norm_groups=norm_groups)
    meta = json.dumps({"config": config, "norm_groups": norm_groups})
    return case | {"__meta__": np.array(meta)} | {f"w/{n}": a for n, a in state.items()}


def vae_case(config, size=(8, 12)):
    """Return inputs x, z and n, with numpy's outputs."""
    state, rng = vae_weights(ldm_vae(config)), np.random.default_rng(1)
    small = [side // 2 ** (len(config["ch_mult"]) - 1) for side in size]
    weights = {name: array.astype(np.float64) for name, array in state.items()}
    x, z, n = (rng.normal(size=s) for s in ((2, 3, *size), (2, 4, *small), (2, 4, *small)))
    encoder_out, moments = numpy_models.encode(config, weights, x)
    mean, log_variance = np.split(moments, 2, axis=1)
    sample = mean + np.exp(log_variance / 2) * n
    case = dict(x=x, z=z, n=n, encoder_out=encoder_out, moments=moments, sample=sample)
    case |= dict(mean=mean, std=np.exp(log_variance / 2), latent_scaled=0.18215 * sample)
    case |= dict(decode=numpy_models.decode(config, weights, z))
    case["__meta__"] = np.array(json.dumps({"config": config, "embed_dim": 4}))
    return case | {f"w/{n}": a for n, a in state.items()}
