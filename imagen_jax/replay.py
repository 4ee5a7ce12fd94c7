"""Repeat one training step of an Imagen run, and compare its metrics with the run's log.

    python -m imagen_jax.replay --workdir=runs/quickstart --step=1234

The command trains up to this step from the last checkpoint before it, or from the initial weights
if there is no such checkpoint, with the same data and noise as the run. On the same devices with
the same versions, each metric equals its value in metrics.jsonl to the last bit. If metrics differ,
the report names them, and what has changed since training: versions, devices, the commit or the
config. If none of these has changed, the data or the initial weights probably have. The exit code
is

- 0 if the metrics are equal, or if the step was not logged;
- 1 if a metric differs;
- 2 if the step cannot be rebuilt, because the data are missing or have another number of examples,
  or because the checkpoints are damaged.

The report shows the loss and noise level of each example and the gradient norm of each module. It
is written to WORKDIR/replay/step_N.json. step_N.png shows the pictures as the network received
them, cropped and mirrored, with the largest losses first. Nothing else in the workdir changes, so a
run in progress can be replayed.

A line of metrics.jsonl is a mean over log_every steps. To compare with it, the command repeats all
of these steps, including those after --step.
"""

from diffusion_jax.train.replay_command import command

if __name__ == "__main__":
    command("imagen_jax")
