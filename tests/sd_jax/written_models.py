"""Write a tiny published model as a file with LDM's names and as a diffusers directory."""

import numpy as np
import yaml

from sd_jax.vae import VAE
from sd_jax.weights import checkpoints, formats
from tests.sd_jax.cases import unet_weights, vae_weights
from tests.sd_jax.weights.test_checkpoints import text_state

SMALL_VAE = VAE(32, (1, 2, 2), 1)


def write(path, unet, predicts=None, tokenizer=None, *, text="1.x", vae=SMALL_VAE):
    """Write path.npz, path.yaml and the diffusers directory `path`, which is returned.

    The weights are random and keep the variance, to keep rounding small.
    """
    parts = {
        "model.diffusion_model": unet_weights(unet),
        "first_stage_model": vae_weights(vae),
        "cond_stage_model": text_state(text),
    }
    state = {f"{prefix}.{n}": w for prefix, part in parts.items() for n, w in part.items()}
    file, config = path.with_suffix(".npz"), path.with_suffix(".yaml")
    np.savez(file, **state)
    fields = {"unet_config": formats.unet_to_ldm(unet, 24)}
    fields |= {"cond_stage_config": {"num_attention_heads": 3}}
    config.write_text(yaml.safe_dump(fields))
    read = checkpoints.load(file, config=config)
    checkpoints.save_diffusers(read, path, predicts, tokenizer=tokenizer)
    return path


def start_from(noise, monkeypatch):
    """Let all samplers start from this standard normal noise [1, H, W, C], for every key."""
    start = lambda keys, shape, sigma: sigma * noise.repeat(len(keys), 0)
    monkeypatch.setattr("diffusion_jax.diffusion.samplers.initial_noise", start)
