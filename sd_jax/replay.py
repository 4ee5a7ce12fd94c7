"""Replay one step of a run of sd_jax.train or sd_jax.train_vae, and compare it with the run's log.

    python -m sd_jax.replay --workdir=runs/sd_quickstart --step=1234

The command continues from the nearest checkpoint before the step, or from the initial weights if
there is none, with the run's data and noise. On the same devices with the same versions, each
metric is equal to metrics.jsonl to the last bit. Otherwise the report names the metrics that
differ, and what has changed since: versions, devices, the commit or the config. If none of these
has changed, probably the data or the initial weights have. The exit code is 0 if all metrics are
equal or the log does not cover the step, 1 if some differ, and 2 if the step cannot be rebuilt, for
example because the data are gone or all checkpoints are damaged.

The report shows the loss and noise level of each example (not for autoencoders) and the gradient
norm of each module. It is written to WORKDIR/replay/step_N.json. step_N.png shows the pictures as
the network saw them, cropped and mirrored, with the largest losses first. For training on moments,
it shows the images that the VAE decodes from the means. Nothing else in the workdir changes, so a
run in progress can be replayed.

A line of metrics.jsonl is a mean over log_every steps. The command replays all steps of the line
that covers --step.
"""

from typing import Any

from diffusion_jax.train.replay import Decode
from diffusion_jax.train.replay_command import command
from sd_jax import vae


def decoder(s: Any) -> Decode | None:
    """Return a function from a batch of moments to images in [-1, 1], or None without a VAE.

    The VAE decodes the means of the moments.
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
