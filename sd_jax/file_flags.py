"""Flags of models that were trained elsewhere: what their files may not say."""

from collections.abc import Callable

from absl import flags

from sd_jax.weights.published import File

flags.disclaim_key_flags()  # They belong to the command that defines them: --help shows them.


def check_unused(is_file: bool, file: File) -> None:
    """ValueError for flags of a model's files where none is named."""
    if not is_file and any(value is not None for value in file):
        raise ValueError(
            "--prediction, --tokenizer, --norm_groups, --dtype, --config and --lora are for --model"
        )


def define() -> Callable[[], File]:
    """Defines the flags; the function that it returns reads them."""
    dtypes = ["bfloat16", "float32"]
    holders = [
        flags.DEFINE_enum("prediction", None, ["eps", "v"], "Of --model, if it says none."),
        flags.DEFINE_string("tokenizer", None, "Folder of CLIP's tokenizer, for --model=FILE."),
        flags.DEFINE_integer("norm_groups", None, "Of --model=FILE: 16 for MLPerf's."),
        flags.DEFINE_enum("dtype", None, dtypes, "Of --model; float32 on CPUs."),
        flags.DEFINE_string("config", None, "LDM's yaml of --model=FILE: its heads, if unknown."),
        flags.DEFINE_multi_string(
            "lora", None, "Of --model, a LoRA that joins it: FILE or FILE:STRENGTH; several."
        ),
    ]

    def read() -> File:
        return File(*(holder.value for holder in holders))

    return read
