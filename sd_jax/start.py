"""Write configs for training a small latent diffusion model on your own pictures.

    python -m sd_jax.start --data=PHOTOS [--hours=2] [--out=configs/mine.py] [--vae=PATH]

The command works like imagen_jax.start, whose --help describes PHOTOS. --vae names a trained VAE: a
diffusers directory, a checkpoint file or a workdir of sd_jax.train_vae. Without --vae, a quarter of
the time is used to train a VAE on these pictures first.
"""

from absl import flags

from diffusion_jax.start.changes import Changes
from diffusion_jax.start.stages import Candidate, TrainingStage
from diffusion_jax.start.start_command import command
from sd_jax.weights.opened import open_checkpoint

_VAE = flags.DEFINE_string("vae", "", "The path of a trained VAE; by default, one is trained.")
_FIELDS = (
    "width",
    "channel_mult",
    "num_res_blocks",
    "latent_channels",
    "attention_levels",
    "mid_attention",
    "quant_conv",
)


def candidates() -> list[Candidate]:
    """Return the only model of this command: a VAE, unless --vae names one, and a UNet."""
    unet = TrainingStage("sd64_11m", 3.0)
    if _VAE.value:
        fields = vae_fields(_VAE.value)
        return [Candidate(64, 0, [unet._replace(changes=lambda workdir: fields)])]
    new_vae = lambda workdir: {"vae.weights": (f"{workdir}_vae", "Train it first.")}
    vae = TrainingStage("sd64_vae", 5.1, "_vae", 0.25)
    return [Candidate(64, 0, [vae, unet._replace(share=0.75, changes=new_vae)])]


def vae_fields(path: str) -> Changes:
    """Return the config changes with which a UNet is trained in the latents of the VAE at `path`.

    `path` is a diffusers directory, a checkpoint file or a workdir of sd_jax.train_vae. Raises
    ValueError if it holds no VAE.
    """
    opened = open_checkpoint(path, ("vae",))
    if opened.vae is None:
        raise ValueError(
            f"--vae={path} holds no VAE: name a diffusers directory, a checkpoint or a workdir of sd_jax.train_vae"
        )
    vae = opened.vae.network
    values = {"vae.weights": path, "latents.scale": opened.scale, "latents.shift": opened.shift}
    values |= {f"vae.{name}": getattr(vae, name) for name in _FIELDS}
    values |= {f"unet.{end}_channels": vae.latent_channels for end in ("in", "out")}
    return {name: (value, "") for name, value in values.items()}


if __name__ == "__main__":
    command("sd_jax", candidates)
