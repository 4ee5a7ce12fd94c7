"""A run's weights as a small folder to pass on, to draw from, to score and to start from.

    python -m diffusion_jax.pack --workdir=runs/emoji32 --out=models/emoji32
    python -m imagen_jax.sample --workdir=models/emoji32 --prompt="a red apple" --out=pictures

What is packed is an average (--ema, as sample has it) of a checkpoint, in a .safetensors file: a
quarter of its size, in whole numbers of 8 bits with a scale for each channel. Optimizer, metrics
and pictures stay behind; what the config names by a path (vae.weights, text.weights, what a LoRA
adapts) is not in it. To train on from it, name it as --config.unet.weights of a new run.
"""

import pathlib

import jax
from absl import flags

from diffusion_jax import averages, cli, runs
from diffusion_jax.machine import checksums, files
from diffusion_jax.train import checkpoint
from diffusion_jax.weights import packed, restore

flags.disclaim_key_flags()  # They are defined below, where this is run as a command.


def pack(workdir: files.Path, which: str, step: int | None, out: files.Path) -> pathlib.Path:
    """Makes `out` a run whose only weights are packed; returns their file.

    `which` and `step` as for restore.load_params. ValueError if there are no such weights or `out`
    holds checkpoints; FileNotFoundError if there is no checkpoint.
    """
    runs.load(workdir)
    root = restore.absolute(workdir) / runs.CHECKPOINTS
    items = lambda at: restore.items_of(root / str(at), which)
    step = restore.newest_sound(root, items) if step is None else step
    restore.check_exists(root, step)
    shapes = restore.shapes(root / str(step), items(step)[0])
    params = restore.load_params(root, shapes, which, step)
    with averages.weights_alone(workdir, out) as folder:
        place = folder / str(step)
        packed.write(place / packed.FILE, jax.device_get(params))
        checksums.write(place)
        # What Orbax looks for in a bucket, where this folder may be copied.
        files.write_whole(place / checkpoint.COMMIT, "")
    return place / packed.FILE


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a run.", required=True)
    _OUT = flags.DEFINE_string("out", None, "The folder that is made.", required=True)
    _EMA = flags.DEFINE_string("ema", "ema", 'An average, "ema" for the largest, or "raw".')
    _CHECKPOINT = flags.DEFINE_integer("checkpoint", None, "A step that was saved; else the last.")

    def main(argv: list[str]) -> None:
        """Packs."""
        if len(argv) > 1:
            raise flags.Error(f"unknown arguments {argv[1:]}")
        cli.start(alone=True)
        with cli.bad_input():
            file = pack(_WORKDIR.value, _EMA.value, _CHECKPOINT.value, _OUT.value)
            print(f"wrote {file}, {files.path(file).stat().st_size / 1e6:.1f} MB")

    cli.run(main)
