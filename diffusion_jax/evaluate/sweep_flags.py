"""The flags of the evaluation command: what is drawn and scored, and what with."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from absl import flags

flags.disclaim_key_flags()  # They belong to the command that defines them: --help shows them.


def define(guidance: Sequence[float]) -> dict[str, flags.FlagHolder]:
    """Defines all flags of the command but those of the models, by name."""
    scales = ",".join(f"{scale:g}" for scale in guidance)
    whole = functools.partial(flags.DEFINE_integer, lower_bound=1)
    several = flags.DEFINE_multi_string
    holders = [
        flags.DEFINE_list("guidance", [], f"Scales to score; default {scales}."),
        several(
            "checkpoint",
            [],
            "Steps that were saved, with commas; default: the last. Repeated "
            "for the next stage of a cascade.",
        ),
        several(
            "ema", [], 'Decays (0.9999), widths (0.05), "ema" (the largest, default) or "raw".'
        ),
        whole("size", None, "Brings pictures to this side before they are scored; default: none."),
        flags.DEFINE_string("out", None, "Takes the files in place of the first model's workdir."),
        flags.DEFINE_integer("seed", 0, "The seed of the first image.", lower_bound=0),
        whole("batch_size", None, "Images drawn at once."),
        flags.DEFINE_string("name", None, "The folder under evaluation; default: step_N."),
        flags.DEFINE_bool("rehearse", False, "Say what would be scored, and end."),
        flags.DEFINE_bool("save_images", False, "Also keep every image as a PNG."),
        flags.DEFINE_string(
            "prompts", None, "Prompts: .txt, .tsv, COCO's .json, SOURCE:PATH::TEXT."
        ),
        whole("num_prompts", None, "How many of them, drawn at random."),
        flags.DEFINE_string("reference", "", "Statistics of real images, .npz."),
        flags.DEFINE_string("inception", "", "Weights of Inception, for FID."),
        flags.DEFINE_string("clip", "", "Weights of CLIP, for the CLIP score."),
        flags.DEFINE_string(
            "clip_reference", "", "Features of real images that `metrics stats --clip` made: CMMD."
        ),
        flags.DEFINE_string("dinov2", "", "Weights of DINOv2 (ViT-L/14), for FD-DINOv2."),
        flags.DEFINE_string(
            "dinov2_reference", "", "Its statistics of real images: `metrics stats --dinov2`."
        ),
        flags.DEFINE_string("judge", "", "A folder of `metrics train_judge`: fd_judge, r1_judge."),
        flags.DEFINE_list(
            "metrics", [], "Scores to take, such as fid,kid; default: all that these allow."
        ),
        whole("num_seen", 1, "Digits: images of each prompt seen."),
        whole("num_heldout", 8, "Digits: images of each prompt never shown."),
    ]
    return {holder.name: holder for holder in holders}


def weights(emas: Sequence[str], checkpoints: Sequence[str]) -> list[list[tuple[str, int | None]]]:
    """The flags' axes, of the first model and of those after it for which a flag is repeated."""
    names = [text.split(",") for text in emas] or [["ema"]]
    steps = [[number(n, "checkpoint", int) for n in text.split(",")] for text in checkpoints]
    pairs = itertools.zip_longest(names, steps)
    return [list(itertools.product(ema or ["ema"], at or [None])) for ema, at in pairs]


def number(text: str, flag: str, kind: type) -> Any:
    """A flag's text as a number; ValueError if it is none."""
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"--{flag}={text} is no number") from error
