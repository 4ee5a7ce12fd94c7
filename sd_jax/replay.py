"""Repeat one step of a run of sd_jax.train or sd_jax.train_vae, and compare it with the run's log.

    python -m sd_jax.replay --workdir=runs/sd_quickstart --step=1234

The command trains up to this step from the last checkpoint before it, or from the initial weights
if there is no such checkpoint, with the same data and noise as the run. On the same devices with
the same versions, each metric equals its value in metrics.jsonl to the last bit. If metrics differ,
the report names them, and what has changed since training: versions, devices, the commit or the
config. If none of these has changed, the data or the initial weights probably have. The exit code
is

- 0 if the metrics are equal, or if the step was not logged;
- 1 if a metric differs;
- 2 if the step cannot be rebuilt, for example because the data are missing or the checkpoints are
  damaged.

The report shows the loss and noise level of each example (not for autoencoders) and the gradient
norm of each module. It is written to WORKDIR/replay/step_N.json. step_N.png shows the pictures as
the network received them, cropped and mirrored, with the largest losses first. For training on
moments, it shows the images that the VAE decodes from the means. Nothing else in the workdir
changes, so a run in progress can be replayed.

A line of metrics.jsonl is a mean over log_every steps. To compare with it, the command repeats all
of these steps, including those after --step.
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
