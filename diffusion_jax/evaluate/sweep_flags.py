"""Define the flags of the evaluation command: what to draw, and how to score it."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from absl import flags

from diffusion_jax.config import ranges
from diffusion_jax.config.ranges import WholeNumber
from diffusion_jax.config.settings import INCEPTION_MODES
from diffusion_jax.draw import seeds
from diffusion_jax.draw.options import Values

flags.disclaim_key_flags()  # --help lists them with the command that defines them.


def define(guidance: Sequence[float]) -> dict[str, flags.FlagHolder]:
    """Define the flags of the evaluation command and return them, keyed by name.

    `guidance` holds the default guidance scales, which --help shows. The caller defines the flags
    that name models.
    """
    default = ",".join(f"{value:g}" for value in guidance)
    count = functools.partial(flags.DEFINE_integer, lower_bound=1)
    holders = [
        flags.DEFINE_list("guidance", [], f"Guidance scales; default {default}."),
        flags.DEFINE_multi_string(
            "checkpoint",
            [],
            "Steps of checkpoints, separated by commas; the newest by default. "
            "Repeat the flag for the next stage of a cascade.",
        ),
        flags.DEFINE_multi_string(
            "ema",
            [],
            "Averages (EMA), separated by commas: decays (0.9999), widths (0.05), "
            '"ema" (the largest; default) or "raw" (none). Repeat the flag for the next stage.',
        ),
        count("size", None, "Side in pixels to which pictures are resized before they are scored."),
        flags.DEFINE_string("out", None, "A folder for the results; the first model's workdir by default."),
        flags.DEFINE_integer("seed", 0, "The seed of the first image.", lower_bound=0, upper_bound=seeds.MOST),
        count("batch_size", None, "Images drawn at once."),
        flags.DEFINE_string("name", None, "Name of the folder under evaluation/; step_N by default."),
        flags.DEFINE_bool("rehearse", False, "Print what would be scored, and exit."),
        flags.DEFINE_bool("save_images", False, "Also save every image as a PNG."),
        flags.DEFINE_string("prompts", None, "Prompts: a .txt, .tsv or COCO's .json file, or SOURCE:PATH::TEXT."),
        count("num_prompts", None, "Number of prompts to choose at random; all by default."),
        flags.DEFINE_string("reference", "", "Statistics of real images (.npz), for FID."),
        flags.DEFINE_string("inception", "", "Weights of Inception, for FID."),
        flags.DEFINE_enum(
            "inception_mode",
            "",
            INCEPTION_MODES,
            "Inception's preprocessing if --reference has no card, because another program wrote it.",
        ),
        flags.DEFINE_string("clip", "", "Weights of CLIP, for the CLIP score."),
        flags.DEFINE_string("clip_reference", "", "Features of real images, made by `metrics stats --clip`, for CMMD."),
        flags.DEFINE_string("dinov2", "", "Weights of DINOv2 (ViT-L/14), for FD-DINOv2."),
        flags.DEFINE_string(
            "dinov2_reference", "", "Statistics of real images, made by `metrics stats --dinov2`, for FD-DINOv2."
        ),
        flags.DEFINE_string("judge", "", "A judge from `metrics train_judge`, for fd_judge and r1_judge."),
        flags.DEFINE_string("pickscore", "", "Weights of PickScore, such as a Hub name."),
        flags.DEFINE_string("hpsv2", "", "A folder with OpenCLIP's ViT-H/14 and HPS_v2.1's .pt."),
        flags.DEFINE_string("aesthetic", "", "A folder with OpenAI's ViT-L/14 and LAION's aesthetic .pth."),
        flags.DEFINE_string(
            "copies",
            "",
            "The training pictures, as SOURCE:PATH::TEXT. For each drawn picture, find the nearest "
            "training picture. Write copies.csv and a sheet of the closest pictures.",
        ),
        flags.DEFINE_string(
            "unseen",
            "",
            "For --copies: real pictures that were not in training, as SOURCE:PATH::TEXT; by "
            "default the real pictures of the reference or the judge.",
        ),
        flags.DEFINE_list(
            "metrics",
            [],
            "Scores to compute, such as fid,kid. By default, all scores for which the files "
            "suffice, except slow or redundant ones.",
        ),
        count("num_seen", 1, "Quick start: images per prompt that was in training."),
        count("num_heldout", 8, "Quick start: images per prompt that was held out."),
    ]
    return {holder.name: holder for holder in holders}


def weights(emas: Sequence[str], checkpoints: Sequence[str]) -> list[list[Values]]:
    """Return a list of option values per stage, made from the values of --ema and --checkpoint.

    A stage's list combines each of the stage's averages with each of its checkpoints. By default,
    the average is "ema" and the checkpoint is None, the newest. The result has one list for each
    stage for which --ema or --checkpoint is given, and always one for the first stage. Raises
    ValueError if a checkpoint is not a whole number.
    """
    names = [text.split(",") for text in emas] or [["ema"]]
    steps = [numbers(text.split(","), "checkpoint", WholeNumber) for text in checkpoints]
    pairs = itertools.zip_longest(names, steps)
    return [
        [{"ema": e, "checkpoint": s} for e, s in itertools.product(ema or ["ema"], step or [None])]
        for ema, step in pairs
    ]


def numbers(texts: Sequence[str], flag: str, hint: Any) -> list[Any]:
    """Convert `texts`, the values of --`flag`, to the type `hint`.

    Raises ValueError if a value is invalid.
    """
    return [ranges.read_value(f"--{flag}", text, hint) for text in texts]
