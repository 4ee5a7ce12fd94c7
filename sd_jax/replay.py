"""Repeat one step of a run of sd_jax.train or sd_jax.train_vae, and compare it with the run's log.

    python -m sd_jax.replay --workdir=runs/sd_quickstart --step=1234

The command works like imagen_jax.replay, whose --help describes the report and the exit codes. For
autoencoders, the report has no loss and noise level of each example. For training on moments,
step_N.png shows the images that the VAE decodes from the means.
"""

from diffusion_jax.train.replay_command import command

if __name__ == "__main__":
    command("sd_jax")
