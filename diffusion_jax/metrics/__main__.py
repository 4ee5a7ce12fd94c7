"""Scores of image sets from the command line; `fid A B` does what pytorch-fid's command does.

    python -m diffusion_jax.metrics stats --images=DIR --out=FILE.npz

makes statistics of a folder of images or of webdataset tars ("data/{000..099}.tar").

    python -m diffusion_jax.metrics fid A B

prints the distance of two folders, tars or .npz files (A the reference); with --all also FID's
extrapolation to infinitely many images, KID, precision and recall and an interval, where the
features of both are at hand. --out=FILE.json writes the scores and their card.

    python -m diffusion_jax.metrics clip DIR --prompts=FILE --clip=FOLDER

prints the CLIP score of a folder's images in the order of their names, and a file's lines, and
with --reference=DIR the CMMD to another folder.

    python -m diffusion_jax.metrics compare A.json B.json ...

prints scores side by side, and refuses if their cards say that they cannot be compared.

    python -m diffusion_jax.metrics convert WEIGHTS.pth OUT.safetensors

makes safetensors of the FID Inception's public weights, without torch.
"""

import json
import pathlib
import sys

import jax
from absl import flags, logging

from diffusion_jax import cli
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.machine import files, sharding
from diffusion_jax.machine.progress import Meter
from diffusion_jax.metrics import (
    bootstrap,
    cards,
    clip_score,
    extractors,
    frechet,
    images,
    inception,
    mmd,
    neighbours,
    preprocess,
    stats_files,
    weights,
)

_IMAGES = flags.DEFINE_string("images", None, "stats: a folder, or tars.")
_OUT = flags.DEFINE_string("out", None, "Where the result goes.")
_WEIGHTS = flags.DEFINE_string(
    "weights", "", "The FID Inception's weights: a file; by default downloaded."
)
_MODE = flags.DEFINE_enum("mode", "pytorch", [*preprocess.INCEPTION], "Preprocessing.")
_DIMS = flags.DEFINE_enum("dims", "2048", [*inception.LEVELS], "The level of features.")
_SIZE = flags.DEFINE_integer("size", 0, "Resize images to this side first.", lower_bound=0)
_FIT = flags.DEFINE_enum("fit", "exact", images.FITS, "How they are brought to --size.")
_BATCH = flags.DEFINE_integer("batch_size", 50, "Images at once.", lower_bound=1)
_KEEP = flags.DEFINE_bool("keep_features", False, "stats: keep the features in the file too.")
_ALL = flags.DEFINE_bool("all", False, "fid: all scores, not the distance alone.")
_SUBSET = flags.DEFINE_integer("kid_subset", 1000, "Images in one of KID's subsets.", lower_bound=2)
_SEED = flags.DEFINE_integer("seed", 0, "Of KID's subsets and the interval.", lower_bound=0)
_PROMPTS = flags.DEFINE_string("prompts", None, "clip: a file; .txt has one a line.")
_CLIP = flags.DEFINE_string("clip", None, "clip: a folder or Hub name of a CLIP.")
_CLIP_MODE = flags.DEFINE_enum("clip_mode", "open_clip", ["open_clip", "squash"], "clip: resizing.")
_REFERENCE = flags.DEFINE_string("reference", None, "clip: images to take the CMMD to.")
_ALLOW = flags.DEFINE_list("allow", [], "compare: fields of the card that may differ.")
_FEW = 4  # Times the dimensions: below, a distance tells more of n than of the images.


def main(argv: list[str]) -> None:
    """Runs a command."""
    with cli.bad_input():
        match argv[1:]:
            case ["stats"] if _IMAGES.value and _OUT.value:
                cli.start()
                _stats(_IMAGES.value, _OUT.value)
            case ["fid", a, b]:
                cli.start()
                _fid(a, b)
            case ["clip", folder] if _PROMPTS.value and _CLIP.value:
                cli.start()
                _clip(folder)
            case ["compare", *paths] if len(paths) > 1:
                _print_table(
                    cards.table(
                        {path: cards.read_scored(path) for path in paths}, allow=_ALLOW.value
                    )
                )
            case ["convert", path, out]:
                found = weights.convert(path, out)
                print(
                    f"{out}: {found.digest}, {'the' if found.official else 'not the'} public file"
                )
            case _:
                print(__doc__, file=sys.stderr)
                sys.exit(2)


def _stats(path: str, out: str) -> None:
    if pathlib.Path(out).suffix != ".npz":
        raise ValueError(f"cannot write {out}: the name must end in .npz")
    stats = _of_images(path, _extractor(), keep=_KEEP.value)
    stats_files.write(out, stats)
    logging.info("wrote statistics of %d images to %s", stats.gaussian.n, out)


def _fid(a: str, b: str) -> None:
    extractor = _extractor()
    sides = [_side(path, extractor) for path in (a, b)]
    samples = [one.gaussian if one.features is None else one.features for one in sides]
    reference = frechet.reference(samples[0])
    card = _card_of(extractor, a, sides)
    scores = {cards.frechet_name(card): frechet.distance(samples[1], reference)}
    if _ALL.value:
        scores |= _more(card, sides, reference)
    _report(cards.Scored(scores, card))


