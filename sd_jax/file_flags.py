"""Command-line flags for models trained elsewhere: settings that the models' files may lack."""

from collections.abc import Callable

from absl import flags

from sd_jax.weights.published import File

flags.disclaim_key_flags()  # So --help lists the flags under the command that calls `define`.


def check_unused(is_file: bool, file: File) -> None:
    """Raise ValueError if a flag of this module is given without --model.

    Args:
        is_file: Whether --model is given.
        file: The values of the flags.
    """
    if not is_file and any(value is not None for value in file):
        raise ValueError(
            "--prediction, --tokenizer, --norm_groups, --dtype, --config and --lora need --model: "
            "leave them out for a --workdir"
        )


def define() -> Callable[[], File]:
    """Define flags such as --prediction and --lora; return a function that reads them as a File."""
    dtypes = ["bfloat16", "float32"]
    holders = [
        flags.DEFINE_enum(
            "prediction",
            None,
            ["eps", "v"],
            "What the UNet of --model predicts, if the model's files do not state it.",
        ),
        flags.DEFINE_string(
            "tokenizer", None, "Folder with CLIP's tokenizer, if --model is a single file."
        ),
        flags.DEFINE_integer(
            "norm_groups",
            None,
            "Number of groups in the norms of residual blocks, if --model is a single file; 16 for "
            "MLPerf's models.",
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
            "LDM's yaml config, if --model is a single file that does not state the number of "
            "attention heads.",
        ),
        flags.DEFINE_multi_string(
            "lora", None, "A LoRA to merge into --model, as FILE or FILE:STRENGTH; may be repeated."
        ),
    ]

    def read() -> File:
        return File(*(holder.value for holder in holders))

    return read
