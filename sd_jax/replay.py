"""Repeat one step of a run of sd_jax.train or sd_jax.train_vae, and compare it with the run's log.

    python -m sd_jax.replay --workdir=runs/sd_quickstart --step=1234

The command works like imagen_jax.replay, whose --help describes the report and the exit codes. For
autoencoders, the report has no loss and noise level of each example. For training on moments,
step_N.png shows the images that the VAE decodes from the means.
"""

from typing import Any

from diffusion_jax.train.replay import Decode
from diffusion_jax.train.replay_command import command
from sd_jax import vae


def decoder(s: Any) -> Decode | None:
    """Return a function that decodes a batch of moments to images in [-1, 1].

    The VAE decodes the means of the moments. `s` holds the run's settings. If they name no weights
    of a VAE, None is returned.
    """
    if not getattr(s, "vae_weights", ""):
        return None

    def decode(frozen, batch):
        mean, _ = vae.mean_and_std(batch["moments"])
        images = s.vae.apply(frozen["vae"], mean, method="decode")
        return images if s.latents.pixels == "symmetric" else 2 * images - 1

    return decode


if __name__ == "__main__":
    command("sd_jax", decoder)