def _more(
    card: cards.Card, sides: list[stats_files.Stats], reference: frechet.Reference
) -> dict[str, float]:
    """What needs features; ValueError that says how to keep them."""
    real, generated = (side.features for side in sides)
    if real is None or generated is None:
        raise ValueError(
            "--all needs the features of both sides: give folders, or files that `stats` wrote "
            "with --keep_features"
        )
    name, seed = cards.frechet_name(card), _SEED.value
    value = frechet.distance(generated, reference)
    low, high = bootstrap.interval(frechet.influence(generated, reference), value, seed=seed)
    infinity, residual = frechet.extrapolated(generated, reference, seed=seed)
    kid, deviation = mmd.kid(real, generated, size=_SUBSET.value, seed=seed)
    precision, recall = neighbours.precision_recall(real, generated)
    named = lambda kind: cards.score_name(kind, card)
    return {
        f"{name}_low": low,
        f"{name}_high": high,
        f"{name}_infinity": infinity,
        f"{name}_infinity_residual": residual,
        named("kid"): kid,
        f"{named('kid')}_deviation": deviation,
        named("precision"): precision,
        named("recall"): recall,
    }


def _clip(folder: str) -> None:
    prompts = prompt_files.read(_PROMPTS.value or "")
    model = clip_score.load(_CLIP.value or "", preprocessing=_CLIP_MODE.value)
    pictures = _of_images(folder, model.image, keep=True)
    if pictures.features is None or len(pictures.features) != len(prompts):
        n = pictures.gaussian.n
        raise ValueError(f"{n} usable images in {folder} and {len(prompts)} prompts are no pairs")
    texts = _run(model.text, extractors.InMemory(model.tokenize(prompts))).stream.features()
    card = (pictures.card or {}) | {"prompts": prompt_files.fingerprint(prompts)}
    name = f"clip_score_{model.image.name.removeprefix('clip_')}"
    scores = {name: clip_score.clip_score(pictures.features, texts)}
    if _REFERENCE.value:
        real = _of_images(_REFERENCE.value, model.image, keep=True).features
        assert real is not None
        both = map(clip_score.normalised, (real, pictures.features))
        scores[f"cmmd_{model.image.name}"] = mmd.cmmd(*both)
        card["reference"] = _REFERENCE.value
    _report(cards.Scored(scores, card))


def _extractor() -> extractors.Extractor:
    return extractors.inception_extractor(weights.load(_WEIGHTS.value), _MODE.value, _DIMS.value)


def _side(path: str, extractor: extractors.Extractor) -> stats_files.Stats:
    if not path.endswith(".npz"):
        return _of_images(path, extractor, keep=True)
    stats = stats_files.read(path)
    stats_files.check(path, stats, extractor)
    if stats.card is None:
        logging.warning("%s does not say what it is of: it is trusted to be %s's, preprocessing %s",
                        path, extractor.name, extractor.preprocessing)  # fmt: skip
    return stats


def _of_images(path: str, extractor: extractors.Extractor, *, keep: bool) -> stats_files.Stats:
    found = images.open_files(path)
    source = images.Decoded(found, _SIZE.value, _FIT.value)
    taken = _run(extractor, source, keep=keep)
    skipped = {**found.left_out(), **taken.skipped}
    if skipped:
        logging.warning("of %d images in %s were left out: %s", len(source), path, skipped)
    moments = taken.stream.gaussian()
    fit = f"{_FIT.value} {_SIZE.value}" if _SIZE.value else None
    card = cards.make_card(extractor, image_size=source.shape[:2], n=taken.stream.n, fit=fit)
    card |= {"images": path, "skipped": skipped}
    return stats_files.Stats(moments, taken.stream.features() if keep else None, card)


def _run(
    extractor: extractors.Extractor, source: extractors.Source, *, keep: bool = True
) -> extractors.Taken:
    meter = Meter("images", len(source))
    mesh, batch = sharding.make_mesh(), _BATCH.value
    return extractors.extract(
        extractor, source, mesh, batch_size=batch, keep=keep, progress=meter.reach
    )


def _card_of(
    extractor: extractors.Extractor, reference: str, sides: list[stats_files.Stats]
) -> cards.Card:
    """B's card, and which reference it was held against."""
    of_reference, of_b = (side.card for side in sides)
    n = sides[1].gaussian.n
    card = of_b or cards.make_card(extractor, image_size=(0, 0), n=n or 0) | {"image_size": None}
    known = cards.reference_name(reference, sides[0].gaussian.n)
    size = (of_reference or {}).get("image_size")
    if size is not None and card["image_size"] not in (None, size):
        logging.warning("the images are %s, and the reference's %s", card["image_size"], size)
    for side in sides:
        count = side.gaussian.n
        if count is not None and count < _FEW * extractor.width:
            logging.warning(
                "%d images of %d dimensions: the distance is mostly their number; compare it at "
                "equal numbers alone", count, extractor.width,
            )  # fmt: skip
            break
    return card | {"reference": known}


def _report(scored: cards.Scored) -> None:
    if jax.process_index():
        return
    for name, value in scored.scores.items():
        print(f"{name.upper() if name == 'fid' else name}:  {value:.6g}")
    if _OUT.value:
        files.write_whole(_OUT.value, json.dumps(scored._asdict(), indent=1) + "\n")


def _print_table(rows: list[dict]) -> None:
    cells = [[*rows[0]], *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    cli.run(main)
