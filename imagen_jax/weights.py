"""Imagen weights between NeMo and this project, and the proof that they give the same numbers.

    python -m imagen_jax.weights convert --from=FILE --config=configs/base64_500m.py --to=WORKDIR

makes a workdir of a NeMo checkpoint (.ckpt, .nemo, .safetensors or .npz), which sample, evaluate
and train take like one of their own. FILE is opened without torch, and nothing in it is run.

    python -m imagen_jax.weights export --from=WORKDIR --to=FILE

writes a run's weights under NeMo's names as .safetensors or .npz; --ema=raw takes the weights
themselves in place of their average, --ema=0.9999 one of several, --checkpoint=N a step.

    python -m imagen_jax.weights verify CASE.npz

reads a case saved from the reference implementation (imagen_jax/verify.py tells the format),
builds the model that its config describes, and prints one line of JSON: the largest errors of the
output, of the output at guidance 3 and of the gradient (null where the case has none, or where
ours is not finite), and the number of parameters. The exit code is 0 within 3e-5 (gradient 1e-4),
1 beyond, 2 if the case cannot be read; the line is then {"error": ...}.
"""

import sys

from absl import flags
from ml_collections import config_flags

from diffusion_jax import cli, verification
from imagen_jax import convert
from imagen_jax.verify import TOLERANCE, verify

_USAGE = """usage: python -m imagen_jax.weights convert --from=FILE --config=CONFIG --to=WORKDIR
       python -m imagen_jax.weights export --from=WORKDIR --to=FILE [--ema=raw] [--checkpoint=N]
       python -m imagen_jax.weights verify CASE.npz"""

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file in configs/.", lock_config=True)
_FROM = flags.DEFINE_string("from", None, "What is read: a checkpoint of NeMo's, or a workdir.")
_TO = flags.DEFINE_string("to", None, "What is written: a workdir, or a file.")
_EMA = flags.DEFINE_string("ema", "ema", 'A decay such as 0.9999, "ema" for the largest, or "raw".')
_STEP = flags.DEFINE_integer("checkpoint", None, "A step that was saved; default: the last.")


def main(argv: list[str]) -> None:
    """Runs one of the three commands."""
    cli.start(alone=True)
    source, target = _FROM.value, _TO.value
    match argv[1:]:
        case ["verify", path]:
            verification.command(path, verify, TOLERANCE)
        case ["convert"] if source and target and _CONFIG.value is not None:
            with cli.bad_input():
                convert.to_workdir(source, _CONFIG.value, target)
        case ["export"] if source and target:
            with cli.bad_input():
                convert.from_workdir(source, target, _EMA.value, _STEP.value)
        case _:
            print(_USAGE, file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    cli.run(main)
