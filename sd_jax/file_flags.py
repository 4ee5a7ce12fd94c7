"""Command-line flags for models that were trained elsewhere: facts that their files may lack."""

from collections.abc import Callable

from absl import flags

from sd_jax.weights.published import File

flags.disclaim_key_flags()  # --help lists the flags under the command that calls `define`.


def check_unused(is_file: bool, file: File) -> None:
    """Raise ValueError if a flag of this module is given without --model.

    Args:
        is_file: Whether --model is given.
        file: The values of the flags.
    """
    if not is_file and any(value is not None for value in file):
        raise ValueError(
            "--prediction, --tokenizer, --norm_groups, --dtype, --config and --lora need --model"
        )


def define() -> Callable[[], File]:
    """Define flags such as --prediction and --lora; return a function that reads them as a File."""
    dtypes = ["bfloat16", "float32"]
    holders = [
        flags.DEFINE_enum(
            "prediction",
            None,
            ["eps", "v"],
            "What the UNet of --model predicts, if its files do not say.",
        ),
        flags.DEFINE_string("tokenizer", None, "Folder of CLIP's tokenizer, for --model=FILE."),
        flags.DEFINE_integer(
            "norm_groups", None, "Number of groups in the norms of --model=FILE; 16 for MLPerf."
        ),
        flags.DEFINE_enum(
            "dtype",
            None,
            dtypes,
            "Dtype in which --model computes; default: bfloat16, or float32 on CPUs.",
        ),
        flags.DEFINE_string(
            "config",
            None,
            "LDM's yaml config of --model=FILE; states the number of heads if the file does not.",
        ),
        flags.DEFINE_multi_string(
            "lora", None, "A LoRA to merge into --model, FILE or FILE:STRENGTH; may be repeated."
        ),
    ]

    def read() -> File:
        return File(*(holder.value for holder in holders))

    return read
