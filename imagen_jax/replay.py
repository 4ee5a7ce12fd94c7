"""Replay one step of an Imagen training run, and compare it with the run's log.

    python -m imagen_jax.replay --workdir=runs/quickstart --step=1234

The command continues from the nearest checkpoint before the step, or from the initial weights if
there is none, with the run's data and noise. On the same devices with the same versions, each
metric equals its value in metrics.jsonl to the last bit. Otherwise the report names the metrics
that differ, and what has changed since training: versions, devices, the commit or the config. If
none of these has changed, the data or the initial weights probably have. The exit code is

- 0 if the metrics are equal, or if the step was not logged;
- 1 if a metric differs;
- 2 if the step cannot be rebuilt, because the data are missing or have another number of examples,
  or because the checkpoints are damaged.

The report shows the loss and noise level of each example and the gradient norm of each module. It
is written to WORKDIR/replay/step_N.json. step_N.png shows the pictures as the network received
them, cropped and mirrored, with the largest losses first. Nothing else in the workdir changes, so a
run in progress can be replayed.

A line of metrics.jsonl is a mean over log_every steps. The command replays all of these steps,
including those after --step.
"""

from diffusion_jax.train.replay_command import command

if __name__ == "__main__":
    command("imagen_jax")
