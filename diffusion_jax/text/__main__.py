"""Commands for text encoders.

    python -m diffusion_jax.text convert FOLDER OUT

converts a text encoder's pickles (*.bin) in FOLDER to safetensors files in OUT, without torch and
without executing any code in the pickles. The tokenizer and config are copied. The encoders of this
project read pickles directly, so only other programs need the conversion.
"""

import sys

from diffusion_jax import cli
from diffusion_jax.text import convert

_USAGE = "Usage: python -m diffusion_jax.text convert FOLDER OUT"


def main(argv: list[str]) -> None:
    """Run `convert`. For any other command in `argv`, print the usage and exit with code 2."""
    cli.start(alone=True)
    match argv[1:]:
        case ["convert", folder, out]:
            with cli.bad_input():
                convert.convert(folder, out)
        case _:
            print(_USAGE, file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    cli.run_with_arguments(main)
