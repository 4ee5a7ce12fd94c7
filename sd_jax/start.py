"""From your own pictures to configs of a small latent diffusion model that trains on them here.

    python -m sd_jax.start --data=PHOTOS [--hours=2] [--out=configs/mine.py] [--vae=FOLDER]

As imagen_jax.start, which says what PHOTOS may be. Without --vae, a diffusers directory, a file or
a workdir of sd_jax.train_vae, a quarter of the time goes to an autoencoder of these pictures' own.
"""

from typing import Any

from absl import flags

from diffusion_jax import runs
from diffusion_jax.machine import files
from diffusion_jax.start.command import command
from diffusion_jax.start.stages import Rung, Stage
from diffusion_jax.start.written import Changes
from sd_jax import train, train_vae
from sd_jax.weights import checkpoints

_VAE = flags.DEFINE_string("vae", "", "A VAE that is there; by default one is trained.")
_FIELDS = ("width", "channel_mult", "num_res_blocks", "latent_channels")


def rungs() -> list[Rung]:
    """A UNet in the latents of the given VAE, or after one that is trained first."""
    unet = Stage("sd64_11m", "", "sd_jax.train", train.prepare)
    if _VAE.value:
        given = read_fields(_VAE.value)
        return [Rung(64, 0, [unet._replace(changes=lambda workdir: given)])]
    own = lambda workdir: {"vae.weights": (f"{workdir}_vae", "It is trained first.")}
    vae = Stage("sd64_vae", "_vae", "sd_jax.train_vae", train_vae.prepare, 0.25)
    return [Rung(64, 0, [vae, unet._replace(share=0.75, changes=own)])]


def read_fields(path: str) -> Changes:
    """What a config says of a VAE that is there; ValueError or FileNotFoundError for none."""
    if (files.path(path) / runs.CHECKPOINTS).is_dir():
        fields: dict[str, Any] = runs.load(path, "sd_jax.vae")["vae"]
        scale = 1.0
    else:
        opened = checkpoints.load(path, parts=("vae",))
        if opened.vae is None:
            raise ValueError(f"--vae={path} holds no VAE")
        fields = {name: getattr(opened.vae.network, name) for name in _FIELDS}
        scale = opened.scale
    values = {"vae.weights": path, "latents.scale": scale}
    values |= {f"vae.{name}": fields[name] for name in _FIELDS}
    values |= {f"unet.{end}_channels": fields["latent_channels"] for end in ("in", "out")}
    return {name: (tuple(v) if isinstance(v, list) else v, "") for name, v in values.items()}


if __name__ == "__main__":
    command("sd_jax", rungs)
