"""Imagen weights between NeMo and this project.

    python -m imagen_jax.weights convert --from=FILE --config=configs/base64_500m.py --to=WORKDIR

makes a workdir of a NeMo checkpoint (.ckpt, .nemo, .safetensors or .npz), which sample, evaluate
and train take like one of their own. FILE is opened without torch, and nothing in it is run.

    python -m imagen_jax.weights export --from=WORKDIR --to=FILE

writes a run's weights under NeMo's names as .safetensors or .npz; --ema=raw takes the weights
themselves in place of their average, --ema=0.9999 one of several, --checkpoint=N a step. What a
run of LoRA learned is merged into what it adapts, which may lie elsewhere now: --unet_weights=PATH.
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
_FROM = flags.DEFINE_string("from", None, "What is read: a checkpoint of NeMo's, or a workdir.")
_TO = flags.DEFINE_string("to", None, "What is written: a workdir, or a file.")
_EMA = flags.DEFINE_string("ema", "ema", 'A decay such as 0.9999, "ema" for the largest, or "raw".')
_BASE = flags.DEFINE_string("unet_weights", None, "Of a run of LoRA, where its base lies now.")
_STEP = flags.DEFINE_integer("checkpoint", None, "A step that was saved; default: the last.")


def main(argv: list[str]) -> None:
    """Runs one of the two commands."""
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
    cli.run(main)
