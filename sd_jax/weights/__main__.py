"""Stable Diffusion weights between their formats.

    python -m sd_jax.weights convert --from=PATH --to=PATH [--names=nemo] [--ema=raw]
        [--config=YAML] [--norm_groups=16] [--predicts=v] [--tokenizer=FOLDER] [--lora=FILE:0.7]

takes UNet, VAE and text encoder out of a file of CompVis, Stability, MLPerf or NeMo (.ckpt, .nemo,
.safetensors, .npz), a diffusers directory, or the workdir of a run. --to is a file (.safetensors,
.npz; LDM's names, or NeMo's), or otherwise a new diffusers directory, with the tokenizer of
--tokenizer, or of --from if that is a diffusers directory too. It prints what it mapped, opens what
it wrote, and compares the two to the last bit. Files of others do not show MLPerf's 16 groups, nor
that a model predicts v: say so. Nor do they show heads, which are known of the sizes of 1.x and 2.x
alone: for other models give LDM's yaml (--config=v1-inference.yaml). Files written here say all of
it themselves.

LoRA: --lora=FILE or FILE:STRENGTH, of diffusers or kohya, is merged into what is written. Of a run
of LoRA what it learned is merged into the weights that it adapts, and --names=diffusers or
--names=kohya writes its factors alone, in a file of that kind. --unet_weights=PATH says where the
former lie now, if not in the run's config.
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

_FROM = flags.DEFINE_string("from", None, "What is read: a file, a diffusers directory, a run.")
_TO = flags.DEFINE_string("to", None, "What is written: a file, or a new diffusers directory.")
_NAMES = flags.DEFINE_string(
    "names", "ldm", 'In a file: "ldm" or "nemo"; "diffusers" or "kohya" of the factors of a LoRA.'
)
_LORA = flags.DEFINE_multi_string("lora", [], "A LoRA to merge: FILE or FILE:STRENGTH; several.")
_BASE = flags.DEFINE_string("unet_weights", None, "Of a run of LoRA, where its base lies now.")
_EMA = flags.DEFINE_string("ema", "ema", '"ema": averages where the file has them; "raw": never.')
_CONFIG = flags.DEFINE_string("config", None, "LDM's yaml of the model, for a single file.")
_GROUPS = flags.DEFINE_integer("norm_groups", None, "Of residual blocks; MLPerf's have 16.")
_PREDICTS = flags.DEFINE_string("predicts", None, 'What the UNet predicts: "eps" or "v".')
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "A diffusers directory of that version, to copy its tokenizer."
)


def main(argv: list[str]) -> None:
    """Runs a command."""
    cli.start(alone=True)
    match argv[1:]:
        case ["convert"] if _FROM.value and _TO.value:
            with cli.bad_input():
                convert(_FROM.value, _TO.value)
        case _:
            print(_USAGE, file=sys.stderr)
            sys.exit(2)


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Converts as the flags say, and opens the result; ValueError if it is not the same."""
    target = files.path(target)
    is_run = (files.path(source) / runs.CHECKPOINTS).is_dir()
    if is_run and _NAMES.value in lora_files.DIALECTS:
        trained.write_lora(source, target, _NAMES.value, _EMA.value)
        print(f"{target}: the factors alone, in the names of {_NAMES.value}")
        return
    opened = lambda: checkpoints.load(source, _EMA.value, _GROUPS.value, config=_CONFIG.value)
    read = trained.to_checkpoint(source, _EMA.value, _BASE.value) if is_run else opened()
    read = lora_files.apply(_LORA.value, read)
    for line in read.report:
        print(line)
    if target.suffix in (".safetensors", ".npz"):
        checkpoints.save_file(read, target, _NAMES.value)
    else:
        predicts, tokenizer = _PREDICTS.value, _TOKENIZER.value or source
        scheduler = None if predicts else source
        checkpoints.save_diffusers(read, target, predicts, tokenizer, scheduler)
    written = checkpoints.load(target)
    if not checkpoints.equal(read, written):
        raise ValueError(
            f"{target} does not hold what was read from {source}: the fields are "
            f"{written.unet and written.unet.network} where they were "
            f"{read.unet and read.unet.network}"
        )
    print(f"{target}: written and read again, the same to the last bit")


if __name__ == "__main__":
    cli.run(main)
