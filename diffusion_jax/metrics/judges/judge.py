"""A judge: two small networks that score generated images.

The networks (towers) are trained on the user's captioned images by train.py. As in CLIP (Radford et
al. 2021), they map an image and its caption to nearby unit vectors. The judge gives two scores.
fd_judge is the Frechet distance between the vectors of generated and real images. r1_judge is the
share of images whose vector is nearer to their own caption's vector than to that of any other
caption in the comparison. These scores are neither FID nor CLIP scores. Compare them only between
runs scored by the same judge, whose hash is on the card.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import traverse_util
from jaxtyping import Array, Bool, Float, UInt8, UInt32

from diffusion_jax import files
from diffusion_jax.files import untrusted
from diffusion_jax.metrics import extractors, preprocess
from diffusion_jax.metrics.extractors import Extractor
from diffusion_jax.text import hashed

WIDTH = 128
"""The dimension of image and text vectors."""
GRID = 16
"""The side in pixels of the feature map after ImageTower's first convolution.

It is the same for all image sizes, because the convolution's stride is the image side / GRID."""
_CARD, _WEIGHTS, _HELD_OUT, _CAPTIONS = ("judge.json", "judge.safetensors", "heldout.npz", "captions.json")
_SIGNS = 256  # The dimension of the embeddings of hashed words.
_ROWS = 100  # Images or texts in a batch.


class JudgeImageTower(nn.Module):
    """A small ResNet that maps an image to a vector. The image side S is a multiple of GRID."""

    widths: Sequence[int] = (32, 96, 192)

    @nn.compact
    def __call__(self, x: Float[Array, "B S S 3"]) -> Float[Array, "B D"]:
        """Map images in [-1, 1] to vectors [B, WIDTH], which are not normalised."""
        patch = x.shape[1] // GRID
        norm = lambda h: nn.silu(nn.GroupNorm(16)(h))
        kernel, stride = (2 * patch - 1, 2 * patch - 1), (patch, patch)
        h = nn.Conv(self.widths[0], kernel, stride)(x)
        for level, width in enumerate(self.widths):
            if level:
                h = nn.Conv(width, (3, 3), (2, 2))(norm(h))
            part = nn.Conv(width, (3, 3))(norm(h))
            h = h + nn.Conv(width, (3, 3))(norm(part))
        return nn.Dense(WIDTH)(norm(h).reshape(len(h), -1))


class JudgeTextTower(nn.Module):
    """A two-layer transformer that maps the hashed words of a caption to a vector."""

    width: int = 256
    depth: int = 2

    @nn.compact
    def __call__(self, ids: UInt32[Array, "B L"]) -> Float[Array, "B D"]:
        """Map hashed words, padded with 0, to vectors [B, WIDTH], which are not normalised."""
        mask = ids != 0
        h = nn.Dense(self.width)(hashed.embeddings(ids, mask, _SIGNS))  # [B, L, width]
        attend = nn.make_attention_mask(mask, mask)
        for _ in range(self.depth):
            h = h + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(h), mask=attend)
            wide = nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(h)))
            h = h + nn.Dense(self.width)(wide)
        count = jnp.maximum(mask.sum(1, keepdims=True), 1)
        mean = jnp.where(mask[..., None], h, 0).sum(1) / count
        return nn.Dense(WIDTH)(nn.LayerNorm()(mean))


IMAGE, TEXT = JudgeImageTower(), JudgeTextTower()


# The function that `reader` returns.
ReadPictures = Callable[
    [UInt8[np.ndarray, "B H W 3"], Sequence[str]], tuple[Float[np.ndarray, "B D"], Float[np.ndarray, "B 1"]]
]


class Pair(NamedTuple):
    """A set of real images in 0..255, with their captions."""

    images: UInt8[np.ndarray, "N S S 3"]
    captions: list[str]


class CaptionMatcher(NamedTuple):
    """A trained judge, with its captions, held-out images and card."""

    image: Extractor
    """The image tower. It takes images in 0..255."""
    text: Extractor
    """The text tower. It takes hashed words [B, L]."""
    max_tokens: int
    """The number of hashed words L to which captions are cut or padded."""
    candidates: list[str]
    """Captions that r1_judge compares with each image, in addition to the image's own caption."""
    reference: Pair
    """Held-out real images: the reference set of fd_judge."""
    test: Pair
    """More held-out real images. Their scores show what a perfect model would reach."""
    card: dict[str, Any]
    """The training data and settings, and the scores of real and damaged images."""


