"""Convert Stable Diffusion weights between formats.

    python -m sd_jax.weights convert --from=PATH --to=PATH [--names=nemo] [--ema=raw]
        [--config=YAML] [--norm_groups=16] [--predicts=v] [--tokenizer=FOLDER] [--lora=FILE:0.7]

The command reads the UNet, the VAE and the text encoder from a checkpoint file of CompVis,
Stability, MLPerf or NeMo (.ckpt, .nemo, .safetensors, .npz), a diffusers directory (safetensors,
.bin or Flax), or a workdir. If --to ends in .safetensors or .npz, the command writes one file with
LDM's or NeMo's parameter names. Otherwise it writes a new diffusers directory, with Flax weights if
--names=flax, and copies the tokenizer from the directory --tokenizer, or by default from --from if
that is a diffusers directory. The command prints the parts that it has read, reads the written
checkpoint back, and compares the two bit by bit.

A checkpoint file may lack settings of its model. Set --norm_groups=16 for MLPerf's models, and
--predicts=v for models that predict v. The number of attention heads is known only for the sizes of
Stable Diffusion 1.x and 2.x. For other sizes, give LDM's yaml of the model
(--config=v1-inference.yaml). Files written by this project hold all settings.

--lora=FILE or --lora=FILE:STRENGTH merges a LoRA file of diffusers or kohya into the weights. The
factors of a LoRA run are merged into the base weights that the run adapts. If the base weights have
moved, give their new path with --unet_weights=PATH. With --names=diffusers or --names=kohya, only
the factors of a LoRA run are written, in that format. A run of text.learned_tokens writes the
embedding of its word, as diffusers does.
"""

import os
import sys

from absl import flags

from diffusion_jax import cli, files, runs
from diffusion_jax.config import picture_fields
from diffusion_jax.weights import finetune
from sd_jax.weights import checkpoints, lora_files, opened, trained

_USAGE = """usage: python -m sd_jax.weights convert --from=PATH --to=PATH [--names=ldm|nemo|
           flax|diffusers|kohya] [--ema=ema|raw] [--config=YAML] [--norm_groups=16]
           [--predicts=eps|v] [--tokenizer=FOLDER] [--lora=FILE:STRENGTH] [--unet_weights=PATH]"""

_FROM = flags.DEFINE_string("from", None, "Input: a file, a diffusers directory, or a workdir.")
_TO = flags.DEFINE_string("to", None, "Output: a file, or a new diffusers directory.")
_NAMES = flags.DEFINE_string(
    "names",
    "ldm",
    'Parameter names in an output file: "ldm" or "nemo"; "flax" to write a directory with Flax '
    'weights; "diffusers" or "kohya" to write only the factors of a LoRA run, or a learned word.',
)
_LORA = flags.DEFINE_multi_string("lora", [], "A LoRA to merge, as FILE or FILE:STRENGTH; may be repeated.")
_BASE = flags.DEFINE_string("unet_weights", None, "New path of a LoRA run's base weights, if they have moved.")
_EMA = flags.DEFINE_string("ema", "ema", 'Weights to read: "ema" for averages if the input has them, or "raw".')
_CONFIG = flags.DEFINE_string("config", None, "LDM's yaml of the model, if --from is a checkpoint file.")
_GROUPS = flags.DEFINE_integer(
    "norm_groups", None, "Number of groups of the norms in residual blocks; 16 for MLPerf's models."
)
_PREDICTS = flags.DEFINE_string(
    "predicts", None, 'The UNet\'s prediction, "eps" or "v", for a new diffusers directory.'
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "Diffusers directory to copy the tokenizer from; it must have the same version (1.x or 2.x)."
)


def main(argv: list[str]) -> None:
    """Run `convert`. For any other command in `argv`, print the usage and exit with code 2."""
    cli.start(alone=True)
    match argv[1:]:
        case ["convert"] if _FROM.value and _TO.value:
            with cli.bad_input():
                convert(_FROM.value, _TO.value)
        case _:
            print(_USAGE, file=sys.stderr)
            sys.exit(2)


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Convert the checkpoint `source` to `target` with the options in the flags, and verify it.

    Raises ValueError if the checkpoint that is read back from `target` differs from `source`.
    """
    target = files.path(target)
    workdir, _ = finetune.at_step(source)
    is_run = runs.is_workdir(workdir)
    if is_run and _NAMES.value in lora_files.DIALECTS:
        trained.write_lora(source, target, _NAMES.value, _EMA.value)
        print(f"{target}: only what the run trained, with the names of {_NAMES.value}")
        return
    if is_run:
        picture_fields.refuse(runs.load(workdir)["data"].get("fields", ()), workdir)
    checkpoint = opened.open_checkpoint(
        source, ema=_EMA.value, config=_CONFIG.value, norm_groups=_GROUPS.value, base=_BASE.value
    )
    checkpoint = lora_files.apply(_LORA.value, checkpoint)
    for line in checkpoint.report:
        print(line)
    if target.suffix in (".safetensors", ".npz"):
        checkpoints.save_file(checkpoint, target, _NAMES.value)
    else:
        tokenizer = _TOKENIZER.value or source
        is_flax = _NAMES.value == "flax"
        checkpoints.save_diffusers(checkpoint, target, _PREDICTS.value, tokenizer, flax=is_flax)
    written = checkpoints.load(target)
    if not checkpoints.equal(checkpoint, written):
        raise ValueError(
            f"{target} was not written correctly, because it differs from {source}: the UNet read "
            f"from {source} is {checkpoint.unet and checkpoint.unet.network}, and the UNet read "
            f"back is {written.unet and written.unet.network}"
        )
    print(f"{target}: written and read back, the same to the last bit")


if __name__ == "__main__":
    cli.run_with_arguments(main)
