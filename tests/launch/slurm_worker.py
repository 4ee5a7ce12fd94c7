"""A minimal run for tests of launchers: it saves at SIGTERM, crashes, or rejects its input.

Each start adds a line to WORKDIR/starts. It waits until WORKDIR/done exists.
"""

import os
import pathlib
import signal
import sys
import time

from absl import app, flags

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of this run.", required=True)
_ENDS = flags.DEFINE_integer("ends", 0, "The exit code with which it ends at once; 0: it waits.")


def main(argv):
    del argv
    folder = pathlib.Path(_WORKDIR.value)
    folder.mkdir(exist_ok=True)

    def stop(*_):
        time.sleep(1)  # Saving takes a second.
        sys.exit(143)

    signal.signal(signal.SIGTERM, stop)
    with (folder / "starts").open("a") as file:
        file.write(f"{os.environ.get('SLURM_PROCID')} {os.environ.get('TOLD')}\n")
    if _ENDS.value:
        sys.exit(_ENDS.value)
    while not (folder / "done").exists():
        time.sleep(0.1)


if __name__ == "__main__":
    app.run(main)
