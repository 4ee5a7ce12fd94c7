"""Commands for text encoders.

    python -m diffusion_jax.text convert FOLDER OUT

makes safetensors of a text encoder's pickles (pytorch_model*.bin) in FOLDER, without torch and
without running what they hold. The tokenizer and config are copied. Encoders here open the pickles
themselves: it is for other programs.
"""

import sys

from diffusion_jax import cli
from diffusion_jax.text import convert

_USAGE = "Usage: python -m diffusion_jax.text convert FOLDER OUT"


def main(argv: list[str]) -> None:
    """Runs a command."""
    cli.start(alone=True)
    match argv[1:]:
        case ["convert", folder, out]:
            with cli.bad_input():
                convert.convert(folder, out)
        case _:
            print(_USAGE, file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    cli.run(main)
