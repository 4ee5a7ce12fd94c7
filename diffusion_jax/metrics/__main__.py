"""Score image sets from the command line. `fid A B` is equivalent to pytorch-fid's command.

    python -m diffusion_jax.metrics stats --images=DIR --out=FILE.npz

computes statistics of a folder of images or of webdataset tars ("data/{000..099}.tar"). For CMMD,
use CLIP's features: --clip=FOLDER --clip_mode=squash --keep_features; for FD-DINOv2, use
--dinov2=FOLDER. After an interruption, the same command continues. Several processes share the work
with --workers=N and --worker=0 ... N-1, or Apache Beam distributes it with --engine=beam (see
docs/data.md). --dry_run prints the remaining work.

    python -m diffusion_jax.metrics fid A B

prints the Frechet distance between the features of two folders, tars or .npz files. A is the
reference set. The features are Inception's, or DINOv2's with --dinov2=FOLDER. A file that another
program wrote has no card and needs --mode. --spatial adds sFID. --all adds FID extrapolated to
infinitely many images, KID, precision, recall, density, coverage and confidence intervals. --all
needs the features of both sets. For folders, it also adds sFID and the Inception Score of B.
--out=FILE.json writes the scores and their card.

    python -m diffusion_jax.metrics clip DIR --prompts=FILE --clip=FOLDER

prints the CLIP score of a folder's images and a file's prompts. The images, sorted by name (numbers
as numbers: 2.png before 10.png), are paired with the prompts in order. --reference=DIR also prints
the CMMD between these images and those of another folder.

    python -m diffusion_jax.metrics compare A.json B.json ...

prints scores side by side, or an error if their cards show that they are not comparable.

    python -m diffusion_jax.metrics convert WEIGHTS.pth OUT.safetensors

converts the public weights of the FID Inception to safetensors, without torch.

    python -m diffusion_jax.metrics train_judge --data=SOURCE:PATH::TEXT --out=FOLDER

trains a judge for `evaluate --judge=FOLDER` on a captioned data set, such as
webdataset:data/photos, and prints its scores on real and on damaged pictures.
"""

import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags, logging

from diffusion_jax import cli, files
from diffusion_jax.data import engines
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.devices import sharding
from diffusion_jax.logs.progress import Meter
from diffusion_jax.metrics import (
    cards,
    clip_score,
    clip_towers,
    dinov2,
    extractors,
    features,
    images,
    inception,
    preprocess,
    sharded_stats,
    stats_files,
    table,
    weights,
)
from diffusion_jax.metrics.judges import judge
from diffusion_jax.metrics.judges import train as train_judge
from diffusion_jax.metrics.table import METRICS

