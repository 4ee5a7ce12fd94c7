"""Pictures that a command draws over, and the masks of what is new in them: flags and files."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags
from PIL import Image

from diffusion_jax.machine import files, untrusted

IMAGE, MASK = "image", "mask"
flags.disclaim_key_flags()  # They belong to the command that defines them: --help shows them.


class Given(NamedTuple):
    """Opened pictures, and masks that are white where they are drawn anew: one, or one a text."""

    images: Sequence[Image.Image]
    masks: Sequence[Image.Image]

    def at(self, size: tuple[int, int], num_texts: int) -> dict[str, np.ndarray]:
        """IMAGE [N, H, W, 3] and, with masks, MASK [N, H, W], in this width and height.

        What a resized mask shows of white is new, so that known pixels are known as a whole.
        """

        def stacked(images: Sequence[Image.Image], how: Image.Resampling) -> np.ndarray:
            same = [np.asarray(i if i.size == size else i.resize(size, how)) for i in images]
            return np.stack(same * (num_texts // len(same)))

        batch = {IMAGE: stacked(self.images, Image.Resampling.BICUBIC)}
        if self.masks:
            white = [mask.point([0] * 128 + [255] * 128) for mask in self.masks]
            batch[MASK] = stacked(white, Image.Resampling.BOX) > 0
        return batch


def define() -> Callable[[int], Given | None]:
    """Defines --image and --mask; the function that it returns opens them for so many texts."""
    images = flags.DEFINE_multi_string("image", [], "A picture to draw over: one, or one a text.")
    masks = flags.DEFINE_multi_string(
        "mask", [], "White where --image is drawn anew, black where it stays: one, or one a text."
    )
    return lambda num_texts: read(images.value, masks.value, num_texts)


def read(images: Sequence[str], masks: Sequence[str], num_texts: int) -> Given | None:
    """The pictures in these files; None without any. ValueError if they do not fit."""
    opened = [untrusted.open_image(files.local(path)).convert("RGB") for path in images]
    white = [untrusted.open_image(files.local(path)).convert("L") for path in masks]
    for name, some in (("pictures", opened), ("masks", white)):
        if len(some) not in (0, 1, num_texts):
            raise ValueError(f"{len(some)} {name} and {num_texts} texts: give one, or one for each")
    if white and not opened:
        raise ValueError(f"--mask={masks[0]} says what of a picture is new: give --image too")
    for i, (path, mask) in enumerate(zip(masks, white, strict=True)):
        for image in opened if len(white) == 1 else [opened[min(i, len(opened) - 1)]]:
            if mask.size != image.size:
                raise ValueError(
                    f"--mask={path} is {mask.size[0]}x{mask.size[1]} and its picture "
                    f"{image.size[0]}x{image.size[1]}: they must be of one size"
                )
    return Given(opened, white) if opened else None
