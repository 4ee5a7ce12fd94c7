"""Commands for text encoders.

    python -m diffusion_jax.text verify CASE.npz

compares with outputs saved from a reference implementation (see verify.py) and prints one line of
JSON: the error of each output relative to its largest value, the largest of these, and the number
of parameters; null where ours is not finite. The exit code is 0 within 1e-5, 1 beyond, 2 if the
case cannot be read; the line is then {"error": ...}.

    python -m diffusion_jax.text convert FOLDER OUT

makes safetensors of the pickles (pytorch_model*.bin) in FOLDER, without torch and without running
what they hold. The tokenizer and config are copied.
"""

import sys

from absl import app

from diffusion_jax import cli, verification
from diffusion_jax.text import convert, verify

_USAGE = "Usage: python -m diffusion_jax.text verify CASE.npz | convert FOLDER OUT"


def main(argv: list[str]) -> None:
    """Runs a command."""
    cli.start(alone=True)
    match argv[1:]:
        case ["verify", path]:
            verification.command(path, verify.verify, verify.TOLERANCE)
        case ["convert", folder, out]:
            with cli.bad_input():
                convert.convert(folder, out)
        case _:
            print(_USAGE, file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    app.run(main)
