"""Pack a run's weights into a small workdir that can be shared, sampled, evaluated or fine-tuned.

    python -m diffusion_jax.pack --workdir=runs/emoji32 --out=models/emoji32
    python -m imagen_jax.sample --workdir=models/emoji32 --prompt="a red apple" --out=pictures

The new workdir holds one average of a checkpoint (--ema, as in sample) as a .safetensors file. This
file stores 8-bit integers with a scale per channel, which takes a quarter of the space of float32.
The workdir also holds the config and the run's vocabulary.json, which lists the words of the
training captions, so that commands can warn of unknown words in prompts. If the run has no
vocabulary.json, name the captions: --captions=data/emoji/train.txt. The new workdir has no
optimizer state, metrics or pictures, and none of the weights that the config names by path
(vae.weights, text.weights, the weights that a LoRA adapts). To fine-tune the packed weights, start
a new run with --config.unet.weights set to this workdir.
"""

import pathlib

import jax
from absl import flags

from diffusion_jax import averages, cli, files, runs
from diffusion_jax.data import prompts
from diffusion_jax.files import checksums
from diffusion_jax.text import vocabulary
from diffusion_jax.weights import packed, restore

flags.disclaim_key_flags()  # The flags are defined below, only if this module runs as a command.


def pack(
    workdir: files.Path, which: str, step: int | None, out: files.Path, captions: str = ""
) -> pathlib.Path:
    """Create the workdir `out` with packed weights, and return the path of the packed file.

    Args:
        workdir: The workdir of the run.
        which: "raw", the name of an average such as "0.9999", or "ema" for the average
            with the largest decay.
        step: The step of the checkpoint; None for the newest undamaged one.
        out: The new workdir.
        captions: A file or data source with the training captions (see data.prompts.read), from
            which vocabulary.json is made; "" to copy the run's vocabulary.json.

    Raises:
        ValueError: The checkpoint has no such weights, `out` already holds checkpoints, or
            `captions` holds no captions.
        FileNotFoundError: There is no checkpoint.
    """
    runs.load(workdir)
    words = vocabulary.of(prompts.read(captions, every=True)) if captions else None
    root = restore.absolute(workdir) / runs.CHECKPOINTS
    items = lambda at: restore.items_of(root / str(at), which)
    step = restore.newest_sound(root, items) if step is None else step
    restore.check_exists(root, step)
    shapes = restore.shapes(root / str(step), items(step)[0])
    params = restore.load_params(root, shapes, which, step)
    with averages.weights_alone(workdir, out) as folder:
        if words:
            vocabulary.write(out, words)
        folder.mkdir(exist_ok=True)
        with files.whole(folder / str(step)) as place:
            packed.write(place / packed.FILE, jax.device_get(params))
            checksums.write(place)
        # Orbax needs this file in a bucket, also if the folder is copied there later.
        files.write_whole(folder / str(step) / checksums.COMMIT, "")
    return folder / str(step) / packed.FILE


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "The workdir of a run.", required=True)
    _OUT = flags.DEFINE_string("out", None, "The new workdir.", required=True)
    _EMA = flags.DEFINE_string(
        "ema", "ema", 'The weights to pack: an average such as 0.9999, "ema" for the largest '
        'average, or "raw".',
    )  # fmt: skip
    _CHECKPOINT = flags.DEFINE_integer(
        "checkpoint", None, "The step of a checkpoint; default: the newest undamaged one."
    )
    _CAPTIONS = flags.DEFINE_string(
        "captions", "", "The training captions: a text file with one per line, or a data source, "
        "written SOURCE:PATH::TEXT; default: the run's vocabulary.json.",
    )  # fmt: skip

    def main() -> None:
        """Pack the weights of a workdir."""
        cli.start(alone=True)
        with cli.bad_input():
            file = pack(_WORKDIR.value, _EMA.value, _CHECKPOINT.value, _OUT.value, _CAPTIONS.value)
            print(f"wrote {file}, {files.path(file).stat().st_size / 1e6:.1f} MB")

    cli.run(main)
