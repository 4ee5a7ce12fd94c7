"""Download the data of the MLPerf benchmark, or prepare them from their sources (docs/mlperf.md).

    python -m sd_jax.prepare mlperf --out=mlperf
    python -m sd_jax.prepare laion --metadata=laion/metadata --out=laion/licensed
    python -m sd_jax.prepare captions --annotations=captions_val2014.json --out=val2014_30k.tsv
    python -m sd_jax.prepare images --captions=val2014_30k.tsv --images=val2014.zip --out=val2014
    python -m sd_jax.prepare miniature --out=miniature

Every command writes only complete files. The commands mlperf, laion and images skip existing files,
so if they are killed, run them again to continue. --dry_run prints what a command would do.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from diffusion_jax import cli, files
from diffusion_jax.data import engines
from sd_jax.mlperf import coco, download, laion, miniature


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name, such as mlperf or captions.

    Bad input ends the process with a one-line message and exit code 2.
    """
    cli.start(alone=True)
    options = _parser().parse_args(arguments)
    with cli.bad_input():
        options.run(options)


def _mlperf(options: argparse.Namespace) -> None:
    out = _out(options, options.out)
    for name in options.sets:
        if options.dry_run:
            base, hashes = download.read_list(options.source, name)
            absent = len(download.missing(out / name, hashes))
            print(f"would fetch {absent:,} of {len(hashes):,} files from {base} to {out / name}")
            continue
        threads, verify = options.threads, options.verify
        count = download.download(name, out, options.source, threads=threads, verify=verify)
        print(f"{out / name}: {count:,} files, all with the right hash")
    if download.CLIP in options.sets and not options.dry_run:
        download.fetch_tokenizer(out)
    print(*download.config_flags(out), sep="\n")


def _laion(options: argparse.Namespace) -> None:
    source, out = files.path(options.metadata), _out(options, options.out)
    tables = sorted(source.glob("*.parquet"))
    if not tables:
        raise FileNotFoundError(
            f"--metadata={source} holds no .parquet files: name the folder of LAION-400M's metadata"
        )
    engine, names = engines.of(options), tuple(table.name for table in tables)
    path = lambda number: out / names[number]
    if options.dry_run:
        missing = sum(not path(number).exists() for number in range(len(names)))
        print(f"would filter {missing} of {len(tables)} tables into {out}")
        return
    out.mkdir(parents=True, exist_ok=True)
    write = functools.partial(laion.filter_table, source, out, names)
    counts = engine.fill(range(len(names)), path, write, noun="tables")
    print(
        f"kept {counts['kept']:,} of {counts['read']:,} rows, those whose LICENSE is not "
        f"{laion.NONE!r}; {len(tables)} tables are in {out}"
    )


def _captions(options: argparse.Namespace) -> None:
    path, out = files.local(options.annotations), files.path(options.out)
    _out(options, out.parent)
    if not path.is_file():
        raise FileNotFoundError(f"--annotations={path} does not exist: name COCO's captions_val2014.json")
    chosen = coco.choose(coco.read_annotations(path), options.num)
    if options.dry_run:
        print(f"would write {len(chosen):,} captions to {out}")
        return
    files.write_whole(out, coco.to_tsv(chosen))
    print(f"{len(chosen):,} captions are in {out}")


def _images(options: argparse.Namespace) -> None:
    captions = coco.read_tsv(files.local(options.captions))
    out = _out(options, options.out)
    if options.dry_run:
        names = [coco.image_name(row.image_id) for row in captions]
        missing = sum(not (out / name).exists() for name in names)
        print(f"would resize {missing:,} of {len(captions):,} images to {coco.SIZE} pixels")
        return
    done = coco.squash_all(captions, files.local(options.images), out, options.threads)
    print(f"{done:,} images written; {len(captions):,} are in {out}")


def _miniature(options: argparse.Namespace) -> None:
    out = _out(options, options.out)
    if options.dry_run:
        print(f"would write captions, pictures, an Inception and a CLIP (0.1 GB) to {out}")
        return
    miniature.write(out)
    print(f"captions, pictures, and random weights of Inception and CLIP are in {out}")


def _out(options: argparse.Namespace, folder: files.Path) -> pathlib.Path:
    """Return the output folder. Except in a dry run, raises ValueError if it is not writable."""
    return files.path(folder) if options.dry_run else files.folder(folder, "--out")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sd_jax.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name, run, help):
        command = commands.add_parser(name, help=help, description=help)
        command.set_defaults(run=run)
        command.add_argument("--dry_run", action="store_true", help="print what would be done")
        return command.add_argument

    arg = add("mlperf", _mlperf, "Download the files that MLCommons publishes, and check hashes.")
    arg("--out", required=True, help="folder to write to; each set gets a subfolder")
    needed = [name for name in download.SETS if name != download.IMAGES]
    arg(
        "--sets",
        nargs="+",
        choices=[*download.SETS],
        default=needed,
        metavar="SET",
        help=f"sets to download, from {', '.join(download.SETS)}; default: all except "
        f"{download.IMAGES}, which a run does not need",
    )
    arg(
        "--source",
        default=download.SOURCE,
        help="URL of the folder with the file lists, such as a mirror; may be gs:// or s3://",
    )
    arg("--threads", type=int, default=4, help="number of files to download at once")
    arg("--verify", action="store_true", help="check the hashes of existing files again")

    arg = add("laion", _laion, "Keep the rows of LAION-400M's tables that have a licence.")
    arg("--metadata", required=True, help="folder with LAION-400M's parquet files")
    arg("--out", required=True, help="folder for the filtered files, which keep their names")
    engines.add_arguments(arg)

    arg = add("captions", _captions, "Write MLPerf's table of 30,000 COCO captions.")
    arg("--annotations", required=True, help="path of COCO's captions_val2014.json")
    arg("--out", required=True, help="path of the table to write, a .tsv file")
    arg("--num", type=int, default=coco.NUMBER, help="number of captions")

    arg = add("images", _images, "Resize the images of the captions to 512 by 512 pixels.")
    arg("--captions", required=True, help="the table that the command captions writes")
    arg("--images", required=True, help="val2014.zip, or the folder that it unpacks to")
    arg("--out", required=True, help="folder for the images")
    arg("--threads", type=int, default=8, help="number of images to resize at once")

    arg = add("miniature", _miniature, "Write tiny data and networks for a test run on a laptop.")
    arg("--out", required=True, help="folder to write to")
    return parser


if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()  # absl's logging needs this; argparse reads the arguments.
    with cli.interruptible():
        main(sys.argv[1:])
