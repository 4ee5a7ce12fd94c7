"""Print how much of a train step's time on a TPU each kind of work and each layer takes.

    python -m benchmarks.profile --config=configs/base64_500m.py --target=v5e:4x4

The times come from the TPU compiler's estimates of cycles: nothing runs on a TPU. The command needs
Linux and libtpu (pip install libtpu). By default, it compiles each distinct block of the model
once, and counts it once per call. --whole compiles the whole program, which takes most of an hour
for a big model on a few cores. Compiled programs are cached, so the same profile is fast the next
time. --config.X=Y changes the config.
"""

import os

from absl import flags

from benchmarks.profile import step
from diffusion_jax import cli
from diffusion_jax.logs import progress
from launch import accelerators
from launch.planner import compiling, tasks

_CONFIG = cli.define_config()
_TARGET = flags.DEFINE_string("target", None, "TPU slice, such as v5e:4x4.")
_WHOLE = flags.DEFINE_boolean("whole", False, "Compile the whole program instead of blocks.")


def main() -> None:
    """Compile the config's training step for the target, and print its profile."""
    with cli.bad_input():
        target = accelerators.parse(str(_TARGET.value))
        step.check(target.name)
        if missing := compiling.missing_for(target):
            raise ValueError(f"--target={_TARGET.value}: {missing}")
        compiling.prepare(target.devices, *(("tpu", target.name) if _WHOLE.value else ()))
        cli.start()
        model = tasks.read(_CONFIG.value.to_dict())
        profile = step.of(model, target, bool(_WHOLE.value))
    print(progress.block(step.table(profile)))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags.mark_flags_as_required(["config", "target"])
    cli.run(main)
