"""If this folder is on PYTHONPATH, Beam's engine takes 0.1 s longer for each file it writes.

So a command is still running when a test kills it, on any machine.
"""

import functools
import time

from diffusion_jax.data import engines


def slowed(write):
    @functools.wraps(write)  # Beam's workers look it up by name.
    def writing(*args):
        time.sleep(0.1)
        return write(*args)

    return writing


engines._counted = slowed(engines._counted)