def of_params(
    params: Any, size: int, max_tokens: int, candidates: list[str], pairs: tuple[Pair, Pair], card: dict[str, Any]
) -> CaptionMatcher:
    """Return a judge. `params` holds the parameters of its towers, {"image": ..., "text": ...}.

    The judge resizes images to `size` x `size` pixels. `pairs` holds the reference images and the
    test images. The other arguments are fields of CaptionMatcher.
    """
    params = jax.tree.map(np.asarray, params)
    digest = _digest(params)

    def extractor(tower, part, how, prepare):
        def apply(params, x):
            with jax.default_matmul_precision("highest"):
                return unit(tower.apply({"params": params}, x))

        return Extractor("judge", WIDTH, how, digest, False, params[part], prepare, apply)

    prepare = lambda x: preprocess.bicubic_square(size)(x) * (2 / 255) - 1
    return CaptionMatcher(
        extractor(IMAGE, "image", f"bicubic {size}", prepare),
        extractor(TEXT, "text", "hashed words", lambda ids: ids),
        max_tokens,
        candidates,
        *pairs,
        card,
    )


def unit(x: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Scale each vector to length 1."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def save(judge: CaptionMatcher, out: str | os.PathLike[str]) -> None:
    """Write a judge to a folder. The card is written last, so a folder with a card is complete."""
    out = files.path(out)
    out.mkdir(parents=True, exist_ok=True)
    params = {"image": judge.image.params, "text": judge.text.params}
    flat = {"/".join(k): np.ascontiguousarray(v) for k, v in _flat(params)}
    files.write_whole(out / _WEIGHTS, safetensors.numpy.save(flat))
    with files.whole(out / _HELD_OUT) as temporary, open(temporary, "wb") as file:
        pairs = {"reference": judge.reference, "test": judge.test}
        images = {name: pair.images for name, pair in pairs.items()}
        texts = {f"{name}_captions": np.array(pair.captions) for name, pair in pairs.items()}
        arrays: dict[str, Any] = {**images, **texts}
        np.savez_compressed(file, **arrays)
    files.write_whole(out / _CAPTIONS, json.dumps(list(judge.candidates)))
    card = {**judge.card, "weights": judge.image.weights, "max_tokens": judge.max_tokens}
    files.write_whole(out / _CARD, json.dumps(card, indent=1) + "\n")


def load(folder: str | os.PathLike[str]) -> CaptionMatcher:
    """Load a judge from a folder written by `metrics train_judge`.

    Raises FileNotFoundError if the folder has no card. Raises ValueError if its files are damaged.
    """
    folder = files.local(folder)
    if not (folder / _CARD).is_file():
        raise FileNotFoundError(
            f"{folder} holds no judge, because it has no {_CARD}: train a judge with python -m "
            "diffusion_jax.metrics train_judge --data=SOURCE:PATH::TEXT --out=FOLDER"
        )
    try:
        card = untrusted.parse_json((folder / _CARD).read_bytes())
        flat = safetensors.numpy.load((folder / _WEIGHTS).read_bytes())
        params = traverse_util.unflatten_dict({tuple(k.split("/")): v for k, v in flat.items()})
        with open(folder / _HELD_OUT, "rb") as file:
            arrays = untrusted.read_archive(file)
        reference, test = (Pair(arrays[name], arrays[f"{name}_captions"].tolist()) for name in ("reference", "test"))
        candidates = untrusted.parse_json((folder / _CAPTIONS).read_bytes())
        judge = of_params(params, card["size"], card["max_tokens"], candidates, (reference, test), card)
    except Exception as error:  # Damaged files fail in many ways.
        raise ValueError(f"{folder} holds a damaged judge: {type(error).__name__}: {error}") from error
    if judge.image.weights != card["weights"]:
        raise ValueError(f"{folder / _WEIGHTS} is damaged: its hash differs from that in {_CARD}")
    return judge


def vectors(judge: CaptionMatcher, images: UInt8[np.ndarray, "B H W 3"]) -> Float[np.ndarray, "B D"]:
    """Return the unit vectors [B, WIDTH] that the judge's image tower computes from images."""
    return in_parts(extractors.on_host(judge.image), images)


def reader(judge: CaptionMatcher, prompts: Sequence[str] = ()) -> ReadPictures:
    """Return a function read(images, captions) that computes the judge's features.

    `read` returns the unit vectors [B, D] of the images, and an array [B, 1] that is 1 for each
    image that is nearer to its own caption than to any other candidate, and 0 otherwise. The
    candidates are judge.candidates and `prompts`; they must include `captions`. Captions with the
    same tokens count as one candidate.
    """
    of_text, of_image = extractors.on_host(judge.text), extractors.on_host(judge.image)
    tokens = lambda texts: hashed.tokenize(texts, judge.max_tokens)["text_ids"]
    different: dict[bytes, str] = {}
    captions = [*judge.candidates, *prompts]
    for caption, ids in zip(captions, tokens(captions), strict=True):
        different.setdefault(ids.tobytes(), caption)
    texts = in_parts(lambda part: of_text(tokens(part)), list(different.values()))
    place = {ids: i for i, ids in enumerate(different)}

    def read(images, image_captions):
        vectors = in_parts(of_image, images)
        rows = np.array([place[ids.tobytes()] for ids in tokens(image_captions)])
        return vectors, nearest(vectors, texts, rows)[:, None].astype(np.float64)

    return read


def nearest(
    images: Float[np.ndarray, "N D"], texts: Float[np.ndarray, "C D"], text_rows: np.ndarray
) -> Bool[np.ndarray, "N"]:
    """Return, for each image, whether its own text's vector is the nearest of all text vectors.

    All vectors have length 1. Row text_rows[i] of `texts` is the vector of image i's own text.
    """
    cosines = images @ texts.T
    rows = np.arange(len(images))
    matching = cosines[rows, text_rows].copy()
    cosines[rows, text_rows] = -np.inf
    return matching > cosines.max(1)


def seen_at(images: UInt8[np.ndarray, "N S S 3"], size: int) -> UInt8[np.ndarray, "N T T 3"]:
    """Shrink real images to `size` x `size` pixels, the size of the generated images.

    Images that are not larger than this are returned unchanged.
    """
    if size >= images.shape[1]:
        return images
    shrink = jax.jit(preprocess.bicubic_square(size))
    small = in_parts(lambda part: np.asarray(shrink(part)), images)
    return np.clip(np.rint(small), 0, 255).astype(np.uint8)


def real_pictures(
    judge: CaptionMatcher, size: int
) -> Callable[[Sequence[str]], tuple[UInt8[np.ndarray, "N S S 3"], list[str]]]:
    """Return a function show(prompts) that finds a held-out image for each prompt.

    `show` returns the images, and the captions of these images. For a prompt that is the caption of
    a held-out image, it returns such an image; for other prompts, an image with another caption.
    Images whose sides are longer than `size` pixels are shrunk to this size.
    """
    pairs = [judge.reference, judge.test]
    images = np.concatenate([pair.images for pair in pairs])
    captions = [caption for pair in pairs for caption in pair.captions]
    order = np.random.RandomState(0).permutation(len(captions)).tolist()
    of_caption = {captions[row]: row for row in order}

    def show(prompts):
        rows = [of_caption.get(text, other) for text, other in zip(prompts, itertools.cycle(order), strict=False)]
        return seen_at(images[rows], size), [captions[row] for row in rows]

    return show


def in_parts(run: Callable[[Any], np.ndarray], rows: Any) -> np.ndarray:
    """Call `run` on batches of at most 100 rows and concatenate the results."""
    return np.concatenate([run(rows[i : i + _ROWS]) for i in range(0, len(rows), _ROWS)])


def _flat(params: Any) -> Sequence[tuple[tuple[str, ...], np.ndarray]]:
    return sorted(traverse_util.flatten_dict(params).items())


def _digest(params: Any) -> str:
    whole = hashlib.sha256()
    for name, array in _flat(params):
        whole.update("/".join(name).encode() + np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()
