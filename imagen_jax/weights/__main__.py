"""Convert Imagen weights between NeMo's format and workdirs.

    python -m imagen_jax.weights convert --from=FILE --config=configs/base64_500m.py --to=WORKDIR

This command converts a NeMo checkpoint (.ckpt, .nemo, .safetensors or .npz) to a workdir that the
commands sample, evaluate and train accept. FILE is read without torch, and no code in it is
executed.

    python -m imagen_jax.weights export --from=WORKDIR --to=FILE

This command writes the weights of a workdir to a .safetensors or .npz file with NeMo's names. By
default, it exports the average with the largest decay at the newest checkpoint. --ema=0.9999
exports the average with this decay, --ema=raw the raw weights, and --checkpoint=N the weights of
step N. The factors of a LoRA run are merged into its base weights. If the base weights have moved,
give their new path with --unet_weights=PATH.
"""

import sys

from absl import flags

from diffusion_jax import cli
from diffusion_jax.train.checkpoint import NotSaved
from imagen_jax.weights import convert

_USAGE = """usage: python -m imagen_jax.weights convert --from=FILE --config=CONFIG --to=WORKDIR
       python -m imagen_jax.weights export --from=WORKDIR --to=FILE [--ema=raw] [--checkpoint=N]
           [--unet_weights=PATH]"""

_CONFIG = cli.define_config()
_FROM = flags.DEFINE_string("from", None, "Input: a NeMo checkpoint, or a workdir.")
_TO = flags.DEFINE_string("to", None, "Output: a workdir, or a file.")
_EMA = flags.DEFINE_string(
    "ema", "ema", 'EMA decay such as 0.9999, "ema" for the largest, or "raw" for the raw weights.'
)
_BASE = flags.DEFINE_string("unet_weights", None, "New path of a LoRA run's base weights, if they have moved.")
_STEP = flags.DEFINE_integer("checkpoint", None, "Saved step to export; default: the last.")


def main(argv: list[str]) -> None:
    """Run the command in `argv`: convert or export."""
    cli.start(alone=True)
    source, target = _FROM.value, _TO.value
    match argv[1:]:
        case ["convert"] if source and target and _CONFIG.value is not None:
            with cli.bad_input(NotSaved, usual=(), code=1), cli.bad_input():
                convert.to_workdir(source, _CONFIG.value, target)
        case ["export"] if source and target:
            with cli.bad_input():
                convert.from_workdir(source, target, _EMA.value, _STEP.value, _BASE.value)
        case _:
            print(_USAGE, file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    cli.run_with_arguments(main)
