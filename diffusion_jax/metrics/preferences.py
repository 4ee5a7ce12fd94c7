"""Score single pictures as people would: PickScore, HPSv2 and LAION's aesthetic score.

All three are CLIPs: two were trained further on choices between pictures, the third is a linear
function of CLIP's image embedding that was trained on ratings. Scores are shown as in their papers.
"""

import hashlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from diffusion_jax.metrics import clip_score, clip_towers, extractors
from diffusion_jax.metrics.extractors import Extractor
from diffusion_jax.weights import pretrained, torch_files


class Preference(NamedTuple):
    """A model that scores single pictures."""

    network: Extractor
    """The CLIP, for the card."""
    score: Callable[[UInt8[np.ndarray, "B H W 3"], Sequence[str]], Float[np.ndarray, "B 1"]]
    """Maps images and their prompts to scores."""


def pickscore(weights: str | os.PathLike[str]) -> Preference:
    """Load PickScore (Kirstain et al. 2023): 100 times the cosine of image and prompt.

    `weights` is the folder or Hub name of a CLIP, such as yuvalkirstain/PickScore_v1. Raises the
    errors of `clip_towers.load`.
    """
    return _of_cosines(clip_towers.load(weights))


def hpsv2(weights: str | os.PathLike[str]) -> Preference:
    """Load HPSv2 (Wu et al. 2023): 100 times the cosine of image and prompt.

    `weights` is the folder of OpenCLIP's ViT-H/14, with its config and tokenizer, that also holds
    HPS_v2.1_compressed.pt or HPS_v2_compressed.pt, one of the two. Raises FileNotFoundError if this
    file is missing, ValueError if there are both, and the errors of `clip_towers.load`.
    """
    file = _file(weights, "HPS_v2*.pt")
    name = file.name.removesuffix("_compressed.pt")
    return _of_cosines(clip_towers.load(weights, name=name, preprocessing="pad", file=file))


def aesthetic(weights: str | os.PathLike[str]) -> Preference:
    """Load LAION's aesthetic score, version 2 (Schuhmann et al. 2022): about 1 to 10.

    `weights` is the folder of OpenAI's ViT-L/14 that also holds sac+logos+ava1-l14-linearMSE.pth.
    Its five linear layers have no activation between them, so they are one linear function of the
    normalised image embedding. Raises FileNotFoundError if the file is missing, ValueError if it
    does not fit this CLIP, and the errors of `clip_towers.load`.
    """
    file = _file(weights, "*linearMSE.pth")
    image = clip_towers.load(weights).image
    state = {name: np.float64(a) for name, a in torch_files.read_state_dict(file).items()}
    slope, offset = np.eye(image.width), np.zeros(image.width)
    try:
        for layer in sorted({int(name.split(".")[1]) for name in state}):
            weight, bias = (state[f"layers.{layer}.{part}"] for part in ("weight", "bias"))
            slope, offset = slope @ weight.T, offset @ weight.T + bias
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"{file} does not score the {image.width} numbers of the CLIP beside it ({error}): "
            "use LAION's sac+logos+ava1-l14-linearMSE.pth and OpenAI's ViT-L/14"
        ) from error
    run = extractors.on_host(image)
    joint = hashlib.sha256((image.weights + clip_towers.hash_of([file])).encode()).hexdigest()
    return Preference(
        image._replace(name=f"aesthetic_{image.name}", weights=joint),
        lambda images, prompts: clip_score.normalised(run(images)).astype(float) @ slope + offset,
    )


PREFERENCES: Mapping[str, Callable[[str], Preference]] = {
    "pickscore": pickscore,
    "hpsv2": hpsv2,
    "aesthetic": aesthetic,
}
"""Maps a score to the function that loads it from weights; `evaluation` has a field for each."""


def _of_cosines(clip: clip_towers.ClipExtractors) -> Preference:
    cosines = clip_towers.pair_cosines(clip)
    return Preference(clip.image, lambda images, prompts: 100 * cosines(images, prompts))


def _file(weights: str | os.PathLike[str], pattern: str) -> pathlib.Path:
    folder = pretrained.locate(weights)
    if len(found := sorted(folder.glob(pattern))) == 1:
        return found[0]
    kind = ValueError if found else FileNotFoundError
    raise kind(f"{folder} holds {len(found)} files {pattern}: put one of them beside the files of its CLIP")