_IMAGES = flags.DEFINE_string("images", None, "stats: the images, as a folder, tars or SOURCE:PATH::TEXT.")
_OUT = flags.DEFINE_string("out", None, "Output file, or folder for train_judge.")
_WEIGHTS = flags.DEFINE_string("weights", "", "File with the FID Inception's weights; downloaded by default.")
_MODE = flags.DEFINE_enum(
    "mode",
    None,
    [*preprocess.INCEPTION],
    "Preprocessing for Inception; pytorch by default. fid "
    "needs this flag for a statistics file that another program wrote.",
)
_DIMS = flags.DEFINE_enum("dims", "2048", [*inception.LEVELS], "Level of Inception's features; 2048 is FID's.")
_SIZE = flags.DEFINE_integer(
    "size", 0, "Image side in pixels; 0 does not resize. train_judge: 64 by default.", lower_bound=0
)
_FIT = flags.DEFINE_enum(
    "fit",
    "exact",
    images.FITS,
    "How to resize images to --size: squash ignores the aspect ratio, "
    "crop cuts the centre out, and exact does not resize.",
)
_BATCH = flags.DEFINE_integer("batch_size", 50, "Images per batch.", lower_bound=1)
_SPATIAL = flags.DEFINE_bool("spatial", False, "stats: also save mu_s and sigma_s. fid: print sFID.")
_KEEP = flags.DEFINE_bool("keep_features", False, "stats: also save the features.")
_ALL = flags.DEFINE_bool("all", False, "fid: print all scores. fid and clip: add intervals.")
_SUBSET = flags.DEFINE_integer("kid_subset", 1000, "Images per subset of KID.", lower_bound=2)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of KID's subsets, of the intervals and of train_judge.", lower_bound=0)
_PROMPTS = flags.DEFINE_string("prompts", None, "clip: a .txt file with one prompt per line, a table, or FILE::COLUMN.")
_CLIP = flags.DEFINE_string("clip", None, "clip, stats: folder or Hub name of a CLIP.")
_CLIP_MODE = flags.DEFINE_enum("clip_mode", "open_clip", [*clip_towers.PREPROCESSING], "Preprocessing for CLIP.")
_DINOV2 = flags.DEFINE_string("dinov2", None, "fid, stats: DINOv2's weights, for FD-DINOv2.")
_REFERENCE = flags.DEFINE_string("reference", None, "clip: a folder of real images, for CMMD.")
_ALLOW = flags.DEFINE_list("allow", [], "compare: card fields that may differ.")
_DATA = flags.DEFINE_string("data", None, "train_judge: captioned data set, SOURCE:PATH::TEXT.")
_SEEN = flags.DEFINE_integer(
    "seen", 150_000, "train_judge: number of training pictures, with repetition.", lower_bound=1
)
_OTHER = flags.DEFINE_string(
    "other", "", "train_judge: a data set with the same captions in another style, for one more test."
)
_SHARD = flags.DEFINE_integer(
    "shard_images",
    sharded_stats.StatsOptions().shard,
    "stats: images per shard. An interruption loses at most the work on one shard.",
    lower_bound=1,
)
engines.define_flags()
_SHARED = ("shard_images", "worker", "workers", "engine", "beam_options", "dry_run")
_ONLY_FOR: Mapping[str, Collection[str]] = {
    "stats": ("images", "out", "weights", "clip", "dinov2", "spatial", *_SHARED),
    "fid": ("out", "weights", "dinov2", "spatial"),
    "clip": ("out", "prompts", "clip", "reference"),
    "train_judge": ("data", "out", "other"),
}
"""Maps each command to the flags that it reads, without the flags that all commands accept."""
_FEW = 4  # With fewer images per dimension, a distance mostly depends on the number of images.


def main(argv: list[str]) -> None:
    """Run the command named on the command line."""
    with cli.bad_input():
        for name in dict.fromkeys(itertools.chain(*_ONLY_FOR.values())):
            flag = flags.FLAGS[name]
            if argv[1:] and flag.value != flag.default and name not in _ONLY_FOR.get(argv[1], ()):
                raise ValueError(f"`{argv[1]}` does not read --{name}: remove the flag")
        if _SPATIAL.value and (_CLIP.value or _DINOV2.value or _DIMS.value != "2048"):
            raise ValueError(
                "--spatial works only with Inception's default features: remove --spatial, or "
                "remove --clip, --dinov2 and --dims"
            )
        match argv[1:]:
            case ["stats"] if _IMAGES.value and _OUT.value:
                cli.start()
                _stats(_IMAGES.value, _OUT.value)
            case ["fid", a, b]:
                cli.start()
                _fid(a, b)
            case ["clip", folder] if _PROMPTS.value and _CLIP.value:
                cli.start()
                _score_clip(folder)
            case ["compare", *paths] if len(paths) > 1:
                _print_table(cards.table({path: cards.read_scored(path) for path in paths}, allow=_ALLOW.value))
            case ["convert", path, out]:
                converted = weights.convert(path, out)
                origin = "the" if converted.official else "not the"
                print(f"{out}: {origin} weights of the public file; hash {converted.digest}")
            case ["train_judge"] if _DATA.value and _OUT.value:
                cli.start()
                trained = train_judge.train(
                    _DATA.value, size=_SIZE.value or 64, seen=_SEEN.value, seed=_SEED.value, other=_OTHER.value
                )
                judge.save(trained, _OUT.value)
                _print_table([{"pictures": name, **row} for name, row in trained.card["scores"].items()])
            case _:
                print(__doc__, file=sys.stderr)
                sys.exit(2)


