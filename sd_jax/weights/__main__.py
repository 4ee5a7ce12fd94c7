"""Convert Stable Diffusion weights between formats.

    python -m sd_jax.weights convert --from=PATH --to=PATH [--names=nemo] [--ema=raw]
        [--config=YAML] [--norm_groups=16] [--predicts=v] [--tokenizer=FOLDER] [--lora=FILE:0.7]

reads UNet, VAE and text encoder from a file of CompVis, Stability, MLPerf or NeMo (.ckpt, .nemo,
.safetensors, .npz), a diffusers directory, or a workdir. If --to ends in .safetensors or .npz, it
writes a file with LDM's or NeMo's names, otherwise a new diffusers directory. Such a directory gets
the tokenizer of --tokenizer, or of --from if that is a diffusers directory. The command prints the
parts it found, reads back what it wrote, and compares both bit by bit.

The arrays of a file do not show everything. Set --norm_groups=16 for MLPerf's models and
--predicts=v for models that predict v. The number of heads is known only for the sizes of 1.x and
2.x: for other models give LDM's yaml (--config=v1-inference.yaml). Files written by this project
contain all of this.

LoRA files of diffusers or kohya are merged into the weights with --lora=FILE or FILE:STRENGTH. The
factors of a LoRA run are merged into its base weights, whose new place --unet_weights=PATH gives if
they have moved. --names=diffusers or --names=kohya writes only the factors, in that format.
"""

import os
import sys

from absl import flags

from diffusion_jax import cli, runs
from diffusion_jax.machine import files
from sd_jax.weights import checkpoints, lora_files, trained

_USAGE = """usage: python -m sd_jax.weights convert --from=PATH --to=PATH [--names=ldm|nemo|
           diffusers|kohya] [--ema=ema|raw] [--config=YAML] [--norm_groups=16] [--predicts=eps|v]
           [--tokenizer=FOLDER] [--lora=FILE:STRENGTH] [--unet_weights=PATH]"""

_FROM = flags.DEFINE_string("from", None, "Input: a file, a diffusers directory, or a workdir.")
_TO = flags.DEFINE_string("to", None, "Output: a file, or a new diffusers directory.")
_NAMES = flags.DEFINE_string(
    "names",
    "ldm",
    'Names in an output file: "ldm" or "nemo"; "diffusers" or "kohya" for the factors of a LoRA '
    "run only.",
)
_LORA = flags.DEFINE_multi_string(
    "lora", [], "LoRA to merge, as FILE or FILE:STRENGTH; may be repeated."
)
_BASE = flags.DEFINE_string(
    "unet_weights", None, "New place of a LoRA run's base weights, if they have moved."
)
_EMA = flags.DEFINE_string(
    "ema", "ema", 'Weights to read: "ema" for averages if the input has them, or "raw".'
)
_CONFIG = flags.DEFINE_string("config", None, "LDM's yaml of the model, for a single file.")
_GROUPS = flags.DEFINE_integer(
    "norm_groups", None, "Groups of the norms in residual blocks; 16 for MLPerf's models."
)
_PREDICTS = flags.DEFINE_string("predicts", None, 'The UNet\'s prediction: "eps" or "v".')
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "Diffusers directory of the same version whose tokenizer to copy."
)


def main(argv: list[str]) -> None:
    """Run the command in `argv`, which is always `convert`."""
    cli.start(alone=True)
    match argv[1:]:
        case ["convert"] if _FROM.value and _TO.value:
            with cli.bad_input():
                convert(_FROM.value, _TO.value)
        case _:
            print(_USAGE, file=sys.stderr)
            sys.exit(2)


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Convert `source` to `target` as the flags say, and verify the result.

    Raises ValueError if the written checkpoint differs from the one that was read.
    """
    target = files.path(target)
    is_run = (files.path(source) / runs.CHECKPOINTS).is_dir()
    if is_run and _NAMES.value in lora_files.DIALECTS:
        trained.write_lora(source, target, _NAMES.value, _EMA.value)
        print(f"{target}: only the LoRA factors, with the names of {_NAMES.value}")
        return
    if is_run:
        checkpoint = trained.to_checkpoint(source, _EMA.value, _BASE.value)
    else:
        checkpoint = checkpoints.load(source, _EMA.value, _GROUPS.value, config=_CONFIG.value)
    checkpoint = lora_files.apply(_LORA.value, checkpoint)
    for line in checkpoint.report:
        print(line)
    if target.suffix in (".safetensors", ".npz"):
        checkpoints.save_file(checkpoint, target, _NAMES.value)
    else:
        predicts, tokenizer = _PREDICTS.value, _TOKENIZER.value or source
        scheduler = None if predicts else source
        checkpoints.save_diffusers(checkpoint, target, predicts, tokenizer, scheduler)
    written = checkpoints.load(target)
    if not checkpoints.equal(checkpoint, written):
        raise ValueError(
            f"{target} differs from {source}: the UNet read from {source} is "
            f"{checkpoint.unet and checkpoint.unet.network}, and the one read back is "
            f"{written.unet and written.unet.network}"
        )
    print(f"{target}: written and read back, the same to the last bit")


if __name__ == "__main__":
    cli.run(main)
