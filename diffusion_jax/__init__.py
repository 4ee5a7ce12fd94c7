"""What Imagen and Stable Diffusion share: diffusion, training, drawing, data, text and metrics."""

import signal
import sys

__version__ = "0.2.0"
_PACKAGES = {"diffusion_jax", "imagen_jax", "sd_jax", "launch", "benchmarks"}

# The imports of a command take seconds. A KeyboardInterrupt during these would print a traceback,
# or be swallowed by a library, so Ctrl-C ends the process at once, until cli.interruptible. Python
# imports the package of `python -m PACKAGE.COMMAND` while sys.argv[0] is "-m". In any other
# program, such as a notebook, Ctrl-C does not change.
_names = {argument.removeprefix("-m").partition(".")[0] for argument in sys.orig_argv}
_is_handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # False after nohup.
if sys.argv[:1] == ["-m"] and _PACKAGES & _names and _is_handled:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