def _stats(path: str, out: str) -> None:
    if pathlib.Path(out).suffix != ".npz":
        raise ValueError(f"cannot write {out}: the name must end in .npz")
    if not flags.FLAGS.dry_run:
        files.check_writable(files.path(out).parent, "--out")
    network = _network("+spatial" if _SPATIAL.value else "")
    if _CLIP.value:
        network = functools.partial(clip_towers.load_image, _CLIP.value, _CLIP_MODE.value)
    engine = engines.of(flags.FLAGS)
    work = sharded_stats.StatsOptions(_SHARD.value, _BATCH.value, _KEEP.value)
    opened = sharded_stats.open_images(path, network, _SIZE.value, _FIT.value)
    if flags.FLAGS.dry_run:
        shards = sharded_stats.shards_of(opened, out, work)
        finished = sum(shards.path(shard).exists() for shard in shards.numbers)
        print(f"{len(opened)} images in {len(shards.numbers)} shards; finished shards: {finished}")
        return
    with cli.bad_input(usual=(OSError,), code=1):
        sharded_stats.take(opened, out, work, engine)
    logging.info("wrote the statistics of %s to %s", path, out)


def _fid(a: str, b: str) -> None:
    kind = "dinov2" if _DINOV2.value else "inception"
    wide = kind == "inception" and _DIMS.value == "2048" and (_SPATIAL.value or _ALL.value)
    extractor = _network("+spatial+unbiased" if wide else "")()
    real, generated = (_side(path, extractor) for path in (a, b))
    if _ALL.value and (real.features is None or generated.features is None):
        raise ValueError(
            "--all needs the features of both sets: use folders, or files written by `stats` with --keep_features"
        )
    main = generated.gaussian if generated.features is None else generated.features
    rows = {kind: main, "inception_spatial": generated.spatial, **generated.more}
    names = _metrics_of(kind)
    names = names if _ALL.value else names[:1]  # The distance comes first.
    if real.spatial is not None and generated.spatial is not None:
        names += _metrics_of("inception_spatial")
    elif _SPATIAL.value:
        raise ValueError("--spatial needs mu_s and sigma_s in both files: write them with `stats --spatial`")
    names += _metrics_of("inception_unbiased") if _ALL.value and generated.more else []
    counts = [side.gaussian.n for side in (real, generated)]
    empty = cards.make_card(extractor, image_size=(0, 0), n=counts[1] or 0) | {"image_size": None}
    card = generated.card or empty
    size = (real.card or {}).get("image_size")
    if size is not None and card["image_size"] not in (None, size):
        sizes = card["image_size"], size
        logging.warning(
            "the generated images have the height and width %s, but the real images have %s: this "
            "difference affects the distance",
            *sizes,
        )
    few = [n for n in counts if n is not None and n < _FEW * extractor.width]
    if few:
        logging.warning(
            "there are only %d images for features of %d dimensions: the distance mostly depends "
            "on the number of images, so compare it only with distances for the same number",
            few[0],
            extractor.width,
        )
    card = card | {"reference": cards.reference_name(a, counts[0])}
    _report(cards.Scored(_scores(names, rows, real, lambda name: table.column(name, card)), card))


def _score_clip(folder: str) -> None:
    images.check_order(folder)
    prompts, clip = prompt_files.read(_PROMPTS.value or ""), _clip()
    generated = _of_images(folder, clip.image)
    skipped = (generated.card or {}).get("skipped")
    if generated.features is None or len(generated.features) != len(prompts) or skipped:
        n, broken = generated.gaussian.n, f" and {sum(skipped.values())} others" if skipped else ""
        raise ValueError(
            f"{folder} has {n} usable images{broken}, but --prompts={_PROMPTS.value} has "
            f"{len(prompts)} prompts: each prompt needs one usable image"
        )
    ids, encode, size = clip.tokenize(prompts), extractors.on_host(clip.text), _BATCH.value
    texts = np.concatenate([encode(ids[i : i + size]) for i in range(0, len(ids), size)])
    card = (generated.card or {}) | {"prompts": prompt_files.fingerprint(prompts)}
    # The model is part of the name, since ViT-L/14 and ViT-H/14 give different scores.
    column = lambda name: f"{name}_{clip.image.name}".replace("clip_score_clip_", "clip_score_")
    cosines = clip_score.cosines(generated.features, texts)
    scores = _scores(_metrics_of("clip"), {"clip": cosines}, None, column)
    if _REFERENCE.value:
        real = _of_images(_REFERENCE.value, clip.image)
        rows = {"clip_image": generated.features}
        scores |= _scores(_metrics_of("clip_image"), rows, real, column)
        card["reference"] = _REFERENCE.value
    _report(cards.Scored(scores, card))


def _metrics_of(kind: str) -> list[str]:
    return [name for name, metric in METRICS.items() if metric.features == kind]


def _scores(
    names: Sequence[str], rows: Mapping[str, Any], real: stats_files.Stats | None, column: Callable[[str], str]
) -> dict[str, float]:
    """Compute the metrics `names`; return their table columns, with intervals if --all is set.

    `rows` holds the features of the generated images, keyed by kind (Metric.features). `real` holds
    the statistics of the real images. `column` maps a metric's name to its column's name.
    """
    seed = {"seed": _SEED.value}
    options = {"kid": {"size": _SUBSET.value, **seed}, "fid_infinity": seed}
    prepare = functools.cache(lambda reference: reference(real))  # Takes seconds for FID.
    scores = {}
    for name in names:
        reference = METRICS[name].reference
        real_side = [prepare(reference)] if reference else []
        score = METRICS[name].score(rows[METRICS[name].features], *real_side, **options.get(name, {}))
        scores |= table.columns(column(name), score, seed=_SEED.value, interval=_ALL.value)
    return scores


def _network(more_levels: str = "") -> Callable[[], extractors.Extractor]:
    """Return a picklable function that loads the extractor chosen by the flags.

    `more_levels`, such as "+spatial", is appended to the name of Inception's level.
    """
    if _DINOV2.value:
        return functools.partial(dinov2.load, _DINOV2.value)
    level, mode = _DIMS.value + more_levels, _MODE.value or "pytorch"
    return functools.partial(extractors.load_inception, _WEIGHTS.value, mode, level)


def _clip() -> clip_towers.ClipExtractors:
    return clip_towers.load(_CLIP.value or "", preprocessing=_CLIP_MODE.value)


def _side(path: str, extractor: extractors.Extractor) -> stats_files.Stats:
    if not path.endswith(".npz"):
        return _of_images(path, extractor)
    stats = stats_files.read(path)
    if not _DINOV2.value:
        stats_files.check_mode(path, stats, _MODE.value or "", "--mode")
    stats_files.check(path, stats, extractor)
    if stats.card is None:
        logging.warning(
            "%s has no card: assuming the extractor %s with preprocessing %s",
            path,
            extractor.name,
            extractor.preprocessing,
        )
    return stats


def _of_images(path: str, extractor: extractors.Extractor) -> stats_files.Stats:
    """Return the statistics and features of the images at `path`, and their card.

    The features are computed on all devices of all processes.
    """
    opened = sharded_stats.ImageSet(path, extractor, _SIZE.value, _FIT.value)
    progress, mesh = Meter("images", len(opened)).reach, sharding.make_mesh()
    stream, skipped = extractors.extract(extractor, opened.source, mesh, batch_size=_BATCH.value, progress=progress)
    card = opened.card(stream.n, skipped)
    if card["skipped"]:
        details = len(opened), path, card["skipped"]
        logging.warning("skipped some of the %d images in %s, by reason: %s", *details)
    if not extractor.parts:
        return stats_files.Stats(stream.gaussian(), stream.features(), card)
    parts = extractors.split(extractor, stream.features())
    rows, spatial = parts.pop("inception"), parts.pop("inception_spatial")
    return stats_files.Stats(features.gaussian(rows), rows, card, spatial, parts)


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
    cli.run_with_arguments(main)
